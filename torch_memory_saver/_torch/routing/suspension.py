"""What this thread's allocations are routed to for a moment: nothing, or pools without memory. PyTorch's cache is emptied
inside, because a pool that is routed keeps it.

The steps are those of :class:`PoolStore`, with its locks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_memory_saver import _core
from torch_memory_saver._torch.base.steps import OneUse
from torch_memory_saver._torch.binding.layer import TorchCuda
from torch_memory_saver._torch.records.frames import Frame
from torch_memory_saver._torch.records.pool import Key, Pool
from torch_memory_saver.options import DEFAULT_TAG, RegionOptions

if TYPE_CHECKING:
    from torch_memory_saver._torch.memory.store import PoolStore

__all__ = ["SpareRouting", "Suspension"]


class SpareRouting(OneUse):
    """A context manager: inside, this thread's allocations are routed to pools without memory, on every device."""

    def __init__(self, store: PoolStore, torch: TorchCuda) -> None:
        self._store = store
        self._torch = torch
        self._frame = Frame(torch, RegionOptions.disabled(DEFAULT_TAG), store.stack())
        self._pools: list[list[Pool]] = []

    def _begin(self) -> None:
        store, torch, frame = self._store, self._torch, self._frame
        if store._spare_pools:
            _core.move(store._spare_pools, self._pools)
        else:
            devices = store._devices or store._find_devices()
            self._pools.append([store.make_pool(torch, Key(frame.options, device)) for device in devices])
        frame.pools = self._pools[0]
        store._admission.frames[id(frame)] = frame
        store.router.begin(torch, frame)

    def _end(self) -> None:
        self._store.router.end(self._frame)
        self._store._admission.frames.pop(id(self._frame), None)
        if self._pools:
            _core.move(self._pools, self._store._spare_pools)


class Suspension(OneUse):
    """The context manager of :meth:`PoolStore.routing_suspended`."""

    def __init__(self, store: PoolStore, torch: TorchCuda, visit: Callable[[Frame], None] | None) -> None:
        self._store = store
        self._torch = torch
        self._visit = visit
        self._frames = [frame for frame in store.stack() if frame.pools]
        self._routed = [frame for frame in self._frames if frame.routed]

    def _begin(self) -> None:
        for frame in reversed(self._routed):
            self._store.router.end(frame)
        if self._visit is not None:
            for frame in self._frames:
                self._visit(frame)

    def _end(self) -> None:
        for frame in self._routed:
            self._store.router.begin(self._torch, frame)
