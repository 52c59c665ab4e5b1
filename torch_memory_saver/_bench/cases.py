"""All cases, in the order in which they run, and the rows that compare two shapes of one case, or a case with the C++
package's."""

from __future__ import annotations

from collections.abc import Iterable

from .figures import Row, parity_rows, peer_rows
from .graph_cases import Decode
from .guard_cases import Guard
from .handle_cases import Cycles, Model
from .host_cases import LARGE, SMALL, FirstPause, HostMemory, Mmap, Pooled, Release, Retained, TwoDevices
from .live_cases import LiveBytes, LiveBytesOfTorch
from .other_cases import Disk, Dropped, WakeUp
from .overhead_cases import AllocateOverhead, ImportTime, RegionOverhead, StatsOverhead
from .preserve_cases import Preserve
from .setting import Case
from .share_cases import Send, Synchronise
from .slack_cases import Churn, Slack
from .snapshot_cases import Snapshot

__all__ = ["CASES", "find", "with_comparisons"]

CASES: tuple[Case, ...] = (
    Dropped(),
    Cycles(),
    Model(),
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
    Slack(),
    Churn(),
    RegionOverhead(),
    StatsOverhead(),
    ImportTime(),
)
#: Where many small allocations must be about as fast per byte as a few large ones: the least speed of the small shape, as a
#: part of the large shape's.
_PARITY = {
    (case, operation): 0.95 for case in ("first", "release", "pooled", "retained") for operation in ("pause", "resume")
}
_PARITY |= {(case, "pause"): 0.96 for case in ("pooled", "retained")}


def find(name: str) -> Case | None:
    """The case of that name; None if there is none."""
    return next((case for case in CASES if case.name == name), None)


def with_comparisons(rows: Iterable[Row], scale: float) -> list[Row]:
    """`rows`, followed by those that compare the small shape of a case with its large shape, and ours with the C++ package's
    times."""
    rows = list(rows)
    small, large = str(SMALL.scaled(scale)), str(LARGE.scaled(scale))
    gains = {(case.name, operation): gain for case in CASES for operation, gain in case.peer_gains.items()}
    return [*rows, *parity_rows(rows, _PARITY, small, large), *peer_rows(rows, gains)]
