"""Regions and torch's pools: what is managed where, and that paused memory is never handed out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from gpu_support import (
    MIB,
    STARTED_PRELOADED,
    Program,
    assert_close_to,
    core,
    empty,
    errors,
    free_bytes,
    is_managed,
    run_programs,
    saver,
    segment_of,
    skip_where_routing_is_of_the_process,
    skip_where_the_outer_pool_wins,
    state_of,
    tms,
    torch,
    write_and_check,
)


def in_thread(work: Callable[[], None]) -> None:
    """Runs `work` on another thread and hands its exception on."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread hangs"
    if failures:
        raise failures[0]


def test_only_allocations_inside_are_managed() -> None:
    before = empty(16 * MIB)
    with saver.region():
        inside = empty(16 * MIB)
    after = empty(16 * MIB)
    assert [is_managed(tensor) for tensor in (before, inside, after)] == [False, True, False]
    assert segment_of(inside)[7] == "default"


def test_the_innermost_region_wins_and_the_outer_one_continues() -> None:
    with saver.region(tag="outer"):
        first = empty(16 * MIB)
        with saver.region(tag="inner", enable_cpu_backup=True):
            second = empty(16 * MIB)
            with saver.region(tag="outer"):
                third = empty(16 * MIB)
        fourth = empty(16 * MIB)
        with pytest.raises(KeyError), saver.region(tag="failing"):
            raise KeyError("leaves the region")
        fifth = empty(16 * MIB)
    tags = [segment_of(tensor)[7] for tensor in (first, second, third, fourth, fifth)]
    assert tags == ["outer", "inner", "outer", "outer", "outer"]
    assert segment_of(second)[6] == core.BACKUP_PINNED
    assert segment_of(fourth)[6] == core.BACKUP_NONE
    assert core.region_current()[3] == 0


def test_tasks_that_interleave_keep_what_they_allocate() -> None:
    """A task's region stays in force when another task on the thread leaves one that was entered before it."""
    weights, caches = [], []

    async def main() -> None:
        inside_cache, inside_weights, left_cache = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def make_cache() -> None:
            with saver.region(tag="kv_cache"):
                caches.append(empty(16 * MIB))
                inside_cache.set()
                await inside_weights.wait()
            left_cache.set()

        async def load_weights() -> None:
            await inside_cache.wait()
            with saver.region(tag="weights", enable_cpu_backup=True):
                weights.append(empty(16 * MIB))
                inside_weights.set()
                await left_cache.wait()
                weights.append(empty(16 * MIB))

        await asyncio.gather(make_cache(), load_weights())

    with pytest.warns(RuntimeWarning, match=r"region\(tag='weights'\) is entered while .* region\(tag='kv_cache'\)"):
        asyncio.run(main())
    assert not is_managed(empty(16 * MIB))
    assert [segment_of(tensor)[7] for tensor in (*weights, *caches)] == ["weights", "weights", "kv_cache"]
    for value, tensor in enumerate(weights, start=1):
        tensor.fill_(value)
    saver.pause()
    saver.resume()
    for value, tensor in enumerate(weights, start=1):
        assert int(tensor.min()) == int(tensor.max()) == value
    del tensor


def test_a_generator_inside_a_region_outlives_its_callers_region() -> None:
    def tensors() -> Iterator[torch.Tensor]:
        with saver.region(tag="inner", enable_cpu_backup=True):
            while True:
                yield empty(16 * MIB)

    generator = tensors()
    outer = saver.region(tag="outer")
    outer.__enter__()
    made = [next(generator)]
    with pytest.warns(RuntimeWarning, match=r"region\(tag='outer'\) is left while region\(tag='inner'\)"):
        outer.__exit__(None, None, None)
    made.append(next(generator))
    assert core.region_current()[:2] == ("inner", core.BACKUP_PINNED)
    generator.close()
    assert [segment_of(tensor)[7] for tensor in made] == ["inner", "inner"]
    assert not is_managed(empty(16 * MIB))
    assert core.region_current()[3] == 0
    made.clear()


def test_the_same_region_nested_and_in_two_threads_at_once() -> None:
    tensors = []
    with saver.region(tag="weights"):
        tensors.append(empty(16 * MIB))
        with saver.region(tag="weights"):
            tensors.append(empty(16 * MIB))

            def other() -> None:
                with saver.region(tag="weights"), saver.region(tag="weights"):
                    tensors.append(empty(16 * MIB))

            in_thread(other)
        tensors.append(empty(16 * MIB))
    assert [segment_of(tensor)[7] for tensor in tensors] == ["weights"] * 4
    saver.pause("weights")
    saver.resume("weights")
    for value, tensor in enumerate(tensors):
        write_and_check(tensor, value)
    del tensor


