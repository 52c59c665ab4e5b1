"""Give devices that the process begins to use later access to managed memory, without a call by the program. In preload mode
an interposed function does that; this module is for torch mode.

PyTorch allocates on a device before it copies between that device and another one. So every visible device that is not in
use is *watched*: the allocations of every thread on it are routed to a pool whose allocator returns ordinary memory
(``tms_torch_ordinary_malloc``). The first of them gives the device access before it returns. So every later operation has
access, even one by PyTorch's C++ code: copies, autograd, collectives, DataParallel. Then the main thread calls
:meth:`LateDevices.end` between two of its instructions, which ends the routing, and later allocations come from PyTorch's
own pool. Tensors that were allocated meanwhile stay valid. Once they are deleted, the next ``empty_cache()`` releases their
memory.

Watching makes no driver call. Regions and other pools that are routed later on a watched device take precedence. A managed
allocation on it ends the watch as well. A device gets access and its watch ends before a capture on it begins, whose graph
has a pool of its own, and before ``empty_cache()`` if the device has come into use: the main thread may wait in a call for
a long time, and PyTorch returns nothing of a device while a pool is routed there.

Not watched are:

- the device that is current at the first use, which is about to be used;
- any device with a PyTorch before 2.10, where the pool that is routed first takes precedence (pytorch issue 161193);
- any device once the program makes a MemPool of its own, because PyTorch before 2.13 ends the process when a MemPool is
  destroyed while another is routed on its device (pull request 181830). The devices that are in use then get access.

There, and where only other libraries allocate on a device, ``enable_peer_access()`` or the next region gives access.

There is no lock: the table of watched devices changes by single operations of a dict. PyTorch is called without any lock.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._patches import is_replaced, replace
from torch_memory_saver._torch.binding.captures import before_capture
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda
from torch_memory_saver._torch.pools.retirement import before_emptying, retire_at_emptying
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["LateDevices"]

logger = logging.getLogger("torch_memory_saver")


class _WatchPool:
    """The pool of a watched device, in the form that retirement.py retires."""

    def __init__(self, memory_pool: Any, device: int) -> None:
        self.memory_pool = memory_pool
        self.id: PoolId = memory_pool.id
        self.device = device
        self.retirement: Any = None
        self._routed: list[None] = []
        #: The thread that acquires it retires the pool. Never released.
        self.retiring = threading.Lock()

    @property
    def is_routed(self) -> bool:
        return bool(self._routed)

    def route(self, torch: TorchCuda) -> None:
        _core.record_each(self._routed, torch.begin_routing_of_all_threads, [(self.device, self.id)])


class LateDevices:
    """The watched devices of this process."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Forget the parent's pools, which a forked child cannot use."""
        self._torch: TorchCuda | None = None
        self._pools: dict[int, _WatchPool] = {}
        self._has_begun = False

    def begin(self, torch: TorchCuda) -> None:
        """Watch the devices that are not in use, unless that has been done. To be called when this package begins to use
        torch, before anything is routed, on one thread at a time. May be repeated after an exception."""
        if _core.preloaded or not torch.last_routed_wins or self._has_begun:
            return
        self.end_all()  # what an interrupted call has begun
        try:
            in_use = _core.active_devices() | 1 << torch.current_device()
            unused = [device for device in range(_core.device_count()) if not in_use >> device & 1]
            if unused:
                self._watch(torch, unused)
        except (TorchMemorySaverError, RuntimeError) as error:
            logger.debug("cannot detect the use of further devices: %s", error)
            self.end_all()
        self._has_begun = True

    def _watch(self, torch: TorchCuda, devices: list[int]) -> None:
        self._torch = torch
        if self._capture_begins not in before_capture:
            before_capture.append(self._capture_begins)
        if self.end_used not in before_emptying:
            before_emptying.append(self.end_used)
        if torch.routing_spares_cache:
            self._wrap_pool_class(torch)
        _core.listen_devices(self.end, sum(1 << device for device in devices))
        for device in devices:
            self._watch_device(torch, device)

    def _watch_device(self, torch: TorchCuda, device: int) -> None:
        pool = _WatchPool(torch.make_pool(device, managed=False), device)
        self._pools[device] = pool  # before the routing begins: then another thread's allocation can end the watch
        try:
            pool.route(torch)
        except RuntimeError:
            self._pools.pop(device, None)  # the pool itself stays, without memory: retiring it would route it
            raise
        if self._pools.get(device) is not pool:  # it was ended meanwhile
            self._retire(torch, pool)

    def end(self, device: int) -> None:
        """End the watch of a device that is watched. Any thread may call this."""
        pool, torch = self._pools.pop(device, None), self._torch
        if pool is not None and torch is not None and pool.is_routed:  # otherwise _watch_device ends it
            self._retire(torch, pool)

    @staticmethod
    def _retire(torch: TorchCuda, pool: _WatchPool) -> None:
        if pool.retiring.acquire(blocking=False):
            torch.end_routing(pool.device, pool.id)
            torch.release_pool(pool.device, pool.id)
            retire_at_emptying(torch, pool)

    def end_all(self) -> None:
        """End every watch."""
        for device in list(self._pools):
            self.end(device)

    def end_used(self, in_use: int) -> None:
        """Give the watched devices of the mask `in_use` access, and end their watches."""
        used = [device for device in list(self._pools) if in_use >> device & 1]
        if used:
            self._give_access()
        for device in used:
            self.end(device)

    def _capture_begins(self, device: int) -> None:
        if device in self._pools:
            self._give_access()
            self.end(device)

    @staticmethod
    def _give_access() -> None:
        """Give every device in use access to managed memory. A failure is only logged, and a later copy fails then."""
        try:
            _core.refresh_peers()
        except TorchMemorySaverError as error:
            logger.warning("a device that came into use has no access to managed memory: %s", error)

    def _wrap_pool_class(self, torch: TorchCuda) -> None:
        """End every watch as soon as the program makes a MemPool, once."""
        pool_class = torch.torch.cuda.MemPool
        if is_replaced(pool_class, "__init__"):
            return
        initialize: Callable[..., None] = pool_class.__init__

        @functools.wraps(initialize)
        def __init__(memory_pool: Any, *arguments: Any, **keywords: Any) -> None:
            if self._pools and self._torch is not None and not self._torch.is_making(memory_pool):
                self._give_access()
                self.end_all()
            initialize(memory_pool, *arguments, **keywords)

        replace("torch.cuda.MemPool.__init__", pool_class, "__init__", __init__)
