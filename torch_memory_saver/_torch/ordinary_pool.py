"""Memory for the objects that PyTorch keeps and shares between the memory of all tags: ordinary memory that is used for
nothing else.

PyTorch allocates such an object from whatever pool is in force on the thread when it is first needed. Here this thread
allocates from a pool of ordinary memory, whether it is in a region or not, and whether ``TMS_INIT_ENABLE`` manages PyTorch's
own pool or not. These pools are never retired. So PyTorch neither returns their free blocks to the driver nor hands them out
for anything else: the addresses of an object that was freed stay valid, which captured graphs rely on (blas_workspaces.py).

A pool is routed by one thread at a time. Threads that need one at the same time use different pools. No lock: a list of idle
pools changes by single operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_memory_saver._torch import region_settings
from torch_memory_saver._torch.layer import TorchCuda
from torch_memory_saver._torch.pools import Key, Pool, PoolStore
from torch_memory_saver.options import DEFAULT_TAG, RegionOptions

__all__ = ["OrdinaryPools"]

_OPTIONS = RegionOptions.disabled(DEFAULT_TAG)


class OrdinaryPools:
    """The pools of the process. Any thread may call."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._idle: dict[int, list[Pool]] = {}

    def after_fork_in_child(self) -> None:
        """Forgets the parent's pools, which a forked child cannot use."""
        self._idle = {}

    @contextlib.contextmanager
    def routed(self, torch: TorchCuda, device: int) -> Iterator[None]:
        """Inside, this thread's allocations on the device come from a pool of ordinary memory, and its regions are not in
        force."""
        idle = self._idle.setdefault(device, [])
        try:
            pool = idle.pop()
        except IndexError:
            pool = self._store.make_pool(torch, Key(_OPTIONS, device))
        try:
            with region_settings.RegionSettings(_OPTIONS), self._store.routing_suspended(torch):
                torch.begin_routing(device, pool.id)
                try:
                    yield
                finally:
                    torch.end_routing(device, pool.id)
                    torch.release_pool(device, pool.id)
        finally:
            idle.append(pool)
