"""All cases, in the order in which they run, and the parity rows, which compare two shapes of one case."""

from __future__ import annotations

from collections.abc import Iterable

from .figures import Row, parity_rows
from .graph_cases import Decode
from .guard_cases import Guard
from .host_cases import LARGE, SMALL, FirstPause, HostMemory, Mmap, Pooled, Release, Retained, TwoDevices
from .live_cases import LiveBytes, LiveBytesOfTorch
from .other_cases import Disk, Dropped, WakeUp
from .overhead_cases import AllocateOverhead, ImportTime, RegionOverhead, StatsOverhead
from .preserve_cases import Preserve
from .setting import Case
from .share_cases import Send, Synchronise
from .snapshot_cases import Snapshot

__all__ = ["CASES", "find", "with_parity"]

CASES: tuple[Case, ...] = (
    Dropped(),
    FirstPause(),
    Release(),
    Pooled(),
    Retained(),
    LiveBytes(),
    LiveBytesOfTorch(),
    Mmap(),
    Disk(),
    TwoDevices(),
    WakeUp(),
    Synchronise(),
    Send(),
    Decode(),
    Guard(),
    Preserve(),
    Snapshot(),
    HostMemory(),
    AllocateOverhead(),
    RegionOverhead(),
    StatsOverhead(),
    ImportTime(),
)
#: Cases in which many small allocations must be about as fast per byte as a few large ones.
_PARITY_CASES = ("first", "release", "pooled", "retained")
#: The least speed of the small shape, as a part of the large shape's.
_PARITY_AT_LEAST = 0.95


def find(name: str) -> Case | None:
    """The case of that name; None if there is none."""
    return next((case for case in CASES if case.name == name), None)


def with_parity(rows: Iterable[Row], scale: float) -> list[Row]:
    """`rows`, followed by the rows that compare the small shape of a case with its large shape."""
    rows = list(rows)
    small, large = str(SMALL.scaled(scale)), str(LARGE.scaled(scale))
    return [*rows, *parity_rows(rows, _PARITY_CASES, small, large, _PARITY_AT_LEAST)]
