"""Measure how full a pool is, and decide whether it is worth retiring.

Free bytes in partly used segments of a retired pool are *stranded*: nothing can use them until the last tensor of the
segment is deleted. So :func:`is_worth_retiring` compares what a retirement returns with what it strands, for pauses, for the
ends of regions, and for ``empty_cache()``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda

__all__ = ["Fill", "has_idle_segment", "has_idle_segment_at", "is_worth_retiring", "measure_fill"]

#: The bytes that a pool may strand for any idle segments that are larger: PyTorch's smallest segments of large and of small
#: tensors, 20 MiB and 2 MiB, of which each pool with one tensor of each kind has one.
_SMALL_LOSS = 22 << 20


class Fill(NamedTuple):
    """The fill of the segments of a pool.

    Attributes:
        idle: Bytes of the segments without a tensor.
        free: Free bytes of the segments with a tensor.
        live: Whether there are segments with a tensor.
    """

    idle: int
    free: int
    live: bool


def measure_fill(segments: Iterable[Mapping[str, Any]]) -> Fill:
    """Return how full segments of PyTorch's snapshot are. A block that waits for a stream counts as a tensor."""
    idle = free = 0
    live = False
    for segment in segments:
        # No generators: an exception of a signal handler inside one would be dropped where it is closed.
        unused = sum([block["size"] for block in segment["blocks"] if block["state"] == "inactive"])
        if not [block for block in segment["blocks"] if block["state"] != "inactive"]:
            idle += segment["total_size"]
        else:
            free += unused
            live = True
    return Fill(idle, free, live)


def is_worth_retiring(fill: Fill, stranded: int) -> bool:
    """Decide whether a pool is to be retired: whether that returns more memory than it strands.

    A pool without a tensor is, if it holds memory. Another one is only if its idle segments are larger than its loss, which
    is the free bytes of its partly used segments and what earlier retirements have stranded. A loss of more than 22 MiB has
    to return twice as much: a program that uses a temporary in each region leaves an idle segment that is hardly larger than
    the free part of the segment in which it keeps the rest, and would otherwise strand that part in each cycle.

    Args:
        fill: How full the pool is.
        stranded: Free bytes of the retired pools of the same tag and device.
    """
    if not fill.live:
        return fill.idle > 0
    loss = fill.free + stranded
    return fill.idle > loss and (loss <= _SMALL_LOSS or fill.idle > 2 * loss)


def has_idle_segment(segments: list[dict[str, Any]]) -> bool:
    """Return whether retiring a pool with these segments releases memory to the driver."""
    return bool([row for row in segments if not [block for block in row["blocks"] if block["state"] != "inactive"]])


def has_idle_segment_at(torch: TorchCuda, pools: Collection[PoolId], addresses: Collection[int]) -> bool:
    """Return whether one of the pools has a segment without a tensor at one of the addresses."""
    return (
        bool(addresses)
        and bool(pools)
        and any(
            segment["address"] in addresses
            and tuple(segment.get("segment_pool_id", ())) in pools
            and all(block["state"] == "inactive" for block in segment["blocks"])
            for segment in torch.segments()
        )
    )
