"""Guards calls that are submitted to a thread pool inside a region: they belong to it, and make nothing wait or fail."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from fake_torch import FakeTorch
from other_threads import in_thread
from threads import InsideRegion

from torch_memory_saver import _core, errors
from torch_memory_saver._engine import thread_pools
from torch_memory_saver._patches import patches_in_force
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.records.frames import Pause
from torch_memory_saver._torch.routing import admission
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
PATIENCE_S = 60.0
NAME = "concurrent.futures.ThreadPoolExecutor.submit"
ORIGINAL = ThreadPoolExecutor.submit

pytestmark = pytest.mark.usefixtures("no_warning")


@pytest.fixture
def pool(store: PoolStore) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Running:
    """A call that has loaded and waits, submitted to a pool. In the end it loads again, or does what else it is given."""

    def __init__(self, pool: ThreadPoolExecutor, load: Callable[[], Any], then: Callable[[], Any] | None = None) -> None:
        self._load = load
        self._then = then or load
        self._allocated, self._go_on = threading.Event(), threading.Event()
        self._future: Future[tuple[Any, Any]] = pool.submit(self.run)
        assert self._allocated.wait(PATIENCE_S)

    def run(self) -> tuple[Any, Any]:
        before = self._load()
        self._allocated.set()
        assert self._go_on.wait(PATIENCE_S)
        return before, self._then()

    def finish(self) -> tuple[Any, Any]:
        """Let it go on. Returns both results."""
        self._go_on.set()
        return self._future.result(PATIENCE_S)


def test_a_call_belongs_to_the_region(saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor) -> None:
    with saver.region("a", enable_cpu_backup=True):
        assert pool.submit(load).result() == "a"
        assert list(pool.map(load, [2 * MIB] * 8)) == ["a"] * 8
    assert pool.submit(load).result() is None


@pytest.mark.parametrize("also", [(), ("region",)], ids=["outside", "inside another region"])
def test_a_worker_that_starts_inside_a_region_is_in_none(
    saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor, also: tuple[str, ...]
) -> None:
    """The executor belongs to the whole program, and work of other threads to these."""
    inside: list[str | None] = []

    def use_from_another_thread() -> None:
        if also:
            with saver.region("b"):
                inside.append(pool.submit(load).result())
        else:
            inside.append(pool.submit(load).result())

    with saver.region("a"):
        assert pool.submit(load).result() == "a"
        in_thread(use_from_another_thread)
    assert inside == ["b" if also else None]


def test_the_innermost_region_applies(saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor) -> None:
    with saver.region("a"):
        with saver.region("b"):
            inner = pool.submit(load)
        with saver.disable():
            ordinary = pool.submit(load)
        outer = pool.submit(load)
    assert [future.result() for future in (inner, ordinary, outer)] == ["b", None, "a"]


def test_a_call_of_a_call(saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor) -> None:
    with saver.region("a"):
        assert pool.submit(lambda: pool.submit(load).result()).result() == "a"


def test_a_call_that_outlives_the_region(
    saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor, store: PoolStore
) -> None:
    with saver.region("a"):
        running = Running(pool, load)
    assert running.finish() == ("a", "a")
    assert store.regions._admission.frames == {}


def test_a_region_without_threads(saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor) -> None:
    with saver.region("a", threads=False):
        assert pool.submit(load).result() is None
        assert pool.submit(saver.bind_region(lambda: pool.submit(load).result())).result() is None
        with saver.region("b"):
            assert pool.submit(load).result() == "b"

    @saver.region("a", threads=False)
    def decorated() -> str | None:
        return pool.submit(load).result()

    assert decorated() is None


def test_threads_is_a_bool(saver: TorchMemorySaver) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="threads must be True or False"):
        saver.region("a", threads=1)  # type: ignore[arg-type]


def test_asyncio(saver: TorchMemorySaver, load: Any, store: PoolStore) -> None:
    """Its default executor is one for all tasks, and it calls functions in the task's context."""

    def load_in_a_region_inside() -> str | None:
        with saver.region("c"):
            return load()  # type: ignore[no-any-return]

    async def outside(entered: asyncio.Event, left: asyncio.Event) -> str | None:
        await entered.wait()
        tag: str | None = await asyncio.to_thread(load)
        left.set()
        return tag

    async def main() -> list[str | None]:
        entered, left = asyncio.Event(), asyncio.Event()
        other = asyncio.create_task(outside(entered, left))
        await asyncio.sleep(0)
        with saver.region("a"):
            loop = asyncio.get_running_loop()
            found = [
                await asyncio.to_thread(load),
                await loop.run_in_executor(None, load),
                await asyncio.to_thread(load_in_a_region_inside),
            ]
        entered.set()
        await left.wait()
        return [*found, await other]

    assert asyncio.run(main()) == ["a", "a", "c", None]


