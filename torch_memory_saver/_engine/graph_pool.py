"""A pool for CUDA graphs that a program captures by itself, with ``torch.cuda.graph(pool=...)`` in a region.

`cuda_graph()` chooses and keeps the pools of its captures (cuda_graph.py). This class is for callers that only say which
pool a capture uses, and that do not learn of the graph or its end.

Any thread may call. There is no lock.
"""

from __future__ import annotations

from torch_memory_saver._engine.process import pool_store
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.layer import PoolId
from torch_memory_saver._torch.records.pool import Key
from torch_memory_saver.options import RegionOptions

__all__ = ["GraphPool"]


class GraphPool:
    """A pool of the current device with this package's allocator.

    A capture into it has to be inside a region of the tag. Without a release the pool lives as long as the process.
    """

    def __init__(self, tag: str) -> None:
        self._torch = layer.require()
        key = Key(RegionOptions.check(tag), self._torch.current_device())
        self._pool = pool_store.idle_pools.make_pool(self._torch, key)

    @property
    def id(self) -> PoolId:
        """The pool's token for ``torch.cuda.graph``."""
        return self._pool.id

    def release(self) -> bool:
        """Give the pool up if no graph uses it. Its memory is released with the next emptying of the cache.

        Returns:
            Whether the pool has been given up.
        """
        if self._torch.uses_of(self._pool.memory_pool) > 1:
            return False
        pool_store.idle_pools.retire_later(self._pool)
        return True
