"""The order in which live blocks were allocated, and so their positions in the active-memory timeline.

PyTorch's page memory_viz draws the live blocks of a device as layers, each on top of those that were allocated before
it. The *position* of a block is the bytes below it. Its address never moves; its position rises if memory allocated
before it grows, which it can only if the block itself is freed and allocated anew.

The order comes from the recorded history. It is bounded, so the event of an old block may be gone: such a block is
older than all that have one. Blocks without an event keep the order that an earlier snapshot of the process showed;
what no snapshot shows lies by address, after those that were there earlier.

Owns that order. Knows nothing of growth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from ..model import Block, Event, Snapshot

__all__ = ["allocation_orders", "positions"]

#: The events that end a block. PyTorch 2.0 calls the second "free".
_ENDS = ("free_completed", "free")


def allocation_orders(snapshots: Sequence[Snapshot], device: int) -> list[list[Block]]:
    """The live blocks of one device in the order of their allocation, for each snapshot of one process."""
    orders: list[list[Block]] = []
    for snapshot in snapshots:
        orders.append(_order(snapshot, device, orders[-1] if orders else []))
    return orders


def positions(order: Iterable[Block]) -> list[int]:
    """The bytes below each block of an allocation order."""
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
    """The number of the event that allocated what lies at an address at the end."""
    found: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.action == "alloc":
            found[event.address] = number
        elif event.action in _ENDS:
            found.pop(event.address, None)
    return found
