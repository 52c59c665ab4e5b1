"""Guards regions over torch's pools: paused memory is never handed out, and idle memory is released."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from gpu_programs import Program, run_programs
from gpu_support import (
    MIB,
    STARTED_PRELOADED,
    assert_close_to,
    core,
    empty,
    errors,
    free_bytes,
    is_managed,
    release,
    saver,
    segment_of,
    skip_where_the_outer_pool_wins,
    state_of,
    tms,
    torch,
    write_and_check,
)
from other_threads import in_thread, other_thread_inside


def test_allocating_in_a_region_whose_tag_is_paused() -> None:
    with saver.region(tag="a"):
        paused = empty(64 * MIB)
        small = [empty(MIB) for _ in range(4)]
        idle = empty(64 * MIB)
    del idle, small[1], small[2]
    saver.pause("a")
    with saver.region(tag="a"):
        new = [empty(64 * MIB), empty(MIB), empty(MIB), empty(64 * MIB), empty(512)]
        for value, tensor in enumerate(new):
            write_and_check(tensor, value)
    assert state_of(paused) == core.STATE_PAUSED
    assert saver.pause("a").allocations > 0
    with saver.region(tag="a"):
        again = empty(64 * MIB)
        write_and_check(again, 77)
    saver.resume("a")
    for value, tensor in enumerate([paused, *small, *new, again]):
        write_and_check(tensor, value)
    with saver.region(tag="a"):
        last = [empty(64 * MIB), empty(MIB)]
        for value, tensor in enumerate(last):
            write_and_check(tensor, value)
    del new, small, last, tensor


def test_pausing_inside_the_region() -> None:
    with saver.region(tag="a"):
        keep = empty(64 * MIB)
        small = [empty(MIB), empty(MIB)]
        idle = empty(64 * MIB)
        del idle, small[0]
        saver.pause("a")
        assert state_of(keep) == core.STATE_PAUSED
        new = [empty(64 * MIB), empty(MIB)]
        for value, tensor in enumerate(new):
            write_and_check(tensor, value)
        assert all(segment_of(tensor).tag == "a" for tensor in new)
        saver.resume("a")
        later = empty(64 * MIB)
        write_and_check(later, 3)
    for value, tensor in enumerate([keep, *small, *new, later]):
        write_and_check(tensor, value)
    del new, small, tensor


def test_pausing_while_another_thread_is_in_the_region_is_refused() -> None:
    """torch would hand out paused memory to that thread: only the thread itself can leave its pools."""
    inside, tried = threading.Event(), threading.Event()
    tensors: list[torch.Tensor] = []
    caught: list[BaseException] = []

    def other() -> None:
        with saver.region(tag="a"):
            tensors.append(empty(64 * MIB))
            inside.set()
            assert tried.wait(60)
            tensors.append(empty(64 * MIB))

    def pause() -> None:
        assert inside.wait(60)
        try:
            saver.pause("a", timeout=0)
        except BaseException as error:
            caught.append(error)
        finally:
            tried.set()

    thread = threading.Thread(target=pause)
    thread.start()
    in_thread(other)
    thread.join(60)
    assert [type(error) for error in caught] == [errors.InvalidStateError]
    assert [state_of(tensor) for tensor in tensors] == [core.STATE_ACTIVE] * 2
    assert saver.pause("a").allocations == 2
    saver.resume("a")
    for value, tensor in enumerate(tensors):
        write_and_check(tensor, value)
    del tensor


def test_frees_outside_the_region_and_from_another_thread() -> None:
    with saver.region(tag="a"):
        tensors = [empty(64 * MIB) for _ in range(4)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    del tensors[0]
    tms.empty_cache()
    assert [core.find(address) is None for address in addresses] == [True, False, False, False]

    def other() -> None:
        del tensors[0]
        tms.empty_cache()

    in_thread(other)
    assert [core.find(address) is None for address in addresses] == [True, True, False, False]
    saver.pause("a")

    def while_paused() -> None:
        del tensors[0]
        tms.empty_cache()

    in_thread(while_paused)
    assert [core.find(address) is None for address in addresses] == [True, True, True, False]
    saver.resume("a")
    write_and_check(tensors[0], 1)


def test_empty_cache_inside_a_region_releases_memory() -> None:
    start = free_bytes()
    with saver.region(tag="a"):
        keep = empty(64 * MIB)
        drop = empty(512 * MIB)
        del drop
        tms.empty_cache()
        assert_close_to(start - free_bytes(), 64 * MIB, "memory still taken inside the region")
        again = empty(64 * MIB)
    assert is_managed(again)
    write_and_check(keep, 1)
    write_and_check(again, 2)


def test_emptying_keeps_the_pool_of_a_tag_without_idle_memory() -> None:

    def pool_of(tensor: torch.Tensor) -> object:
        address = segment_of(tensor).address
        return next(row["segment_pool_id"] for row in torch.cuda.memory_snapshot() if row["address"] == address)

    with saver.region(tag="weights"):
        kept = empty(64 * MIB)
    with saver.region(tag="kv_cache"):
        idle = empty(64 * MIB)
    del idle
    saver.empty_cache()
    with saver.region(tag="weights"):
        later = empty(64 * MIB)
    assert pool_of(later) == pool_of(kept)


def test_empty_cache_while_another_thread_is_in_a_region() -> None:
    held: list[torch.Tensor] = []

    def hold() -> None:
        held.append(empty(64 * MIB))

    start = free_bytes()
    with saver.region(tag="a"):
        drop = empty(512 * MIB)
    with other_thread_inside(saver.region(tag="b"), first=hold, last=hold):
        del drop
        tms.empty_cache()
    # While that thread was in its region torch could return nothing; leaving it returned it.
    assert_close_to(start - free_bytes(), 128 * MIB, "memory still taken")
    assert [segment_of(tensor).tag for tensor in held] == ["b", "b"]
    for value, tensor in enumerate(held):
        write_and_check(tensor, value)
    del tensor


def test_disable_is_ordinary_memory_that_is_released_at_its_exit() -> None:
    with saver.region(tag="a"):
        outer = empty(64 * MIB)
        start = free_bytes()
        with saver.disable():
            temporary = empty(512 * MIB)
            kept = empty(64 * MIB)
            assert not is_managed(temporary)
            assert not is_managed(kept)
            write_and_check(temporary, 1)
            del temporary
        assert_close_to(start - free_bytes(), 64 * MIB, "memory still taken after disable()")
        inner = empty(64 * MIB)
    assert is_managed(outer) and is_managed(inner)
    saver.pause("a")
    write_and_check(kept, 4)
    saver.resume("a")


def test_a_region_inside_disable_is_managed() -> None:
    with saver.region(tag="a"), saver.disable():
        with saver.region(tag="b"):
            tensor = empty(16 * MIB)
        plain = empty(16 * MIB)
    assert segment_of(tensor).tag == "b"
    assert not is_managed(plain)


def test_regions_and_pools_of_the_users_nest() -> None:
    skip_where_the_outer_pool_wins()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        first = empty(16 * MIB)
        with saver.region(tag="a"):
            second = empty(16 * MIB)
        third = empty(16 * MIB)
    with saver.region(tag="a"):
        fourth = empty(16 * MIB)
    assert [is_managed(tensor) for tensor in (second, fourth)] == [True, True]
    saver.pause("a")
    write_and_check(first, 1)
    write_and_check(third, 2)
    saver.resume("a")
    for value, tensor in enumerate((first, second, third, fourth)):
        write_and_check(tensor, value)
    del first, third, tensor
    torch.cuda.synchronize()
    del pool


@contextlib.contextmanager
def expandable_segments_on() -> Iterator[Callable[[str], None]]:
    """Switches them on inside. Yields what changes PyTorch's settings."""
    if release() < (2, 9):
        pytest.skip("the memory pools of PyTorch 2.8 refuse expandable segments")
    # Before PyTorch 2.9 it has another name.
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    settings("expandable_segments:True")
    try:
        yield settings
    finally:
        settings("expandable_segments:False")


