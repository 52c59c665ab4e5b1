"""The list of scenarios, and their common parts: each makes its allocations and returns the step under test (steps.py).

`fresh` ones run each time in a new process that has not used the library yet. The worker gives every other scenario a thread
with device 0's context current, as PyTorch does, and device 1 in use. This module imports nothing that uses the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from step import Step
    from world import World

NONE, PINNED, MMAP, DISK, SHARED = range(5)
RELEASE, POOL, RETAIN = 1, 2, 3
#: Kinds of backup that one process keeps for itself, by the end of a scenario's name.
KINDS = {"without_backup": NONE, "with_pinned_backup": PINNED, "with_mmap_backup": MMAP, "with_disk_backup": DISK}

#: Two pieces of physical memory for the large one; neither size is a whole number of pages.
SMALL, LARGE = 1_000_003, (2 << 20) + 70_001


#: Calls before host memory is released on another thread. If one fails, the next call of the library tries again.
RELEASING = frozenset({"cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"})


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[Any], Any]
    fresh: bool = False


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, fresh: bool = False) -> Callable[[Callable[[World], Step]], Callable[[World], Step]]:
    def add(prepare: Callable[[World], Step]) -> Callable[[World], Step]:
        SCENARIOS[name] = Scenario(prepare, fresh)
        return prepare

    return add
