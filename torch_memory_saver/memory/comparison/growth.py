"""Which call stacks have more live memory from moment to moment.

*Leak*: the live bytes of a call stack grew in every interval, and there are two intervals at least. *Warm-up*: they
grew, never fell, and did not grow in some interval: lazily created state, or a cache that has filled. *Varying*: they
also fell. Of two moments nothing of that can be said: what is more then has only *grown*.

Owns these words. Bytes and blocks are counted a process, device and call stack; equal Python frames are one stack,
whatever C++ frames lie between.
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

#: Growth in every one of so many intervals is a leak.
_INTERVALS_OF_A_LEAK = 2


class GrowthKind(enum.Enum):
    """How the live bytes of a call stack changed."""

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
        stack: Where the memory was allocated.
        bytes: The live bytes at each moment of the process.
        blocks: The number of live blocks at each moment.
        requested_bytes: What the program asked for of these.
        kind: What the requested bytes say. The allocator may give a request a larger block one time than another.
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
        """Bytes from the first moment to the last."""
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
    """The kind of growth of live bytes, one value a moment."""
    changes = [after - before for before, after in pairwise(values)]
    if not any(changes):
        return GrowthKind.STEADY
    if any(change < 0 for change in changes):
        return GrowthKind.VARYING
    if len(changes) < _INTERVALS_OF_A_LEAK:
        return GrowthKind.GROWN
    return GrowthKind.LEAK if all(change > 0 for change in changes) else GrowthKind.WARM_UP


def stack_growths(series: Series) -> Iterable[StackGrowth]:
    """Every call stack of a process, device by device, in no order."""
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