def test_expandable_segments_toggled_at_run_time(mode: str) -> None:
    """As verl does around each step: regions stay managed with either value of the setting."""
    tensors = []
    with expandable_segments_on() as settings:
        for value in ("True", "False", "True"):
            settings(f"expandable_segments:{value}")
            plain = empty(64 * MIB)
            with saver.region(tag="a", enable_cpu_backup=True):
                tensors.append(empty(64 * MIB))
            assert not is_managed(plain)
            write_and_check(plain, 1)
            write_and_check(tensors[-1], len(tensors))
            del plain
            saver.pause("a")
            torch.cuda.empty_cache()
            saver.resume("a")
    for number, tensor in enumerate(tensors, start=1):
        assert is_managed(tensor), mode
        assert bool((tensor == number).all())
    del tensor


def test_tensors_of_disable_are_given_back_one_by_one() -> None:
    """PyTorch would lose expandable segments in the pool of disable(), which is gone before its tensors."""
    start = free_bytes()
    with expandable_segments_on():
        with saver.region(tag="a"), saver.disable():
            whole = empty(100 * MIB)
            del whole
            tensors = [empty(20 * MIB).fill_(number) for number in range(5)]
        assert not any(is_managed(tensor) for tensor in tensors)
        for number in (0, 2, 4):
            tensors[number] = empty(0)
            tms.empty_cache()
        assert all(bool((tensors[number] == number).all()) for number in (1, 3))
        tensors.clear()
        tms.empty_cache()
        assert_close_to(start - free_bytes(), 0, "memory still taken after its tensors")


def test_regions_pauses_and_resumes_in_compiled_code() -> None:
    (done,) = run_programs([Program("compiled.py", preload=STARTED_PRELOADED)])
    done.check()
    assert done.output == "ready\n"
    assert "file an issue" not in done.error
