"""Every scenario there is: importing the modules puts theirs on the list."""

from __future__ import annotations

import scenarios
import scenarios_of_allocations
from scenario import SCENARIOS

__all__ = ["SCENARIOS", "scenarios", "scenarios_of_allocations"]
