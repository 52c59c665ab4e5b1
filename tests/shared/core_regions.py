"""Regions of the core, for tests that use it without the public class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch_memory_saver import _core


@contextlib.contextmanager
def core_region(tag: str, backup: int, managed: bool = True, host_policy: int = 0, runs: bool = True) -> Iterator[int]:
    """Enters a region on this thread and leaves it at the end. Yields its id."""
    identity = _core.region_enter(tag, backup, managed, host_policy, runs)
    try:
        yield identity
    finally:
        _core.region_leave(identity)


def leave_all_regions(core: Any) -> None:
    """Leaves every region of this thread, whose ids are not known: ids are consecutive numbers of the process."""
    identity = core.region_enter("left at once", core.BACKUP_NONE, True)
    while core.region_current().depth:
        core.region_leave(identity)
        identity -= 1
