"""The preparation of torch's pools for a pause, and their treatment after it.

Before a pause, segments of the tags without a tensor are released to the driver instead of being paused: those of the tags'
pools, of pools that were retired while they still held a tensor, and of torch's default pool, if that is managed. After it
no pool allocates from paused memory: idle pools of the tags are not entered (pools.py), and this thread's own regions of the
tags get other pools.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from torch_memory_saver import _core
from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.frames import Frame, Pause
from torch_memory_saver._torch.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.pools import PoolStore, Tags, may_not_free, selects
from torch_memory_saver._torch.steps import OneUse

__all__ = ["await_regions", "has_idle_segment", "pausing"]

_DEFAULT_POOL: PoolId = (0, 0)


class pausing(OneUse):
    """The context manager around the native pause. Its result is a function to call after a pause that left
    memory paused. Waits for other threads that are inside a region of one of the tags, until `deadline`, in seconds of
    :func:`time.monotonic`. `free_caches` is called before idle segments are released. It frees what PyTorch keeps in memory
    of the tags for use with other memory.

    Raises:
        InvalidStateError: A thread is still inside one. Nothing was changed.
    """

    def __init__(
        self,
        store: PoolStore,
        torch: TorchCuda | None,
        tags: Tags,
        deadline: float = 0.0,
        free_caches: Callable[[TorchCuda], None] = lambda torch: None,
    ) -> None:
        self._store = store
        self._torch = torch
        self._pause = Pause(store.stack(), tags)
        self._deadline = deadline
        self._free_caches = free_caches

    def _begin(self) -> Callable[[], None]:
        tags = self._pause.tags
        self._store.begin_pause(self._pause, self._deadline)
        if self._torch is None:
            return lambda: None
        with collector_stopped():
            if not may_not_free(self._torch):
                self._free_caches(self._torch)
                _return_idle_segments(self._store, self._torch, tags)
        return functools.partial(_leave_paused_pools, self._store, self._torch, tags)

    def _end(self) -> None:
        self._store.end_pause(self._pause)


def await_regions(store: PoolStore, tags: Tags, deadline: float) -> None:
    """Waits for other threads that are inside a region of one of the tags, as :func:`pausing` does, before anything else
    of a pause happens.

    Raises:
        InvalidStateError: A thread is still inside one.
    """
    with pausing(store, None, tags, deadline):
        pass


def _own_frames(store: PoolStore, tags: Tags) -> list[Frame]:
    return [frame for frame in store.stack() if frame.managed and frame.pools and selects(tags, frame.tag)]


def _return_idle_segments(store: PoolStore, torch: TorchCuda, tags: Tags) -> None:
    retired = store.retire_idle_of(torch, tags)
    if not any(torch.releasable_bytes(device) for device in devices_in_use()):
        return
    if retired or _has_idle_segment(torch, store.retired_pools(), tags):
        store.empty_retired(torch)
    if _core.preloaded and _has_idle_segment(torch, {_DEFAULT_POOL}, tags):
        store.empty_torch_cache(torch)


def _has_idle_segment(torch: TorchCuda, pools: Collection[PoolId], tags: Tags) -> bool:
    if not pools:
        return False
    active = {row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and selects(tags, row.tag)}
    return has_idle_segment(torch, pools, active)


def has_idle_segment(torch: TorchCuda, pools: Collection[PoolId], addresses: Collection[int]) -> bool:
    """Whether one of the pools has a segment without a tensor at one of the addresses."""
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


def _leave_paused_pools(store: PoolStore, torch: TorchCuda, tags: Tags) -> None:
    store.note_pause(torch, tags)
    own = _own_frames(store, tags)
    if not own:
        return

    def visit(frame: Frame) -> None:
        if frame in own:
            paused = frame.pools
            frame.pools = [store.check_out(torch, pool.key) for pool in paused]
            for pool in paused:
                store.check_in(pool)

    with store.routing_suspended(torch, visit):
        pass
