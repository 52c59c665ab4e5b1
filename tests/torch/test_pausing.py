"""Guards pause and resume with PyTorch's pools: paused memory is never handed out, pools are used again, idle memory is
released instead of paused, and a resume that finds too little memory returns what PyTorch caches in this process."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pooled_tensors import MIB, addresses, another_thread_inside, empty, is_active, pool_of, resident, tag_of

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

pytestmark = pytest.mark.usefixtures("clean_device")

SIZE = 20 * MIB


def idle_pools(store: Any, tag: str) -> set[tuple[int, ...]]:
    return {tuple(pool.id) for pool in store.idle_pools.select((tag,)) if pool.key.device == 0}


def test_the_report_of_a_pause_and_a_resume(tag: str) -> None:
    with saver.region(tag, enable_cpu_backup=True):
        first = empty(2 * SIZE)
    with saver.region(f"{tag}/b"):
        second = empty(SIZE)
    paused = saver.pause()
    assert (paused.allocations, paused.bytes, paused.copied_bytes, paused.unknown_tags) == (2, 3 * SIZE, 2 * SIZE, 0)
    assert paused.reusable_bytes == 0
    assert saver.pause().allocations == 0
    resumed = saver.resume([tag, f"{tag}/b", "never allocated with"])
    assert (resumed.allocations, resumed.bytes, resumed.copied_bytes, resumed.unknown_tags) == (2, 3 * SIZE, 2 * SIZE, 1)
    del first, second


def test_the_pools_of_regions_while_their_tag_is_paused(tag: str, store: Any) -> None:
    with saver.region(tag):
        used, cached = empty(SIZE), empty(SIZE)
    pool, at = pool_of(used), cached.data_ptr()
    saver.pause(tag)
    del cached  # An idle block, paused: PyTorch would hand it out next.
    for _ in range(2):
        with saver.region(tag):
            fresh = empty(SIZE)
        assert fresh.data_ptr() != at and is_active(fresh)
        del fresh
    assert pool in idle_pools(store, tag) and len(idle_pools(store, tag)) == 2, "the second entry had the pool of the first"
    saver.resume(tag)
    assert pool not in idle_pools(store, tag), "it is retired, which returns the idle block"
    assert addresses(tag) == [used.data_ptr()]


def test_a_cycle_leaves_no_pool_behind(tag: str, store: Any) -> None:
    with saver.region(tag):
        kept = empty(SIZE)
    for _ in range(10):
        saver.pause(tag)
        with saver.region(tag):
            pass
        saver.resume(tag)
        with saver.region(tag):
            pass
    assert len(idle_pools(store, tag)) == 2
    del kept


def test_a_partial_resume_keeps_the_other_tag_away(tag: str) -> None:
    tags = (tag, f"{tag}/b")
    tensors = []
    for name in tags:
        with saver.region(name):
            tensors += [empty(4 * MIB), empty(4 * MIB)]
    saver.pause()
    gone = tensors[1].data_ptr(), tensors[3].data_ptr()
    del tensors[1], tensors[2]
    saver.resume(tag)
    again = []
    for name in tags:
        with saver.region(name):
            again.append(empty(4 * MIB))
    assert again[0].data_ptr() == gone[0]
    assert again[1].data_ptr() != gone[1] and is_active(again[1])
    saver.resume()
    del again


def test_idle_memory_of_other_tags_stays(tag: str) -> None:
    with saver.region(tag):
        kept = empty(SIZE)
    with saver.region(f"{tag}/b"):
        idle = empty(SIZE)
    del idle
    reserved = torch.cuda.memory_reserved()
    assert saver.pause(tag).allocations == 1
    assert (resident(f"{tag}/b"), torch.cuda.memory_reserved()) == (SIZE, reserved)
    saver.resume()
    del kept


def test_a_pause_inside_the_region_changes_its_pool(tag: str, store: Any) -> None:
    """The pools of the outer region change as well, while an inner one is in force."""
    with saver.region(tag):
        used, idle = empty(SIZE), empty(2 * SIZE)
        with saver.region(f"{tag}/b"):
            del idle
            assert saver.pause(tag).bytes == SIZE, "the idle segment went back"
            inner = empty(SIZE)
        at = used.data_ptr()
        del used  # An idle block, paused: PyTorch would hand it out next.
        fresh = empty(SIZE)
        assert fresh.data_ptr() != at
        assert is_active(fresh) and is_active(inner)
        assert (tag_of(fresh), tag_of(inner)) == (tag, f"{tag}/b")
        saver.resume(tag)
    assert addresses(tag) == [fresh.data_ptr()], "the paused block is returned at the resume"


def test_a_second_pause_inside_the_region_and_its_pools_afterwards(tag: str, store: Any) -> None:
    with saver.region(tag):
        tensors = []
        for _ in range(2):
            tensors.append(empty(SIZE))
            assert saver.pause(tag).bytes == SIZE
            assert not is_active(tensors[-1])
        assert saver.pause(tag).bytes == 0
    assert saver.resume(tag).bytes == 2 * SIZE
    pools = idle_pools(store, tag)
    assert {pool_of(tensor) for tensor in tensors} <= pools
    with saver.region(tag), saver.region(tag):
        pass
    assert idle_pools(store, tag) == pools, "no pool was made"
    tensors.clear()


def test_another_thread_in_the_region_is_an_error(tag: str) -> None:
    with saver.region(f"{tag}/b"):
        kept = empty(SIZE)
    with another_thread_inside(tag) as theirs:
        for tags in (None, tag, [f"{tag}/b", tag]):
            with pytest.raises(
                errors.InvalidStateError, match=rf"thread '.*' \(\d+\) is still inside region\(tag='{tag}'\)"
            ):
                saver.pause(tags, timeout=None)
        assert saver.stats().total.paused_bytes == 0
        assert saver.pause(f"{tag}/b").bytes == SIZE, "a tag without a thread in it can be paused"
    assert saver.pause(tag).bytes == SIZE
    saver.resume()
    theirs.clear()
    del kept


def test_a_deletion_between_two_pauses_is_found(tag: str) -> None:
    with saver.region(tag):
        gone = empty(SIZE)
    with saver.region(f"{tag}/b"):
        kept = empty(SIZE)
    saver.pause(tag)
    del gone
    saver.pause(f"{tag}/b")
    assert saver.resume().allocations == 1
    assert addresses(tag, f"{tag}/b") == [kept.data_ptr()]


# Room for a resume


@pytest.fixture
def large() -> int:
    """Three fifths of the free memory, so that two tensors of this size do not fit."""
    free, _ = torch.cuda.mem_get_info()
    return int(free) * 3 // 5 // SIZE * SIZE


@pytest.fixture
def paused(tag: str, large: int) -> Iterator[list[torch.Tensor]]:
    """A paused tensor, while PyTorch caches as much in a pool of another tag."""
    with saver.region(tag):
        tensors = [empty(large)]
    saver.pause(tag)
    with saver.region(f"{tag}/b"):
        idle = empty(large)
    del idle
    assert resident(f"{tag}/b") == large
    yield tensors
    tensors.clear()


@pytest.mark.parametrize("wait", [True, False])
def test_the_cache_is_emptied_before_the_first_attempt(tag: str, paused: list[torch.Tensor], wait: bool) -> None:
    failures = _core.counters()["failures_total"]
    if wait:
        saver.resume(tag, timeout=60)
    else:
        saver.resume(tag, timeout=60, wait=False).wait()
    assert is_active(paused[0])
    assert resident(f"{tag}/b") == 0
    assert _core.counters()["failures_total"] == failures


def test_memory_cached_after_the_first_look_is_released_as_well(
    tag: str, paused: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, or another thread, may take memory that was free at the query."""
    real = _core.device_memory

    def all_free(device: int) -> _core.DeviceMemory:
        total = real(device).total
        return _core.DeviceMemory((total, total))  # type: ignore[call-arg, arg-type]

    monkeypatch.setattr(_core, "device_memory", all_free)
    assert saver.resume(tag).allocations == 1
    assert resident(f"{tag}/b") == 0


