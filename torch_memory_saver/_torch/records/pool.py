"""The record of a memory pool of PyTorch with this package's allocator, and the key of an idle pool."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda
from torch_memory_saver.options import RegionOptions

__all__ = ["OBJECT_USES", "Key", "Pool"]

#: The uses that PyTorch counts for a pool that nothing routes and no graph needs: that of its object.
OBJECT_USES = 1


class Key(NamedTuple):
    """The key of an idle pool: the region's options and the device. Its fields are read by name. It is a tuple, because
    every entry of a region searches for one for each device."""

    options: RegionOptions
    device: int


class Pool:
    """One torch.cuda.MemPool with its key and state."""

    __slots__ = (
        "blocks",
        "bytes",
        "epoch",
        "exits_since_scan",
        "frees_at_scan",
        "id",
        "idle_at_scan",
        "key",
        "live",
        "memory_pool",
        "retirement",
        "route",
        "scans_without_growth",
        "segments_at_pause",
    )

    def __init__(self, memory_pool: Any, key: Key) -> None:
        self.memory_pool = memory_pool
        self.id: PoolId = memory_pool.id
        self.key = key
        self.route = key.device, self.id  # what PyTorch's routing functions take
        self.retirement: Iterator[functools.partial[Any]] | None = None  # the remaining steps
        self.epoch = 0  # number of pauses of the tag when this pool was last entered
        self.bytes = self.blocks = 0  # size of its segments and number of their blocks at the last :meth:`scan`
        self.live = True  # whether it held a tensor when it was last decided whether to retire it
        self.scans_without_growth = 0  # number of scans in a row that found the same size
        self.exits_since_scan = 0  # number of regions that have ended since the last :meth:`scan`
        self.idle_at_scan = 0  # bytes of idle segments that empty_cache() left (last_scan.py); 0 if entered since
        self.frees_at_scan = 0  # number of frees of managed memory that the core had counted before then
        self.segments_at_pause: tuple[int, frozenset[int]] = -1, frozenset()  # number of a pause, addresses of segments

    @property
    def device(self) -> int:
        return self.key.device

    def scan(self, torch: TorchCuda) -> list[dict[str, Any]]:
        """Return PyTorch's segments of the pool, and note how many there are."""
        segments = torch.segments(self.id)
        size = sum([segment["total_size"] for segment in segments])
        self.scans_without_growth = self.scans_without_growth + 1 if size == self.bytes else 0
        self.bytes, self.blocks, self.exits_since_scan = size, sum([len(segment["blocks"]) for segment in segments]), 0
        return segments

    def had_segment_at(self, torch: TorchCuda, address: int, epoch: int) -> bool:
        """Return whether a segment of the pool was at the address at pause number `epoch` of its tag. The pool was not
        entered since. PyTorch is queried once for each pause, so a segment that was released since may count as well."""
        if self.segments_at_pause[0] != epoch:
            self.segments_at_pause = epoch, frozenset([segment["address"] for segment in torch.segments(self.id)])
        return address in self.segments_at_pause[1]
