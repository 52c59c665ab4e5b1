"""Blocks that rise in the active-memory timeline from moment to moment, and the memory that grew below them.

PyTorch's page memory_viz draws the live blocks of a device as layers, each on top of those that were allocated before it.
The *position* of a block is the bytes below it. The address of a block never moves. Its position rises if memory that was
allocated before it grows, which is only possible if the block itself is freed and allocated again.

Blocks are matched by call stack, size and order of allocation: the third block of 512 MiB from a stack is compared with the
third of the next moment. Blocks rise if the program allocates them again (an optimizer's state that is loaded for each step,
say) while memory that it allocated before stays. So drift shows a leak where the leak itself is small beside them.

The order comes from the recorded history. The history is bounded, so the event of an old block may be gone: such a block is
older than all blocks that have an event. Blocks without an event keep the order that an earlier snapshot of the process
showed. Blocks that no earlier snapshot shows are ordered by address, after those that were there earlier.

The module owns the order and the matching. It reads snapshots only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from torch_memory_saver._stacks import CallStack

from ..model import Block, Event, Snapshot
from .processes import Process, Series

__all__ = ["Drift", "allocation_orders", "drifts", "positions"]

#: Number of stacks that are named because they grew below a block.
_NAMED_BELOW = 5
#: Number of drifts that are described for each device: those with the most bytes. Finding the memory below each drift takes
#: a pass over all blocks.
_MAX_DRIFTS = 50
#: The events that end a block. PyTorch 2.0 calls the second "free".
_ENDS = ("free_completed", "free")


@dataclass(frozen=True)
class Drift:
    """Blocks of one size from one call stack whose positions rose in every interval.

    Attributes:
        process: The process.
        device: The CUDA ordinal.
        stack: The call stack that allocated the blocks.
        bytes: The requested size of each block.
        blocks: The number of blocks that rose.
        positions: The live bytes below the first of them, at each moment.
        below: The call stacks that grew below the first of them, and by how many bytes from the first moment to the
            last; the largest first.
    """

    process: Process
    device: int
    stack: CallStack
    bytes: int
    blocks: int
    positions: tuple[int, ...]
    below: tuple[tuple[CallStack, int], ...]

    @property
    def rise(self) -> int:
        """Growth of the position from the first moment to the last, in bytes."""
        return self.positions[-1] - self.positions[0]


def drifts(series: Series) -> Iterator[Drift]:
    """Yield the drifts of a process, device by device, those with the most bytes first."""
    if len(series.snapshots) < 2:
        return
    for device in series.devices:
        orders = allocation_orders(series.snapshots, device)
        risen = _risen([_places(order) for order in orders])
        risen.sort(key=lambda rise: (-rise.kind.bytes * rise.blocks, -rise.first[-1].below))
        for rise in risen[:_MAX_DRIFTS]:
            yield Drift(
                process=series.process,
                device=device,
                stack=rise.kind.stack,
                bytes=rise.kind.bytes,
                blocks=rise.blocks,
                positions=tuple(place.below for place in rise.first),
                below=_grown_below(orders, [place.number for place in rise.first]),
            )


class _Kind(NamedTuple):
    """The key by which blocks are matched: the call stack and the requested size.

    The requested size is used because a block may be the larger rest of a free one.
    """

    stack: CallStack
    bytes: int


class _Place(NamedTuple):
    """The place of a block in an allocation order: the number of blocks below it, and their bytes."""

    number: int
    below: int


class _Rise(NamedTuple):
    """Blocks of a kind that rose: how many, and the places of the first of them at each moment."""

    kind: _Kind
    blocks: int
    first: tuple[_Place, ...]


def _places(order: Sequence[Block]) -> dict[_Kind, list[_Place]]:
    """Return the places of the blocks of each kind, in the order of their allocation."""
    places: dict[_Kind, list[_Place]] = {}
    for number, (block, below) in enumerate(zip(order, positions(order), strict=True)):
        places.setdefault(_Kind(block.stack, block.requested_bytes), []).append(_Place(number, below))
    return places


def _risen(moments: Sequence[dict[_Kind, list[_Place]]]) -> list[_Rise]:
    risen = []
    for kind in moments[0]:
        matched = zip(*(places.get(kind, ()) for places in moments), strict=False)
        rising = [block for block in matched if all(before.below < after.below for before, after in pairwise(block))]
        if rising:
            risen.append(_Rise(kind, len(rising), rising[0]))
    return risen


def _grown_below(orders: Sequence[Sequence[Block]], numbers: Sequence[int]) -> tuple[tuple[CallStack, int], ...]:
    """Return the call stacks that have more bytes below a block at the last moment than at the first."""
    change: Counter[CallStack] = Counter()
    for order, number, sign in ((orders[0], numbers[0], -1), (orders[-1], numbers[-1], 1)):
        for block in islice(order, number):
            change[block.stack] += sign * block.bytes
    return tuple((stack, size) for stack, size in change.most_common(_NAMED_BELOW) if size > 0)


def allocation_orders(snapshots: Sequence[Snapshot], device: int) -> list[list[Block]]:
    """Return the live blocks of one device in the order of their allocation, for each snapshot of one process."""
    orders: list[list[Block]] = []
    for snapshot in snapshots:
        orders.append(_order(snapshot, device, orders[-1] if orders else []))
    return orders


def positions(order: Iterable[Block]) -> list[int]:
    """Return the bytes below each block of an allocation order."""
    return list(accumulate((block.bytes for block in order), initial=0))[:-1]


def _order(snapshot: Snapshot, device: int, earlier: Sequence[Block]) -> list[Block]:
    allocated = _last_allocations(snapshot.events.get(device, ()))
    known = {(block.address, block.bytes, block.stack): at for at, block in enumerate(earlier)}

    def key(block: Block) -> tuple[int, int]:
        event = allocated.get(block.address)
        if event is not None:
            return 2, event
        place = known.get((block.address, block.bytes, block.stack))
        return (1, block.address) if place is None else (0, place)

    return sorted(snapshot.live_blocks(device), key=key)


def _last_allocations(events: Iterable[Event]) -> dict[int, int]:
    """Return, for each address, the number of the event that allocated the block that is there at the end."""
    found: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            found[event.address] = number
        elif event.action in _ENDS:
            found.pop(event.address, None)
    return found
