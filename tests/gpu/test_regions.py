"""Guards regions: what is managed where, on which thread and in which task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from gpu_support import (
    MIB,
    core,
    empty,
    is_managed,
    saver,
    segment_of,
    skip_where_the_outer_pool_wins,
    torch,
    write_and_check,
)
from other_threads import in_thread


def test_only_allocations_inside_are_managed() -> None:
    before = empty(16 * MIB)
    with saver.region():
        inside = empty(16 * MIB)
    after = empty(16 * MIB)
    assert [is_managed(tensor) for tensor in (before, inside, after)] == [False, True, False]
    assert segment_of(inside).tag == "default"


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
    tags = [segment_of(tensor).tag for tensor in (first, second, third, fourth, fifth)]
    assert tags == ["outer", "inner", "outer", "outer", "outer"]
    assert segment_of(second).backup == core.BACKUP_PINNED
    assert segment_of(fourth).backup == core.BACKUP_NONE
    assert core.region_current().depth == 0


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
    assert [segment_of(tensor).tag for tensor in (*weights, *caches)] == ["weights", "weights", "kv_cache"]
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
    current = core.region_current()
    assert (current.tag, current.backup) == ("inner", core.BACKUP_PINNED)
    generator.close()
    assert [segment_of(tensor).tag for tensor in made] == ["inner", "inner"]
    assert not is_managed(empty(16 * MIB))
    assert core.region_current().depth == 0
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
    assert [segment_of(tensor).tag for tensor in tensors] == ["weights"] * 4
    saver.pause("weights")
    saver.resume("weights")
    for value, tensor in enumerate(tensors):
        write_and_check(tensor, value)
    del tensor


def test_a_thread_started_inside_a_region_is_outside_and_that_is_reported(caplog: pytest.LogCaptureFixture) -> None:
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
    reports = [record.getMessage() for record in caplog.records if "no region manages" in record.getMessage()]
    assert len(reports) == 1, reports
    assert "region(tag='threads') was open PyTorch took 16 MiB" in reports[0]


def test_memory_of_the_users_own_pool_inside_a_region_is_reported_as_unmanaged(caplog: pytest.LogCaptureFixture) -> None:
    skip_where_the_outer_pool_wins()
    pool = torch.cuda.MemPool()
    with saver.region(tag="own pool"), torch.cuda.use_mem_pool(pool):
        tensor = empty(16 * MIB)
    assert not is_managed(tensor)
    reports = [record for record in caplog.records if "no region manages" in record.getMessage()]
    assert len(reports) == 1
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
    assert segment_of(weights.grad).tag == "trainer"
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
