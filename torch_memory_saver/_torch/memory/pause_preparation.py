"""The preparation of PyTorch's pools for a pause.

Before a pause, segments of the tags without a tensor are released to the driver instead of being paused: those of the tags'
pools, of pools that were retired while they still held a tensor, and of torch's default pool, if that is managed. After it
no pool allocates from paused memory: idle pools of the tags are not entered (pools/idle.py), and this thread's own regions
of the tags get other pools.

The engine calls this around the native pause, with no lock held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from torch_memory_saver import _core
from torch_memory_saver._torch.base.collector import StoppedCollector
from torch_memory_saver._torch.base.steps import SingleUseScope
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL, PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.pools.fill import has_idle_segment_at
from torch_memory_saver._torch.pools.retirement import must_not_free
from torch_memory_saver._torch.records.frames import Frame, Pause
from torch_memory_saver._torch.records.tags import Tags, selects

__all__ = ["PausePreparation", "await_regions"]


class PausePreparation(SingleUseScope):
    """A context manager that surrounds the native pause. Its result is a function to call after a pause that left memory
    paused. It waits for other threads that are inside a region of one of the tags, until `deadline`, in seconds of
    :func:`time.monotonic`. Regions that follow others end then, unless the pause `only_waits`. `free_caches` is called
    before idle segments are released. It frees what PyTorch keeps in memory of the tags for use with other memory.

    Raises:
        InvalidStateError: A thread is still inside such a region. Nothing was changed.
    """

    def __init__(
        self,
        store: PoolStore,
        torch: TorchCuda | None,
        tags: Tags,
        deadline: float = 0.0,
        free_caches: Callable[[TorchCuda], None] = lambda torch: None,
        only_waits: bool = False,
    ) -> None:
        self._store = store
        self._torch = torch
        self._pause = Pause(store.regions.stack(), tags, only_waits)
        self._deadline = deadline
        self._free_caches = free_caches

    def _begin(self) -> Callable[[], None]:
        tags = self._pause.tags
        self._store.regions.begin_pause(self._pause, self._deadline)
        if self._torch is None:
            return lambda: None
        with StoppedCollector():
            if not must_not_free(self._torch):
                self._free_caches(self._torch)
                _return_idle_segments(self._store, self._torch, tags)
        return functools.partial(_leave_paused_pools, self._store, self._torch, tags)

    def _end(self) -> None:
        self._store.regions.end_pause(self._pause)


def await_regions(store: PoolStore, tags: Tags, deadline: float) -> None:
    """Wait for other threads that are inside a region of one of the tags, as :class:`PausePreparation` does, before
    anything else of a pause happens.

    Raises:
        InvalidStateError: A thread is still inside such a region.
    """
    with PausePreparation(store, None, tags, deadline, only_waits=True):
        pass


def _own_frames(store: PoolStore, tags: Tags) -> list[Frame]:
    return [frame for frame in store.regions.stack() if frame.managed and frame.pools and selects(tags, frame.tag)]


def _return_idle_segments(store: PoolStore, torch: TorchCuda, tags: Tags) -> None:
    retired = store.retire_idle_of(torch, tags)
    if not any(torch.releasable_bytes(device) for device in devices_in_use()):
        return
    if retired or _has_idle_segment(torch, store.idle_pools.retired_pools(), tags):
        store.empty_retired(torch)
    if _core.preloaded and _has_idle_segment(torch, {DEFAULT_POOL}, tags):
        store.empty_torch_cache(torch)


def _has_idle_segment(torch: TorchCuda, pools: Collection[PoolId], tags: Tags) -> bool:
    if not pools:
        return False
    active = {row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and selects(tags, row.tag)}
    return has_idle_segment_at(torch, pools, active)


def _leave_paused_pools(store: PoolStore, torch: TorchCuda, tags: Tags) -> None:
    store.note_pause(torch, tags)
    own = _own_frames(store, tags)
    if not own:
        return

    def visit(frame: Frame) -> None:
        if frame in own:
            paused = frame.pools
            frame.pools = [store.idle_pools.check_out(torch, pool.key) for pool in paused]
            for pool in paused:
                store.idle_pools.check_in(pool)

    with store.regions.routing_suspended(torch, visit):
        pass
