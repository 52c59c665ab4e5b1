"""The preparation of torch's pools for a pause, and their treatment after it.

Before a pause, segments of the tags without a tensor are released to the driver instead of being paused: those of the tags'
pools, of pools that were retired while they still held a tensor, and of torch's default pool, if that is managed. After it
no pool allocates from paused memory: idle pools of the tags are not entered (pools.py), and this thread's own regions of the
tags get other pools.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from torch_memory_saver import _core
from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.frames import Frame
from torch_memory_saver._torch.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.pools import PoolStore, Tags, may_not_free, selects

__all__ = ["has_idle_segment", "pausing", "refuse_regions_of_others"]

_DEFAULT_POOL: PoolId = (0, 0)


@contextlib.contextmanager
def pausing(
    store: PoolStore, torch: TorchCuda | None, tags: Tags, free_caches: Callable[[TorchCuda], None] = lambda torch: None
) -> Iterator[Callable[[], None]]:
    """Around the native pause. Yields a function to call after one that left memory paused. `free_caches` is called before
    idle segments are released. It frees what PyTorch keeps in memory of the tags for use with other memory.

    Raises:
        InvalidStateError: Another thread is inside a region of one of the tags. Nothing was changed.
    """
    entry = store.pause_entry(tags)
    try:
        store.begin_pause(entry)
        if torch is None:
            yield lambda: None
        else:
            with collector_stopped:
                if not may_not_free(torch):
                    free_caches(torch)
                    _return_idle_segments(store, torch, tags)
            yield lambda: _leave_paused_pools(store, torch, tags)
    finally:
        store.end_pause(entry)


def refuse_regions_of_others(store: PoolStore, tags: Tags) -> None:
    """Raises what :func:`pausing` raises before it does anything."""
    entry = store.pause_entry(tags)
    try:
        store.begin_pause(entry)
    finally:
        store.end_pause(entry)


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