def test_memory_kept_by_another_threads_region_is_named(tag: str, large: int) -> None:
    with saver.region(tag):
        tensor = empty(large)
    saver.pause(tag)
    with another_thread_inside(f"{tag}/c", size=MIB) as theirs:
        with saver.region(f"{tag}/b"):
            other = empty(large)
        empty(SIZE)  # outside of regions: before 2.13 PyTorch keeps its own cache while a thread is in one
        with pytest.raises(errors.OutOfMemoryError) as caught:
            saver.resume(tag)
        is_kept = torch.__version__ < (2, 13)
        assert ("which gave" in str(caught.value)) != is_kept
        cached = re.search(r"still caches ([\d.]+) MiB, .*another thread", str(caught.value))
        assert (cached is not None and float(cached[1]) >= SIZE / MIB) == is_kept
        assert not is_active(tensor)
    theirs.clear()
    del other
    assert saver.resume(tag).allocations == 1
    del tensor


def test_memory_kept_by_a_pool_in_use_is_named(tag: str, large: int) -> None:
    with saver.region(tag):
        tensor = empty(large)
    saver.pause(tag)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        empty(SIZE)
    other = empty(large)
    with pytest.raises(errors.OutOfMemoryError) as caught:
        saver.resume(tag)
    cached = re.search(r"still caches (\d+) MiB, in pools that are in use", str(caught.value))
    assert cached is not None and int(cached[1]) >= 20  # and what other tests have left in pools
    assert "another thread" not in str(caught.value)
    del other, pool
    assert saver.resume(tag).allocations == 1
    del tensor


def test_a_failure_keeps_nothing_of_its_callers(tag: str, large: int) -> None:
    """Their frames hold tensors, which must be freed with the exception and not at the next garbage collection."""
    with saver.region(tag):
        tensor = empty(large)
    saver.pause(tag)
    with saver.region(f"{tag}/b"):
        other = empty(large)

    def caller() -> weakref.ref[torch.Tensor]:
        mine = empty(MIB)
        with pytest.raises(errors.OutOfMemoryError):
            saver.resume(tag)
        return weakref.ref(mine)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
    del other, tensor
