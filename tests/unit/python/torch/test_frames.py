"""Guards regions that are not left in reverse order: tasks of an event loop, generators, other threads."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fake_torch import DEFAULT, FakeTorch
from threads import InsideRegion, in_thread

from torch_memory_saver import _core
from torch_memory_saver._torch.pools import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def tag_of(address: int) -> str | None:
    row = _core.find(address)
    return None if row is None else row.tag


def settings() -> tuple[str, int]:
    current = _core.region_current()
    return current.tag, current.backup


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def test_leaving_the_outer_region_first_leaves_the_inner_one_in_force(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    outer, inner = saver.region("outer"), saver.region("inner", enable_cpu_backup=True)
    outer.__enter__()
    inner.__enter__()
    with pytest.warns(RuntimeWarning, match=r"region\(tag='outer'\) is left while region\(tag='inner'\)") as caught:
        outer.__exit__(None, None, None)
    assert [warning.filename for warning in caught] == [__file__]
    assert settings() == ("inner", _core.BACKUP_PINNED)
    assert [frame.tag for frame in store.stack()] == ["inner"]
    inside = fake_torch.allocate(2 * MIB)
    inner.__exit__(None, None, None)
    assert tag_of(inside) == "inner"
    assert tag_of(fake_torch.allocate(2 * MIB)) is None
    assert _core.region_current().depth == 0
    assert store.stack() == []
    assert saver.pause("outer").allocations == 0, "no thread is inside it"


def test_leaving_the_middle_region_leaves_the_others(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    outer, middle, inner = (saver.region(tag) for tag in ("outer", "middle", "inner"))
    for region in (outer, middle, inner):
        region.__enter__()
    with pytest.warns(RuntimeWarning, match="'middle'.*'inner'"):
        middle.__exit__(None, None, None)
    first = fake_torch.allocate(2 * MIB)
    inner.__exit__(None, None, None)
    second = fake_torch.allocate(2 * MIB)
    assert settings() == ("outer", _core.BACKUP_NONE)
    outer.__exit__(None, None, None)
    assert [tag_of(first), tag_of(second)] == ["inner", "outer"]
    assert _core.region_current().depth == 0


def test_leaving_disable_first_leaves_the_region_in_it(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("outer"):
        disabled, inner = saver.disable(), saver.region("inner")
        disabled.__enter__()
        inner.__enter__()
        with pytest.warns(RuntimeWarning, match=r"disable\(\) is left while region\(tag='inner'\)"):
            disabled.__exit__(None, None, None)
        first = fake_torch.allocate(2 * MIB)
        inner.__exit__(None, None, None)
        second = fake_torch.allocate(2 * MIB)
    assert [tag_of(first), tag_of(second)] == ["inner", "outer"]


def test_a_generator_that_is_inside_a_region_when_its_caller_leaves_one(
    saver: TorchMemorySaver, fake_torch: FakeTorch
) -> None:
    def weights() -> Iterator[int]:
        with saver.region("weights", enable_cpu_backup=True):
            while True:
                yield fake_torch.allocate(2 * MIB)

    generator = weights()
    cache = saver.region("cache")
    cache.__enter__()
    first = next(generator)
    caught_up = fake_torch.allocate(2 * MIB)
    with pytest.warns(RuntimeWarning, match=r"region\(tag='cache'\) is left while region\(tag='weights'\)"):
        cache.__exit__(None, None, None)
    second = next(generator)
    generator.close()
    assert [tag_of(address) for address in (first, caught_up, second)] == ["weights"] * 3
    assert _core.region_current().tag == "default"
    assert tag_of(fake_torch.allocate(2 * MIB)) is None


def test_tasks_of_an_event_loop(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    made: dict[str, int] = {}

    async def main() -> None:
        inside_a, inside_b, left_a = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def a() -> None:
            with saver.region("a"):
                made["a1"] = fake_torch.allocate(2 * MIB)
                inside_a.set()
                await inside_b.wait()
                made["a2"] = fake_torch.allocate(2 * MIB)
            left_a.set()

        async def b() -> None:
            await inside_a.wait()
            with saver.region("b", enable_cpu_backup=True):
                made["b1"] = fake_torch.allocate(2 * MIB)
                inside_b.set()
                await left_a.wait()
                made["b2"] = fake_torch.allocate(2 * MIB)

        await asyncio.gather(a(), b())

    message = r"region\(tag='b'\) is entered while another task is inside region\(tag='a'\)"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        asyncio.run(main())
    assert [warning.filename for warning in caught] == [__file__], "one warning for the pair, at the program's line"
    # Allocations of `a` while `b` was open belong to b, and are reported as such; b's are right throughout.
    assert {name: tag_of(address) for name, address in made.items()} == {"a1": "a", "a2": "b", "b1": "b", "b2": "b"}
    row = _core.find(made["b2"])
    assert row is not None and row.backup == _core.BACKUP_PINNED
    assert store.stack() == []
    assert fake_torch.pool_of(fake_torch.allocate(2 * MIB)) == DEFAULT


def test_tasks_started_inside_a_region_nest_in_it(saver: TorchMemorySaver, fake_torch: FakeTorch, no_warning: None) -> None:
    async def load(number: int) -> int:
        await asyncio.sleep(0)
        with saver.region(f"part {number}"):
            return fake_torch.allocate(2 * MIB)

    async def main() -> list[int]:
        with saver.region("all"):
            return await asyncio.gather(*(load(number) for number in range(3)))

    assert [tag_of(address) for address in asyncio.run(main())] == ["part 0", "part 1", "part 2"]


def test_tasks_that_do_not_await_inside_are_right(saver: TorchMemorySaver, fake_torch: FakeTorch, no_warning: None) -> None:
    async def load(tag: str) -> list[int]:
        made = []
        for _ in range(3):
            with saver.region(tag):
                made.append(fake_torch.allocate(2 * MIB))
            await asyncio.sleep(0)
        return made

    async def main() -> list[list[int]]:
        return await asyncio.gather(load("a"), load("b"))

    assert [[tag_of(address) for address in made] for made in asyncio.run(main())] == [["a"] * 3, ["b"] * 3]


def test_with_warnings_as_errors_a_refused_entry_leaves_nothing(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, no_warning: None
) -> None:
    async def main() -> None:
        inside, refused = asyncio.Event(), asyncio.Event()

        async def a() -> None:
            with saver.region("a"):
                inside.set()
                await refused.wait()
                assert [frame.tag for frame in store.stack()] == ["a"]
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
    assert store.stack() == []


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


def test_threads_that_share_one_object_leave_their_own_entry(
    saver: TorchMemorySaver, fake_torch: FakeTorch, no_warning: None
) -> None:
    region = saver.region("a")
    region.__enter__()

    class Shared:
        @staticmethod
        def region(tag: str) -> Any:
            return region

    other = InsideRegion(Shared(), "a", fake_torch)  # type: ignore[arg-type]
    region.__exit__(None, None, None)
    assert _core.region_current().tag == "default"
    assert len(fake_torch.routings) == 1, "the other thread's"
    other.leave()


def test_leaving_on_another_thread_ends_the_routing(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    region = saver.region("a")
    region.__enter__()
    level = store.stack()[0].ids[0]

    def leave() -> None:
        with pytest.warns(RuntimeWarning, match=r"region\(tag='a'\) is left on another thread"):
            region.__exit__(None, None, None)

    in_thread(leave)
    assert fake_torch.routings == []
    assert store.stack() == []
    assert saver.pause("a").allocations == 0
    assert _core.region_leave(level) == 0, "the native settings stayed with the thread"


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
