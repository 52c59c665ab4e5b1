"""Guards regions that are not left in reverse order: tasks of an event loop, generators, other threads. PyTorch allocates
from the pool of the region that was entered last and is still open."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from other_threads import in_thread
from pooled_tensors import DEFAULT_POOL, MIB, empty, pool_of, tag_of

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver

pytestmark = pytest.mark.usefixtures("clean_device")


def made() -> torch.Tensor:
    return empty(2 * MIB)


def settings() -> tuple[str, int]:
    current = _core.region_current()
    return current.tag, current.backup


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def test_leaving_the_outer_region_first_leaves_the_inner_one_in_force(store: Any) -> None:
    outer, inner = saver.region("outer"), saver.region("inner", enable_cpu_backup=True)
    outer.__enter__()
    inner.__enter__()
    with pytest.warns(RuntimeWarning, match=r"region\(tag='outer'\) is left while region\(tag='inner'\)") as caught:
        outer.__exit__(None, None, None)
    assert [warning.filename for warning in caught] == [__file__]
    assert settings() == ("inner", _core.BACKUP_PINNED)
    assert [frame.tag for frame in store.regions.stack()] == ["inner"]
    inside = made()
    inner.__exit__(None, None, None)
    after = made()
    assert (tag_of(inside), tag_of(after), pool_of(after)) == ("inner", None, DEFAULT_POOL)
    assert saver.pause("outer").allocations == 0, "no thread is inside it"


def test_leaving_the_middle_region_leaves_the_others() -> None:
    outer, middle, inner = (saver.region(tag) for tag in ("outer", "middle", "inner"))
    for region in (outer, middle, inner):
        region.__enter__()
    with pytest.warns(RuntimeWarning, match="'middle'.*'inner'"):
        middle.__exit__(None, None, None)
    first = made()
    inner.__exit__(None, None, None)
    second = made()
    assert settings() == ("outer", _core.BACKUP_NONE)
    outer.__exit__(None, None, None)
    assert [tag_of(first), tag_of(second)] == ["inner", "outer"]


def test_leaving_disable_first_leaves_the_region_in_it() -> None:
    with saver.region("outer"):
        disabled, inner = saver.disable(), saver.region("inner")
        disabled.__enter__()
        inner.__enter__()
        with pytest.warns(RuntimeWarning, match=r"disable\(\) is left while region\(tag='inner'\)"):
            disabled.__exit__(None, None, None)
        first = made()
        inner.__exit__(None, None, None)
        second = made()
    assert [tag_of(first), tag_of(second)] == ["inner", "outer"]


def test_tasks_of_an_event_loop() -> None:
    found: dict[str, torch.Tensor] = {}

    async def main() -> None:
        inside_a, inside_b, left_a = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def a() -> None:
            with saver.region("a"):
                found["a1"] = made()
                inside_a.set()
                await inside_b.wait()
                found["a2"] = made()
            left_a.set()

        async def b() -> None:
            await inside_a.wait()
            with saver.region("b", enable_cpu_backup=True):
                found["b1"] = made()
                inside_b.set()
                await left_a.wait()
                found["b2"] = made()

        await asyncio.gather(a(), b())

    message = r"region\(tag='b'\) is entered while another task is inside region\(tag='a'\)"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        asyncio.run(main())
    assert [warning.filename for warning in caught] == [__file__], "one warning for the pair, at the program's line"
    # Allocations of `a` while `b` was open belong to b, and are reported as such. Allocations of b are right throughout.
    assert {name: tag_of(tensor) for name, tensor in found.items()} == {"a1": "a", "a2": "b", "b1": "b", "b2": "b"}
    row = _core.find(found["b2"].data_ptr())
    assert row is not None and row.backup == _core.BACKUP_PINNED


def test_tasks_started_inside_a_region_nest_in_it(no_warning: None) -> None:
    async def load(number: int) -> torch.Tensor:
        await asyncio.sleep(0)
        with saver.region(f"part {number}"):
            return made()

    async def main() -> list[torch.Tensor]:
        with saver.region("all"):
            return await asyncio.gather(*(load(number) for number in range(3)))

    assert [tag_of(tensor) for tensor in asyncio.run(main())] == ["part 0", "part 1", "part 2"]


def test_tasks_that_do_not_await_inside_are_right(no_warning: None) -> None:
    async def load(tag: str) -> list[torch.Tensor]:
        tensors = []
        for _ in range(3):
            with saver.region(tag):
                tensors.append(made())
            await asyncio.sleep(0)
        return tensors

    async def main() -> list[list[torch.Tensor]]:
        return list(await asyncio.gather(load("a"), load("b")))

    assert [[tag_of(tensor) for tensor in tensors] for tensors in asyncio.run(main())] == [["a"] * 3, ["b"] * 3]


def test_threads_that_share_one_object_leave_their_own_entry(no_warning: None) -> None:
    region = saver.region("a")
    inside, left = threading.Event(), threading.Event()
    later: list[torch.Tensor] = []

    def work() -> None:
        with region:
            inside.set()
            assert left.wait(60)
            later.append(made())

    with region:
        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(60)
    assert (_core.region_current().tag, tag_of(made())) == ("default", None)
    left.set()
    thread.join(60)
    assert [tag_of(tensor) for tensor in later] == ["a"], "the other thread was still inside"


def test_leaving_on_another_thread_ends_the_routing(store: Any) -> None:
    region = saver.region("a")
    region.__enter__()

    def leave() -> None:
        with pytest.warns(RuntimeWarning, match=r"region\(tag='a'\) is left on another thread"):
            region.__exit__(None, None, None)

    in_thread(leave)
    assert store.regions.stack() == []
    assert saver.pause("a").allocations == 0
    assert not _core.region_current().managed, "the native settings end as well, or in preload mode what follows is managed"
    assert (pool_of(made()), tag_of(made())) == (DEFAULT_POOL, None)
