"""Call stacks whose live memory grows from moment to moment.

*Leak*: the live bytes of a call stack never fell, grew in two intervals at least, and their growth goes on at the end.
*Warm-up*: they grew, never fell, and grew once only or have stopped: lazily created state, or a cache that has filled.
*Varying*: they also fell. Two moments cannot show whether growth is a leak or a warm-up: memory that is larger at the second
one has only *grown*.

A leak may grow in each second or third step only. So growth has stopped once it has paused for as many intervals as a third
of the moments, and for as many as it took from one growth to the next before.

The module owns these words. Bytes and blocks are counted for each process, device and call stack. Stacks with equal Python
frames are one stack, even if the C++ frames between them differ.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch_memory_saver._stacks import CallStack

from ..model import Snapshot
from .processes import Process, Series

__all__ = ["GrowthKind", "StackGrowth", "classify", "stack_growths"]

#: Number of intervals in which a leak grew, at least.
_GROWTHS_OF_A_LEAK = 2
#: Growth that paused for this share of the moments has stopped.
_STOPPED = 1 / 3


class GrowthKind(enum.Enum):
    """The way in which the live bytes of a call stack changed."""

    LEAK = "leak"
    WARM_UP = "warm-up"
    VARYING = "varying"
    GROWN = "grown"
    STEADY = "steady"


@dataclass(frozen=True)
class StackGrowth:
    """The live memory of one call stack, in one process and on one device.

    Attributes:
        process: The process.
        device: The CUDA ordinal.
        stack: The call stack that allocated the memory.
        bytes: The live bytes at each moment of the process.
        blocks: The number of live blocks at each moment.
        requested_bytes: The bytes that the program requested for the live blocks, at each moment.
        kind: The kind of growth of the requested bytes. The allocator may give the same request a larger block at one time
            than at another.
    """

    process: Process
    device: int
    stack: CallStack
    bytes: tuple[int, ...]
    blocks: tuple[int, ...]
    requested_bytes: tuple[int, ...]
    kind: GrowthKind

    @property
    def growth(self) -> int:
        """Growth of the live bytes from the first moment to the last."""
        return self.bytes[-1] - self.bytes[0]

    @property
    def intervals(self) -> tuple[int, ...]:
        """The change of the bytes in each interval."""
        return tuple(after - before for before, after in pairwise(self.bytes))

    @property
    def grew_last(self) -> bool:
        """Whether the requested bytes grew in the last interval."""
        return len(self.requested_bytes) > 1 and self.requested_bytes[-1] > self.requested_bytes[-2]


def classify(values: Sequence[int]) -> GrowthKind:
    """Return the kind of growth of live bytes, given one value for each moment."""
    changes = [after - before for before, after in pairwise(values)]
    if not any(changes):
        return GrowthKind.STEADY
    if any(change < 0 for change in changes):
        return GrowthKind.VARYING
    if len(changes) == 1:
        return GrowthKind.GROWN
    return GrowthKind.LEAK if _goes_on(changes) else GrowthKind.WARM_UP


def _goes_on(changes: Sequence[int]) -> bool:
    """Return whether changes, none of which is negative, show growth that has not stopped."""
    grew = [at for at, change in enumerate(changes) if change > 0]
    if len(grew) < _GROWTHS_OF_A_LEAK:
        return False
    longest = max(after - before for before, after in pairwise(grew))
    since = len(changes) - 1 - grew[-1]
    return since < max(int((len(changes) + 1) * _STOPPED), longest)


def stack_growths(series: Series) -> Iterable[StackGrowth]:
    """Yield every call stack of a process, device by device, in no particular order."""
    for device in series.devices:
        totals = [_by_stack(snapshot, device) for snapshot in series.snapshots]
        for stack in dict.fromkeys(stack for total in totals for stack in total):
            sizes, blocks, requested = zip(*(total.get(stack, _NOTHING) for total in totals), strict=True)
            yield StackGrowth(series.process, device, stack, sizes, blocks, requested, classify(requested))


class _Total(NamedTuple):
    """Live memory of one call stack at one moment."""

    bytes: int
    blocks: int
    requested_bytes: int


_NOTHING = _Total(0, 0, 0)


def _by_stack(snapshot: Snapshot, device: int) -> dict[CallStack, _Total]:
    totals: dict[CallStack, _Total] = {}
    for block in snapshot.live_blocks(device):
        total = totals.get(block.stack, _NOTHING)
        totals[block.stack] = _Total(
            total.bytes + block.bytes, total.blocks + 1, total.requested_bytes + block.requested_bytes
        )
    return totals
