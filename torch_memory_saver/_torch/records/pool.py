"""A memory pool of PyTorch with this package's allocator, its key, and what was noted of it."""

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
    every entry of a region looks up one for each device."""

    options: RegionOptions
    device: int


class Pool:
    """One torch.cuda.MemPool with its key and state."""

    __slots__ = (
        "blocks",
        "bytes",
        "epoch",
        "frees",
        "fruitless",
        "id",
        "kept",
        "key",
        "listed",
        "live",
        "memory_pool",
        "retirement",
        "route",
        "unseen",
    )

    def __init__(self, memory_pool: Any, key: Key) -> None:
        self.memory_pool = memory_pool
        self.id: PoolId = memory_pool.id
        self.key = key
        self.route = key.device, self.id  # what PyTorch's routing functions take
        self.retirement: Iterator[functools.partial[Any]] | None = None  # the remaining steps
        self.epoch = 0  # number of pauses of the tag when this pool was last entered
        self.bytes = self.blocks = 0  # of its segments, and their blocks, at the last look for idle ones
        self.live = True  # whether it held a tensor when it was last decided whether to retire it
        self.fruitless = 0  # looks in a row since it has grown
        self.unseen = 0  # regions that have ended since the last look
        self.kept = 0  # bytes of idle segments that the last look of empty_cache() has left; 0 if it was entered since
        self.frees = 0  # frees of managed memory that the core had counted before that look
        self.listed: tuple[int, frozenset[int]] = -1, frozenset()  # number of a pause, and addresses of segments after it

    @property
    def device(self) -> int:
        return self.key.device

    def look(self, torch: TorchCuda) -> list[dict[str, Any]]:
        """Return PyTorch's segments of the pool, and note how many there are."""
        segments = torch.segments(self.id)
        size = sum([segment["total_size"] for segment in segments])
        self.fruitless = self.fruitless + 1 if size == self.bytes else 0
        self.bytes, self.blocks, self.unseen = size, sum([len(segment["blocks"]) for segment in segments]), 0
        return segments

    def had(self, torch: TorchCuda, address: int, epoch: int) -> bool:
        """Return whether a segment of the pool, which was not entered since, was at the address at pause number `epoch` of
        its tag. PyTorch is queried once for each pause, so a segment that was released since counts as well."""
        if self.listed[0] != epoch:
            self.listed = epoch, frozenset([segment["address"] for segment in torch.segments(self.id)])
        return address in self.listed[1]
