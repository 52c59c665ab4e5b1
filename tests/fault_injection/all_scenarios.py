"""The list of all scenarios: importing the modules registers theirs."""

from __future__ import annotations

import scenarios
import scenarios_of_allocations
import scenarios_of_host_memory
import scenarios_of_looks
from scenario import SCENARIOS

__all__ = ["SCENARIOS", "scenarios", "scenarios_of_allocations", "scenarios_of_host_memory", "scenarios_of_looks"]