def test_a_thread_started_inside_a_region_is_outside_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    found: list[bool] = []

    def other() -> None:
        found.append(is_managed(empty(16 * MIB)))

    for _ in range(2):
        torch.cuda.empty_cache()
        with saver.region(tag="threads"):
            inside = empty(16 * MIB)
            in_thread(other)
    assert found == [False, False]
    assert is_managed(inside)
    said = [record.getMessage() for record in caplog.records if "no region manages" in record.getMessage()]
    assert len(said) == 1, said
    assert f"region(tag='threads') was open PyTorch took {16 * MIB} bytes" in said[0]


def test_memory_of_the_users_own_pool_inside_a_region_is_said_not_to_be_managed(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    skip_where_the_outer_pool_wins()
    pool = torch.cuda.MemPool()
    with saver.region(tag="own pool"), torch.cuda.use_mem_pool(pool):
        tensor = empty(16 * MIB)
    # In preload mode it is: PyTorch's cudaMalloc is caught whichever pool it is for.
    assert is_managed(tensor) is (mode == "preload")
    said = [record for record in caplog.records if "no region manages" in record.getMessage()]
    assert len(said) == (0 if mode == "preload" else 1)
    del tensor
    torch.cuda.synchronize()
    del pool


def test_gradients_of_a_backward_inside_are_managed() -> None:
    """PyTorch's own threads, on which backward() runs otherwise, are outside every region."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.ones(4 * MIB, device="cuda", requires_grad=True)
    threads: list[int] = []
    with saver.region(tag="trainer"):
        result = weights * 2
        result.register_hook(lambda gradient: threads.append(threading.get_ident()))
        result.backward(torch.ones_like(result))
    assert weights.grad is not None
    assert segment_of(weights.grad)[7] == "trainer"
    assert threads == [threading.get_ident()]
    assert torch.equal(weights.grad, torch.full_like(weights, 2))
    saver.pause()
    saver.resume()
    weights.grad = None
    result = weights * 3
    result.register_hook(lambda gradient: threads.append(threading.get_ident()))
    result.backward(torch.ones_like(result))
    assert threads[1] != threading.get_ident(), "outside regions as ever"
    assert torch.equal(weights.grad, torch.full_like(weights, 3))
    del result
    weights.grad = None


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
        assert all(segment_of(tensor)[7] == "a" for tensor in new)
        saver.resume("a")
        later = empty(64 * MIB)
        write_and_check(later, 3)
    for value, tensor in enumerate([keep, *small, *new, later]):
        write_and_check(tensor, value)
    del new, small, tensor


def test_pausing_while_another_thread_is_in_the_region_is_refused() -> None:
    """torch would hand that thread paused memory: only the thread itself can leave its pools."""
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
            saver.pause("a")
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


def test_empty_cache_inside_a_region_gives_memory_back() -> None:
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
    skip_where_routing_is_of_the_process()

    def pool_of(tensor: torch.Tensor) -> object:
        address = segment_of(tensor)[0]
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
    inside, done = threading.Event(), threading.Event()
    held = []

    def other() -> None:
        with saver.region(tag="b"):
            held.append(empty(64 * MIB))
            inside.set()
            assert done.wait(60)
            held.append(empty(64 * MIB))

    start = free_bytes()
    with saver.region(tag="a"):
        drop = empty(512 * MIB)
    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert inside.wait(60)
        del drop
        tms.empty_cache()
    finally:
        done.set()
        thread.join(60)
    # While that thread was in its region torch could return nothing; leaving it did.
    assert_close_to(start - free_bytes(), 128 * MIB, "memory still taken")
    assert [segment_of(tensor)[7] for tensor in held] == ["b", "b"]
    for value, tensor in enumerate(held):
        write_and_check(tensor, value)
    del tensor


def test_disable_is_ordinary_memory_that_goes_back_at_its_exit() -> None:
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
    assert segment_of(tensor)[7] == "b"
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


def test_expandable_segments_toggled_at_run_time(mode: str) -> None:
    """As verl does around each step: regions stay managed whichever way the setting points."""
    # Before PyTorch 2.9 it has another name.
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    tensors = []
    try:
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
    finally:
        settings("expandable_segments:False")
    for number, tensor in enumerate(tensors, start=1):
        assert is_managed(tensor), mode
        assert bool((tensor == number).all())
    del tensor


def test_regions_pauses_and_resumes_in_compiled_code() -> None:
    (done,) = run_programs([Program("compiled.py", preload=STARTED_PRELOADED)])
    done.check()
    assert done.output == "ready\n"
    assert "file an issue" not in done.error
