"""Guards entries of regions that are refused, and shared ones. Which region is in force after regions were left in another
order is in tests/torch/test_frames.py."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fake_torch import FakeTorch
from other_threads import in_thread

from torch_memory_saver import _core
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.errors import InvalidStateError
from torch_memory_saver.saver import TorchMemorySaver


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def test_with_warnings_as_errors_a_refused_entry_leaves_nothing(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, no_warning: None
) -> None:
    async def main() -> None:
        inside, refused = asyncio.Event(), asyncio.Event()

        async def a() -> None:
            with saver.region("a"):
                inside.set()
                await refused.wait()
                assert [frame.tag for frame in store.regions.stack()] == ["a"]
                assert _core.region_current().tag == "a"

        async def b() -> None:
            await inside.wait()
            with pytest.raises(RuntimeWarning), saver.region("b"):
                raise AssertionError("it was entered")
            refused.set()

        await asyncio.gather(a(), b())

    asyncio.run(main())
    assert _core.region_current().depth == 0


def test_with_warnings_as_errors_the_exception_of_the_body_is_kept(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, no_warning: None
) -> None:
    inner = saver.region("inner")
    with pytest.raises(ZeroDivisionError), saver.region("outer"):
        inner.__enter__()
        raise ZeroDivisionError
    elsewhere = saver.region("elsewhere")
    in_thread(elsewhere.__enter__)
    error = ZeroDivisionError()
    elsewhere.__exit__(ZeroDivisionError, error, None)
    inner.__exit__(None, None, None)
    assert store.regions.stack() == []


def test_tasks_that_share_one_object_leave_their_own_entry(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    region = saver.region("a")
    frames: list[Any] = []

    async def main() -> None:
        inside_a, inside_b, left_a = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def a() -> None:
            with region:
                inside_a.set()
                await inside_b.wait()
            left_a.set()

        async def b() -> None:
            await inside_a.wait()
            with region:
                frames.extend(region._frames)  # type: ignore[attr-defined]
                inside_b.set()
                await left_a.wait()
                assert region._frames == frames[1:]  # type: ignore[attr-defined]

        await asyncio.gather(a(), b())

    with pytest.warns(RuntimeWarning, match="another task"):
        asyncio.run(main())
    assert len(frames) == 2
    assert all(frame.closed for frame in frames)


async def coroutine_function() -> None:
    pass


def generator_function() -> Iterator[None]:
    yield


async def asynchronous_generator() -> AsyncIterator[None]:
    yield


class Callable_:
    async def __call__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine_function, "coroutine_function is a coroutine function"),
        (generator_function, "generator_function is a generator function"),
        (asynchronous_generator, "asynchronous_generator is an asynchronous generator function"),
        (Callable_(), "is a coroutine function"),
    ],
)
def test_functions_whose_body_runs_later_are_not_decorated(
    saver: TorchMemorySaver, fake_torch: FakeTorch, function: Callable[..., Any], kind: str
) -> None:
    graph = fake_torch.torch.cuda.CUDAGraph()
    with saver.region("outer"):
        for manager in (saver.region("a"), saver.disable(), saver.cuda_graph(graph)):
            with pytest.raises(TypeError, match=kind + r", which cannot be decorated.*with statement in the body"):
                manager(function)  # type: ignore[operator]


@pytest.mark.parametrize("times", [0, 1])
def test_a_region_that_is_not_entered_cannot_be_left(saver: TorchMemorySaver, fake_torch: FakeTorch, times: int) -> None:
    with saver.region("outer"):
        managers = (
            (saver.region("a"), r"region\(tag='a'\)"),
            (saver.disable(), r"disable\(\)"),
            (saver.cuda_graph(fake_torch.torch.cuda.CUDAGraph()), r"cuda_graph\(\)"),
        )
        for manager, name in managers:
            for _ in range(times):
                with manager:
                    pass
            with pytest.raises(InvalidStateError, match=name + " cannot be left, because it is not entered"):
                manager.__exit__(None, None, None)
        assert len(fake_torch.routings) == 1
