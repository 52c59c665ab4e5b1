"""The preparation of PyTorch's pools and cache for a resume.

Paused segments whose tensors were deleted are released, and PyTorch's cache in this process is emptied before a resume fails
or waits. Cached memory is free for the program, but in use for the driver. Only the Python layer can empty the cache: it
suspends this thread's routing.

The engine calls this around the native resume, with no lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch_memory_saver import _core
from torch_memory_saver._text import binary_size, with_points
from torch_memory_saver._torch.base.collector import StoppedCollector
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL, TorchCuda, devices_in_use
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.pools.fill import has_idle_segment_at
from torch_memory_saver._torch.pools.retirement import must_not_free
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver.errors import OutOfMemoryError, TorchMemorySaverError, rename_operation

__all__ = ["make_room", "with_room"]

_Result = TypeVar("_Result")


def with_room(
    store: PoolStore,
    torch: TorchCuda | None,
    tags: Tags,
    resume: Callable[[], _Result],
    resume_at_once: Callable[[], _Result],
) -> _Result:
    """Call `resume`. If a device has too little free memory for `tags`, PyTorch's cache is emptied first. If the resume
    still runs out of memory and the cache is not empty by then, it is emptied again, and `resume_at_once`, the same without
    waiting, is called.

    Raises:
        OutOfMemoryError: The message includes the bytes that the cache released.
    """
    given = make_room(store, torch, tags)
    try:
        return resume()
    except OutOfMemoryError as error:
        failure = error
    more = _empty_cache(store, torch) if torch is not None and _caching(torch) else 0
    if more:
        try:
            return resume_at_once()
        except OutOfMemoryError as error:
            failure = error
    failure.args = (with_points(str(failure), *_account(store, torch, given + more)),)
    try:
        raise failure
    finally:
        # Breaks a reference cycle (traceback, frame, variable) that would keep the callers' tensors until a garbage
        # collection.
        del failure


def make_room(store: PoolStore, torch: TorchCuda | None, tags: Tags) -> int:
    """Give back paused segments of `tags` without a tensor, which the resume would map. Then empty PyTorch's cache if a
    device with cached memory has less free memory than the resume needs, and return the bytes of device memory that this
    released."""
    if torch is not None:
        _return_dead_segments(store, torch, tags)
    caching = [] if torch is None else _caching(torch)
    if torch is None or not caching:
        return 0
    missing = dict.fromkeys(caching, 0)
    for row in _core.segments():
        if row.state != _core.STATE_ACTIVE and row.device in missing and selects(tags, row.tag):
            missing[row.device] += row.reserved_bytes
    try:
        if all(not size or _core.device_memory(device).free >= size for device, size in missing.items()):
            return 0
    except TorchMemorySaverError as error:
        rename_operation(error, "resume")
        raise
    return _empty_cache(store, torch)


def _return_dead_segments(store: PoolStore, torch: TorchCuda, tags: Tags) -> None:
    """Give back the segments whose tensors were deleted while they were paused. PyTorch's cache of other memory stays.

    PyTorch's segments are not listed if PyTorch has freed nothing since the pause.
    """
    if not store.may_have_died_while_paused(torch, tags) or not _caching(torch) or must_not_free(torch):
        return
    store.idle_pools.retire_postponed(torch)
    paused = {row.address for row in _core.segments() if row.state == _core.STATE_PAUSED and selects(tags, row.tag)}
    with StoppedCollector():
        has_retired = store.idle_pools.retire_idle(torch, store.idle_pools.select(tags))
        has_retired = has_retired or has_idle_segment_at(torch, store.idle_pools.retired_pools(), paused)
        has_default = _core.preloaded and has_idle_segment_at(torch, (DEFAULT_POOL,), paused)
    if has_retired:
        store.empty_retired(torch)
    if has_default:
        store.empty_torch_cache(torch)


def _caching(torch: TorchCuda) -> list[int]:
    """Return the devices on which PyTorch holds segments without a tensor."""
    return [device for device in devices_in_use() if torch.releasable_bytes(device)]


def _empty_cache(store: PoolStore, torch: TorchCuda) -> int:
    if must_not_free(torch):
        return 0
    before = _held_bytes(torch)
    store.empty_cache(torch)
    return max(0, before - _held_bytes(torch))


def _held_bytes(torch: TorchCuda) -> int:
    """Return the bytes of device memory that PyTorch holds, without its paused part."""
    reserved = sum(torch.reserved_bytes(device) for device in devices_in_use())
    return reserved - _core.counters()["paused_bytes"]


def _account(store: PoolStore, torch: TorchCuda | None, given: int) -> Iterator[str]:
    """Yield the points of an error's message that describe PyTorch's cache."""
    if given:
        yield f"PyTorch's cache in this process was emptied before, which gave {binary_size(given)} back."
    kept = 0 if torch is None else sum(torch.releasable_bytes(device) for device in _caching(torch))
    if torch is not None and kept:
        is_put_off = must_not_free(torch) or store.idle_pools.pending
        reason = (
            "which it keeps while another thread is inside a region or a capture is under way"
            if is_put_off
            else "in pools that are in use, such as those of CUDA graphs, which empty_cache() does not release"
        )
        yield f"PyTorch still caches {binary_size(kept)}, {reason}."
