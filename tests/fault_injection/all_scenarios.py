"""The list of all scenarios: importing the modules registers theirs."""

from __future__ import annotations

import scenarios_of_allocations
import scenarios_of_guard_mode
import scenarios_of_host_memory
import scenarios_of_live_bytes
import scenarios_of_pauses
import scenarios_of_pending_resumes
import scenarios_of_queries
import scenarios_of_runs
import scenarios_of_shared_backups
from scenario import SCENARIOS

__all__ = [
    "SCENARIOS",
    "scenarios_of_allocations",
    "scenarios_of_guard_mode",
    "scenarios_of_host_memory",
    "scenarios_of_live_bytes",
    "scenarios_of_pauses",
    "scenarios_of_pending_resumes",
    "scenarios_of_queries",
    "scenarios_of_runs",
    "scenarios_of_shared_backups",
]
