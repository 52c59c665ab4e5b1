"""Guards bind_region(): functions that other threads run in the caller's region."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import Context
from typing import Any

import pytest
from deferred import DEFERRED
from other_threads import in_thread

import torch_memory_saver
from torch_memory_saver import _core, errors
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("no_warning")


def on_thread(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    results: list[Any] = []
    in_thread(lambda: results.append(function(*arguments, **keywords)))
    return results[0]


def test_a_thread_pool_allocates_in_the_caller_s_region(saver: TorchMemorySaver, load: Any, store: PoolStore) -> None:
    barrier = threading.Barrier(4)

    def together(size: int) -> Any:
        barrier.wait(60)
        return load(size)

    with saver.region("a", enable_cpu_backup=True, threads=False), ThreadPoolExecutor(4) as pool:
        bound = list(pool.map(saver.bind_region(together), [2 * MIB] * 8))
        unbound = list(pool.map(together, [2 * MIB] * 4))
    assert bound == ["a"] * 8
    assert {row.backup for row in _core.segments()} == {_core.BACKUP_PINNED}
    assert unbound == [None] * 4
    assert saver.pause("a").allocations == 8, "every region was left"


def test_every_option_of_the_region_is_taken_along(saver: TorchMemorySaver, load: Any, store: PoolStore) -> None:
    def options() -> Any:
        return store.regions.stack()[-1].options

    with saver.region("a", enable_cpu_backup=True, cpu_backup_backend="mmap", host_memory="retain", runs=False):
        expected = options()
        bound = saver.bind_region(options)
    assert on_thread(bound) == expected


def test_the_innermost_region_is_bound(saver: TorchMemorySaver, load: Any) -> None:
    with saver.region("outer"):
        outer = saver.bind_region(load)
        with saver.region("inner"):
            inner = saver.bind_region(load)
            assert outer() == "outer", "also on a thread that is in another region"
            assert load() == "inner"
            with saver.disable():
                ordinary = saver.bind_region(load)
        assert inner() == "inner"
        assert ordinary() is None
        assert load() == "outer"
    assert [on_thread(function) for function in (outer, inner, ordinary)] == ["outer", "inner", None]


def test_outside_of_a_region_it_is_the_function_itself(saver: TorchMemorySaver, load: Any) -> None:
    assert saver.bind_region(load) is load
    with saver.region("a"):
        pass
    assert saver.bind_region(load) is load

    def on_another_thread() -> None:
        assert saver.bind_region(load) is load

    with saver.region("a"):
        in_thread(on_another_thread)


def test_after_the_caller_s_region_has_ended_a_region_is_still_entered(saver: TorchMemorySaver, load: Any) -> None:
    with saver.region("a"):
        bound = saver.bind_region(load)
    assert on_thread(bound) == bound() == "a"
    assert load() is None


def test_bound_functions_bind_others(saver: TorchMemorySaver, load: Any) -> None:
    def nested() -> Any:
        return on_thread(saver.bind_region(load))

    with saver.region("a"):
        assert on_thread(saver.bind_region(nested)) == "a"


class Loader:
    def __init__(self, load: Any) -> None:
        self.load = load

    def method(self, size: int, *, twice: bool = False) -> list[Any]:
        return [self.load(size) for _ in range(2 if twice else 1)]

    def __call__(self) -> Any:
        return self.load()


def test_any_callable_can_be_bound(saver: TorchMemorySaver, load: Any) -> None:
    loader = Loader(load)
    with saver.region("a"):
        functions = [
            saver.bind_region(loader.method),
            saver.bind_region(functools.partial(loader.method, 2 * MIB)),
            saver.bind_region(loader),
            saver.bind_region(lambda *sizes: [load(size) for size in sizes]),
        ]
    assert on_thread(functions[0], 2 * MIB, twice=True) == ["a", "a"]
    assert on_thread(functions[1], twice=True) == ["a", "a"]
    assert on_thread(functions[2]) == "a"
    assert on_thread(functions[3], 2 * MIB, 4 * MIB) == ["a", "a"]
    assert functions[0].__name__ == "method"


def test_an_exception_passes_and_the_region_is_left(saver: TorchMemorySaver, load: Any) -> None:
    def fail() -> None:
        load()
        raise ZeroDivisionError("of the function")

    with saver.region("a"):
        bound = saver.bind_region(fail)
        with pytest.raises(ZeroDivisionError, match="of the function"):
            on_thread(bound)
        with pytest.raises(ZeroDivisionError):
            bound()
        assert load() == "a"
    assert _core.region_current().depth == 0
    assert saver.pause("a").allocations == 3


def test_executors_of_an_event_loop(saver: TorchMemorySaver, load: Any) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        with saver.region("a"):
            bound = saver.bind_region(load)
        return [
            await loop.run_in_executor(None, bound),
            await asyncio.to_thread(bound),
            await asyncio.to_thread(load),
        ]

    assert asyncio.run(main()) == ["a", "a", None]


def test_a_task_binds_its_own_region(saver: TorchMemorySaver, load: Any) -> None:
    """While two tasks are inside regions, the one entered last is in force on the thread."""

    async def one(inside: asyncio.Event, other_inside: asyncio.Event) -> Any:
        with saver.region("one"):
            inside.set()
            await other_inside.wait()
            return on_thread(saver.bind_region(load))

    async def two(inside: asyncio.Event, done: asyncio.Event) -> None:
        with saver.region("two"):
            inside.set()
            await done.wait()

    async def main() -> Any:
        first, second, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(one(first, second))
        await first.wait()
        with pytest.warns(RuntimeWarning, match="entered while another task"):
            other = asyncio.create_task(two(second, done))
            tag = await task
        done.set()
        await other
        return tag

    assert asyncio.run(main()) == "one"


def test_the_region_of_a_context_that_another_thread_has_copied_is_not_bound(saver: TorchMemorySaver, load: Any) -> None:
    async def main() -> None:
        with saver.region("a", threads=False):
            assert await asyncio.to_thread(saver.bind_region, load) is load

    asyncio.run(main())


def test_the_region_in_force_is_bound_in_a_context_without_one(saver: TorchMemorySaver, load: Any) -> None:
    with saver.region("a"):
        bound = Context().run(saver.bind_region, load)
    assert on_thread(bound) == "a"


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("function", DEFERRED)
def test_functions_whose_body_runs_later_are_refused(
    saver: TorchMemorySaver, load: Any, function: Any, inside: bool
) -> None:
    with saver.region("a") if inside else nullcontext(), pytest.raises(TypeError, match="nor bound to a region"):
        saver.bind_region(function)


def test_a_function_that_hides_a_coroutine_function_is_refused_at_the_call(saver: TorchMemorySaver, load: Any) -> None:
    async def deferred() -> None:
        raise AssertionError

    coroutine = deferred()
    with saver.region("a"):
        bound = saver.bind_region(lambda: coroutine)
    with pytest.raises(errors.InvalidArgumentError, match="function has returned a coroutine, whose body has not run"):
        bound()
    coroutine.close()
    assert _core.region_current().depth == 0, "the region was left"


def test_a_generator_is_an_ordinary_result(saver: TorchMemorySaver, load: Any) -> None:
    with saver.region("a"):
        bound = saver.bind_region(lambda: (tag for tag in [load(2 * MIB)]))
    assert list(on_thread(bound)) == ["a"]


@pytest.mark.parametrize("wrong", [None, 3, "load"])
def test_only_callables_can_be_bound(saver: TorchMemorySaver, wrong: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="function must be a callable"):
        saver.bind_region(wrong)


def test_bind_region_is_a_function_of_the_module() -> None:
    assert torch_memory_saver.bind_region(len) is len
    assert "bind_region" in torch_memory_saver.__all__