# Other effects of submit().


def test_results_and_mistakes_are_those_of_the_original(
    saver: TorchMemorySaver, fake_torch: FakeTorch, pool: ThreadPoolExecutor
) -> None:
    def numbers() -> Iterator[int]:
        yield from (1, 2)

    with saver.region("a"):
        assert pool.submit(lambda *, self, fn: (self, fn), self=1, fn=2).result() == (1, 2)
        assert list(pool.submit(numbers).result()) == [1, 2]
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0).result()
        with pytest.raises(TypeError, match="not callable"):
            pool.submit(3).result()  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'fn'"):
            pool.submit()  # type: ignore[call-arg]
        pool.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(print)


def test_a_function_is_not_kept(saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor) -> None:
    class Function:
        def __call__(self) -> str | None:
            return load()  # type: ignore[no-any-return]

    function = Function()
    kept = weakref.ref(function)
    with saver.region("a"):
        future = pool.submit(function)
        assert future.result() == "a"
        del function
        pool.submit(int).result()  # the worker has dropped the call before
        pool.shutdown()
        gc.collect()
        assert kept() is None


def test_a_call_is_pickled_without_its_region(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    with saver.region("a"):
        region = thread_pools._FollowingRegion(store, lambda: None, store.regions.stack()[-1], os.getpid)
        call = pickle.loads(pickle.dumps(thread_pools._FollowingCall(region, os.getpid)))
    assert isinstance(call, functools.partial) and call() == os.getpid()


def test_a_call_that_forks(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    """The child leaves the region, too, and calls that it runs itself follow nothing."""
    pids: list[int] = []

    def fork_inside() -> None:
        pid = thread_pools._FollowingCall(region, os.fork)()
        if pid == 0:
            call = thread_pools._FollowingCall(thread_pools._FollowingRegion(store, lambda: None, origin, int), int)
            os._exit(call() if store.regions.stack() == [] else 1)
        pids.append(pid)

    with saver.region("a"):
        origin = store.regions.stack()[-1]
        region = thread_pools._FollowingRegion(store, lambda: fake_torch, origin, os.fork)  # type: ignore[arg-type, return-value]
        in_thread(fork_inside)
    assert os.waitpid(pids[0], 0)[1] == 0


# Pauses.


def test_a_pause_takes_a_running_call_out(
    saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor, store: PoolStore, caplog: pytest.LogCaptureFixture
) -> None:
    with saver.region("a"):
        running = [Running(pool, load), Running(pool, load)]
    assert saver.pause("a", timeout=0.0).allocations == 2
    assert [call.finish() for call in running] == [("a", None)] * 2
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith(
        "Running.run(), which was submitted to a thread pool inside region(tag='a'), was still running"
    )
    assert store.regions._admission.frames == {}
    saver.resume("a")
    with saver.region("a"):
        assert pool.submit(load).result() == "a"


def test_the_settings_of_the_core_end_too(saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor) -> None:
    """They apply to what the preload library and other libraries allocate."""
    was_called, go_on = threading.Event(), threading.Event()

    def look() -> tuple[_core.RegionSettings, _core.RegionSettings]:
        load()
        before = _core.region_current()
        was_called.set()
        assert go_on.wait(PATIENCE_S)
        return before, _core.region_current()

    with saver.region("a"):
        future = pool.submit(look)
    assert was_called.wait(PATIENCE_S)
    saver.pause("a")
    go_on.set()
    before, after = future.result()
    assert (before.tag, before.managed, after.managed) == ("a", True, False)
    saver.resume("a")


def test_a_call_that_was_taken_out_stays_out(
    saver: TorchMemorySaver, fake_torch: FakeTorch, load: Any, pool: ThreadPoolExecutor
) -> None:
    """A region inside it and a suspension of its thread's routings end, and it is still outside."""

    def load_inside_and_outside() -> list[str | None]:
        with saver.region("b"):
            inside = load()
            saver.empty_cache()
            again = load()
        saver.empty_cache()
        return [inside, again, load()]

    with saver.region("a"):
        running = Running(pool, load, load_inside_and_outside)
    saver.pause("a")
    assert running.finish() == ("a", ["b", "b", None])
    saver.resume("a")


def test_a_region_that_is_left_at_the_deadline_of_a_pause(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    load: Any,
    pool: ThreadPoolExecutor,
    store: PoolStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait has failed because of it, and the pause goes on: the calls are taken out all the same."""
    with saver.region("a"):
        running = Running(pool, load)
    other = InsideRegion(saver, "a", fake_torch)
    wait_until = store.regions._admission.changed.wait_until

    def fail_once(holds: Callable[[], bool], deadline: float) -> bool:
        monkeypatch.setattr(store.regions._admission.changed, "wait_until", wait_until)
        other.leave()
        other._thread.join(PATIENCE_S)
        return False

    monkeypatch.setattr(store.regions._admission.changed, "wait_until", fail_once)
    pause = Pause(store.regions.stack(), ("a",))
    try:
        store.regions.begin_pause(pause, 0.0)
        assert store.regions._admission.changed.wait_until == wait_until
        assert running.finish() == ("a", None)
    finally:
        store.regions.end_pause(pause)


def test_a_call_of_another_tag_goes_on(saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor) -> None:
    with saver.region("a"):
        load()
    with saver.region("b"):
        running = Running(pool, load)
    saver.pause("a")
    assert running.finish() == ("b", "b")


def test_an_explicit_region_inside_a_call_keeps_a_pause_waiting(
    saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor
) -> None:
    def load_inside() -> str | None:
        with saver.region("a"):
            return load()  # type: ignore[no-any-return]

    with saver.region("a"):
        running = Running(pool, load_inside)
        bound = Running(pool, saver.bind_region(load))
    saver.pause("a")  # neither is in an explicit region now
    assert running.finish() == ("a", "a")
    assert bound.finish() == ("a", "a")


def test_a_bound_function_keeps_a_pause_waiting(
    saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        load()
        inside.set()
        assert go_on.wait(PATIENCE_S)

    with saver.region("a"):
        future = pool.submit(saver.bind_region(wait))
    assert inside.wait(PATIENCE_S)
    with pytest.raises(errors.InvalidStateError, match="still inside region"):
        saver.pause("a", timeout=0.01)
    go_on.set()
    future.result()
    assert saver.pause("a", timeout=PATIENCE_S).allocations == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_hook_that_waits_for_a_call(saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor) -> None:
    with saver.region("a"):
        running = Running(pool, load)
    found: list[Any] = []
    handle = saver.on_pause(None, "before", lambda call: found.append(running.finish()))
    saver.pause("a")
    handle.remove()
    saver.resume("a")
    assert found == [("a", "a")], "it is taken out only after the callbacks"


def test_a_call_that_begins_during_a_pause_allocates_ordinary_memory(
    saver: TorchMemorySaver, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not wait for the pause, which may wait for it: here a callback of the pause does."""
    go_on = threading.Event()

    def wait_and_load() -> str | None:
        assert go_on.wait(PATIENCE_S)
        return load()  # type: ignore[no-any-return]

    with saver.region("a", enable_cpu_backup=True), ThreadPoolExecutor(1) as one:
        load()
        first, second = one.submit(go_on.wait), one.submit(load)  # the second begins when the first ends
        found: list[str | None] = []

        def progress(done: int, total: int) -> None:
            go_on.set()
            found.append(second.result(PATIENCE_S))

        saver.pause("a", progress=progress)
        assert first.result()
    assert found and set(found) == {None}
    assert "a pause of tag 'a' is running" in caplog.text


# How many.


def test_few_calls_are_in_the_region_at_a_time(
    saver: TorchMemorySaver, fake_torch: FakeTorch, load: Any, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs a pool, and each pool has partly used segments."""
    monkeypatch.setattr(admission, "_PATIENCE_S", PATIENCE_S)
    most: list[int] = []

    def count() -> str | None:
        most.append(len(store.regions._admission.frames))
        return load()  # type: ignore[no-any-return]

    with ThreadPoolExecutor(16) as pool, saver.region("a"):
        assert list(pool.map(lambda _: count(), range(64))) == ["a"] * 64
    assert max(most) <= admission._MAX_FOLLOWING + 1  # and this thread's
    assert len([used for used in fake_torch.managed.values() if used]) <= admission._MAX_FOLLOWING + 1


def test_calls_that_wait_for_one_another_are_in_the_region_at_once(
    saver: TorchMemorySaver, load: Any, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_PATIENCE_S", 0.01)
    barrier = threading.Barrier(16)

    def meet() -> str | None:
        barrier.wait(PATIENCE_S)
        return load()  # type: ignore[no-any-return]

    with ThreadPoolExecutor(16) as pool, saver.region("a"):
        for _ in range(2):
            assert [future.result() for future in [pool.submit(meet) for _ in range(16)]] == ["a"] * 16


def test_idle_memory_is_returned_once_before_the_first_call(
    saver: TorchMemorySaver, fake_torch: FakeTorch, load: Any, pool: ThreadPoolExecutor
) -> None:
    """The calls have pools of their own."""
    with saver.region("a"):
        fake_torch.free(fake_torch.allocate(8 * MIB))
        assert _core.counters()["resident_bytes"] == 8 * MIB
        pool.submit(int).result()
        assert _core.counters()["resident_bytes"] == 0
        fake_torch.free(fake_torch.allocate(8 * MIB))
        assert pool.submit(load).result() == "a"
        assert _core.counters()["resident_bytes"] == 10 * MIB
    assert _core.counters()["resident_bytes"] == 2 * MIB


# The replacement.


def test_the_replacement_is_made_at_the_first_region(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    assert ThreadPoolExecutor.submit is ORIGINAL
    with saver.region("a"):
        pass
    replacement = ThreadPoolExecutor.submit
    assert replacement is not ORIGINAL
    assert inspect.signature(replacement) == inspect.signature(ORIGINAL)
    with saver.region("a"):
        pass
    assert ThreadPoolExecutor.submit is replacement
    assert NAME in [patch.name for patch in patches_in_force()]
    thread_pools.stop_following()
    assert ThreadPoolExecutor.submit is ORIGINAL
    assert NAME not in [patch.name for patch in patches_in_force()]


@pytest.mark.parametrize("when", ["before", "after"])
def test_two_first_regions_at_once_replace_it_once(store: PoolStore, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The second one comes just before or after the replacement by the first one."""
    replace = thread_pools.replace

    def replace_and_follow(*arguments: Any) -> None:
        monkeypatch.setattr(thread_pools, "replace", replace)
        if when == "before":
            in_thread(follow)
        replace(*arguments)
        if when == "after":
            in_thread(follow)

    def follow() -> None:
        thread_pools.follow_thread_pools(store, lambda: None, False)

    monkeypatch.setattr(thread_pools, "replace", replace_and_follow)
    follow()
    assert ThreadPoolExecutor.submit.__wrapped__ is ORIGINAL  # type: ignore[attr-defined]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrapper_of_the_program(
    saver: TorchMemorySaver, load: Any, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    wrapped: list[str] = []

    def wrap() -> None:
        inner = ThreadPoolExecutor.submit

        def submit(self: ThreadPoolExecutor, fn: Any, /, *arguments: Any, **keywords: Any) -> Any:
            wrapped.append("called")
            return inner(self, fn, *arguments, **keywords)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)

    if when == "before":
        wrap()
    with saver.region("a"):
        if when == "after":
            wrap()
        outermost = ThreadPoolExecutor.submit
        assert pool.submit(load).result() == "a"
    assert wrapped == ["called"]
    thread_pools.stop_following()
    assert (ThreadPoolExecutor.submit is outermost) is (when == "after"), "what wraps ours stays"


def test_a_call_whose_region_cannot_be_entered_runs_as_ordinary(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    load: Any,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with saver.region("a"), monkeypatch.context() as patch:
        load()
        patch.setattr(fake_torch, "fail_begin_of_new_pools_on", 0)
        assert pool.submit(load, MIB).result() is None
        assert pool.submit(load, MIB).result() is None
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "allocates ordinary memory: begin: injected failure" in message
