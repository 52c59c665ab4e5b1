"""The preparation of torch's pools for a pause, and their treatment after it.

Before a pause, segments of the tags without a tensor are released to the driver instead of being paused: those of the tags'
pools, of pools that were retired while they still held a tensor, and of torch's default pool, if that is managed. After it
no pool allocates from paused memory: idle pools of the tags are not entered (pools.py), and this thread's own regions of the
tags get other pools.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch_memory_saver import _core
from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.frames import Frame
from torch_memory_saver._torch.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.pools import PoolStore, Tags, selects

__all__ = ["may_not_free", "pausing", "refuse_regions_of_others"]

_DEFAULT_POOL: PoolId = (0, 0)


@contextlib.contextmanager
def pausing(store: PoolStore, torch: TorchCuda | None, tags: Tags) -> Iterator[Callable[[], None]]:
    """Around the native pause. Yields a function to call after one that left memory paused.

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
    if may_not_free(torch):
        return
    store.retire_doomed(torch)
    own = _own_frames(store, tags)
    devices = {pool.device for pool in store.idle_pools(tags)} | {pool.device for frame in own for pool in frame.pools}
    loose = _loose_pools(store)
    if loose:
        devices.update(devices_in_use())
    if not any(torch.releasable_bytes(device) for device in devices):
        return

    def visit(frame: Frame) -> None:
        if frame in own:
            store.replace_pools(torch, frame, only_if=store.has_idle_segment)

    retired = store.retire_idle(torch, tags)
    if any(store.has_idle_segment(torch, pool) for frame in own for pool in frame.pools):
        with store.routing_suspended(torch, visit):
            store.empty_torch_cache_now(torch)
    elif retired or (loose and _has_idle_segment(torch, loose, tags)):
        store.empty_torch_cache(torch)


def _loose_pools(store: PoolStore) -> frozenset[PoolId]:
    """Pools that may be managed and whose idle segments torch releases when its cache is emptied, without further steps."""
    return store.retired_pools() | ({_DEFAULT_POOL} if _core.preloaded else frozenset())


def _has_idle_segment(torch: TorchCuda, pools: frozenset[PoolId], tags: Tags) -> bool:
    active = {row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and selects(tags, row.tag)}
    return bool(active) and any(
        segment["address"] in active
        and tuple(segment.get("segment_pool_id", ())) in pools
        and all(block["state"] == "inactive" for block in segment["blocks"])
        for segment in torch.segments()
    )


def may_not_free(torch: TorchCuda) -> bool:
    """Whether a capture is active, or the device is lost. The native pause, which comes next and checks the same, raises the
    error."""
    try:
        return torch.is_capturing() or bool(_core.counters()["visible_captures"])
    except RuntimeError:
        return True


def _leave_paused_pools(store: PoolStore, torch: TorchCuda, tags: Tags) -> None:
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
