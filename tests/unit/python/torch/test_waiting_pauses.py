"""Guards pauses that wait for regions of other threads: who waits for whom, how long, and how a wait ends."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_torch import DEFAULT, FakeTorch
from other_threads import in_thread
from threads import InsideRegion

from torch_memory_saver import _core, errors
from torch_memory_saver._engine.calls.call_turns import CallTurn
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
#: A timeout that ends a wait at once.
SHORT_S = 0.01


def when_waiting(store: PoolStore, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have `act` called once, when a thread is about to wait in the store."""
    wait_until, acted = store.regions._admission.changed.wait_until, []

    def wait(holds: Callable[[], bool], deadline: float) -> bool:
        if not acted:
            acted.append(True)
            act()
        return wait_until(holds, deadline)

    monkeypatch.setattr(store.regions._admission.changed, "wait_until", wait)


def test_a_pause_waits_for_another_thread(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = InsideRegion(saver, "a", fake_torch)
    when_waiting(store, monkeypatch, other.leave)
    assert saver.pause("a", timeout=60).bytes == 2 * MIB
    saver.resume()


def test_workers_that_enter_regions_all_the_time(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    """No pause fails, and no region gets paused memory."""
    stop = threading.Event()
    errors_of_workers: list[BaseException] = []

    def serve() -> None:
        try:
            while not stop.is_set():
                with saver.region("a"):
                    address = fake_torch.allocate(2 * MIB)
                    row = _core.find(address)
                    assert row is not None
                    assert row.state == _core.STATE_ACTIVE
                    fake_torch.free(address)
        except BaseException as error:
            errors_of_workers.append(error)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            saver.pause("a", timeout=60)
            saver.resume("a")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors_of_workers == []


def test_the_error_names_thread_and_tag(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    other = InsideRegion(saver, "a", fake_torch)
    try:
        with pytest.raises(errors.InvalidStateError, match=re.escape(other._thread.name) + r".*tag='a'") as caught:
            saver.pause("a", timeout=SHORT_S)
        assert caught.value.tag == "a"
        assert store.regions._admission.pauses == []
        with saver.region("a"):
            pass  # does not wait for the pause that failed
    finally:
        other.leave()
    assert saver.stats().total.paused_bytes == 0


def test_a_thread_inside_may_enter_further_regions(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, inside = threading.Event(), threading.Event()

    def work() -> None:
        with saver.region("a"):
            inside.set()
            assert waits.wait(60)
            for tag in ("a", "b"):
                with saver.region(tag), saver.disable():
                    pass

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    when_waiting(store, monkeypatch, waits.set)
    saver.pause(["a", "b"], timeout=60)
    thread.join()


def test_a_caller_inside_a_region_does_not_wait_for_itself(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"), saver.region("b"):
        fake_torch.allocate(2 * MIB)
        assert saver.pause(timeout=None).bytes == 2 * MIB
    saver.resume()


def test_two_threads_that_pause_each_others_tags(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    both = threading.Barrier(2)
    raised: list[str] = []

    def work(own: str, other: str) -> None:
        with saver.region(own):
            both.wait(60)
            try:
                saver.pause(other, timeout=SHORT_S)
            except errors.InvalidStateError as error:
                raised.append(error.tag)
            both.wait(60)

    thread = threading.Thread(target=work, args=("a", "b"))
    thread.start()
    work("b", "a")
    thread.join()
    assert sorted(raised) == ["a", "b"]
    assert store.regions._admission.pauses == []
    saver.pause(timeout=None)
    saver.resume()


def test_two_threads_that_find_the_same_ended_thread_leave_its_region_once(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    store: PoolStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    region = saver.region("a")
    ended = threading.Thread(target=region.__enter__)
    ended.start()
    ended.join()
    other = threading.Thread(target=store.regions.close_ended)
    waited: list[bool] = []

    def end_routing(device: int, pool: tuple[int, int]) -> None:
        other.start()
        other.join(SHORT_S)
        waited.append(other.is_alive())
        end(device, pool)

    end = fake_torch.end_routing
    monkeypatch.setattr(fake_torch, "end_routing", end_routing)
    store.regions.close_ended()
    other.join()
    assert waited == [True]
    assert sum("ended inside" in record.getMessage() for record in caplog.records) == 1
    assert fake_torch.routings == [] and store.regions._admission.frames == {}


def test_a_signal_ends_the_wait(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    other = InsideRegion(saver, "a", fake_torch)
    when_waiting(store, monkeypatch, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            saver.pause("a", timeout=math.inf)
        assert store.regions._admission.pauses == []
        assert store.regions._admission.changed._waiting == []
        assert saver.stats().total.paused_bytes == 0
    finally:
        other.leave()


def test_a_task_inside_a_region(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    """A pause on another thread waits for a region of the event loop's thread, while the loop runs."""

    async def main() -> int:
        with saver.region("a"):
            fake_torch.allocate(2 * MIB)
            pause = asyncio.create_task(asyncio.to_thread(saver.pause, "a", timeout=60))
            while not store.regions._admission.pauses:
                await asyncio.sleep(0)
        return (await pause).bytes

    assert asyncio.run(main()) == 2 * MIB
    saver.resume()


def test_hooks_are_called_after_the_wait(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    other = InsideRegion(saver, "a", fake_torch)

    def leave() -> None:
        events.append("left")
        other.leave()

    when_waiting(store, monkeypatch, leave)
    hook = saver.on_pause("a", "before", lambda call: events.append("before"))
    saver.pause("a", timeout=60)
    hook.remove()
    assert events == ["left", "before"]
    saver.resume()


def test_the_turn_of_hooks_is_awaited_until_the_timeout(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a"):
        fake_torch.allocate(2 * MIB)
    hook = saver.on_pause("a", "before", lambda call: None)
    try:
        with (
            CallTurn("pause", ("a",), 0.0),
            pytest.raises(errors.InvalidStateError, match="another pause or resume of these tags"),
        ):
            saver.pause("a", timeout=SHORT_S)
    finally:
        hook.remove()


# Threads that end inside a region


def _end_inside(saver: TorchMemorySaver, fake_torch: FakeTorch, tag: str = "a") -> Any:
    regions: list[Any] = []

    def work() -> None:
        regions.append(saver.region(tag))
        regions[0].__enter__()
        fake_torch.allocate(2 * MIB)

    in_thread(work)
    return regions[0]


def test_a_thread_with_the_number_of_an_ended_one(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    """Its regions are not mistaken for those of the ended one."""
    _end_inside(saver, fake_torch)
    frame = next(iter(store.regions._admission.frames.values()))

    def work() -> None:
        store.regions.stack().thread = frame.stack.thread
        assert saver.pause("a", timeout=None).bytes == 2 * MIB
        assert store.regions._admission.frames == {}
        ordinary = fake_torch.allocate(2 * MIB)
        assert fake_torch.pool_of(ordinary) == DEFAULT
        fake_torch.free(ordinary)

    in_thread(work)
    saver.resume()


def test_a_pause_learns_that_a_thread_ends(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, end = threading.Event(), threading.Event()

    def work() -> None:
        saver.region("a").__enter__()
        inside.set()
        end.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    when_waiting(store, monkeypatch, end.set)
    saver.pause("a", timeout=60)
    thread.join()
    assert fake_torch.routings == []
