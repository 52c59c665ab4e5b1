"""Guards release_cached: what it releases and reports, when it does nothing, and how it nests."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver import _core
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.captures import capture_gate
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe.memory import release, release_cached, releasing_cached
from torch_memory_saver.observe.memory.release import CacheReleaser, ReleaseOptions
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
STREAM = 1 << 40


@pytest.fixture
def saver(saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> TorchMemorySaver:
    """The one that release_cached uses."""
    monkeypatch.setattr(release, "saver", saver)
    return saver


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def cache(fake_torch: FakeTorch, size: int, device: int = 0) -> None:
    """Leaves a block of the default pool in PyTorch's cache."""
    fake_torch.free(fake_torch.allocate(size, device))


# What it does


def test_the_report_and_its_text(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.allocate(2 * MIB)
    cache(fake_torch, 4 * MIB)
    report = release_cached()
    assert (report.pid, report.freed_bytes, report.rounds, report.skipped) == (os.getpid(), 4 * MIB, 1, None)
    text = "released 4 MiB of cached memory in 3.0 ms, 2 MiB of 6 MiB stay reserved on device 0, 2 MiB of them in tensors"
    assert str(dataclasses.replace(report, seconds=0.003)) == text


def test_paused_memory_is_named(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("kv"):
        fake_torch.allocate(4 * MIB)
    fake_torch.allocate(2 * MIB)
    saver.pause()
    with releasing_cached() as releasing:
        assert repr(releasing) == "<releasing_cached: nothing released yet>"
    report = releasing.report
    assert report is not None and report.devices[0].paused_bytes == 4 * MIB
    assert str(report).endswith("6 MiB of them in tensors, 4 MiB of them paused (no device memory)")
    assert repr(releasing) == f"<releasing_cached: {report}>"


def test_memory_that_becomes_slack_was_not_freed(
    saver: TorchMemorySaver, fake_torch: FakeTorch, request: pytest.FixtureRequest
) -> None:
    tag = request.node.name  # one of which nothing was freed before
    with saver.region(tag):
        addresses = [fake_torch.allocate(2 * MIB) for _ in range(8)]  # the last four lie side by side
        saver.pause(tag)
        saver.resume(tag)
        fake_torch.free(addresses[-2])
        report = release_cached()
    assert _core.counters()["slack_bytes"] == 2 * MIB
    assert (report.devices[0].reserved_before - report.devices[0].reserved_after, report.freed_bytes) == (2 * MIB, 0)


def test_the_cache_is_emptied_last(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    release_cached()
    last = fake_torch.calls.index("empty_cache")
    assert fake_torch.calls[:last] == ["ipc_collect", "synchronize 0"]
    assert "empty_host_cache" not in fake_torch.calls


class Finalizers:
    """At each garbage collection a tensor dies: one round makes memory free that only the next one releases."""

    def __init__(self, fake_torch: FakeTorch, sizes: list[int]) -> None:
        self._fake = fake_torch
        self._tensors = [fake_torch.allocate(size) for size in sizes]

    def __call__(self, *_: Any) -> int:
        if self._tensors:
            self._fake.free(self._tensors.pop(0))
        return 0


@pytest.mark.parametrize(
    ("repeat", "rounds", "freed"), [(None, 1, 8), (1, 4, 14), (2 * MIB, 4, 14), (4 * MIB, 3, 14), (9 * MIB, 1, 8)]
)
def test_a_release_is_repeated_while_it_frees_enough(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    monkeypatch: pytest.MonkeyPatch,
    repeat: int | None,
    rounds: int,
    freed: int,
) -> None:
    monkeypatch.setattr(gc, "collect", Finalizers(fake_torch, [8 * MIB, 4 * MIB, 2 * MIB]))
    report = release_cached(repeat_bytes=repeat)
    assert (report.rounds, report.freed_bytes) == (rounds, freed * MIB)


def test_rounds_end_where_each_frees_something(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", Finalizers(fake_torch, [2 * MIB] * 30))
    assert release_cached(repeat_bytes=1).rounds == 10


def test_host_memory_on_request(saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(type(saver), "release_host_memory", lambda self: released.append("pool"))
    release_cached(host=True)
    assert (released, fake_torch.calls.count("empty_host_cache")) == (["pool"], 1)


def test_bad_arguments(saver: TorchMemorySaver) -> None:
    bad: list[dict[str, Any]] = [
        {"repeat_bytes": 0},
        {"repeat_bytes": -1},
        {"repeat_bytes": 1.5},
        {"cool_down": -1},
        {"cool_down": float("nan")},
        {"cool_down": float("inf")},
        {"cool_down": "1"},
        {"host": 1},
    ]
    for arguments in bad:
        for make in (release_cached, releasing_cached):
            with pytest.raises(InvalidArgumentError, match=next(iter(arguments))):
                make(**arguments)


# When it does nothing


def test_the_cool_down(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    clock = Clock()
    releaser = CacheReleaser(clock)
    options = ReleaseOptions.check(cool_down=10)
    assert releaser.release(options).skipped is None  # the first one needs none before it
    cache(fake_torch, 2 * MIB)
    clock.now += 9.5
    report = releaser.release(options)
    assert (report.skipped, report.rounds, report.devices) == ("cool-down", 0, ())
    assert "released nothing" in str(report) and "cool-down" in str(report)
    clock.now += 0.5  # a release that did nothing does not start it again
    assert releaser.release(options).freed_bytes == 2 * MIB
    assert releaser.release(ReleaseOptions.check()).skipped is None


def test_the_report_has_the_seconds(saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def collect() -> int:
        clock.now += 2.5
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    assert CacheReleaser(clock).release(ReleaseOptions()).seconds == 2.5


@pytest.fixture
def capture(simulator: Any) -> Iterator[None]:
    """A visible capture of another thread's stream."""
    identity = _core.capture_begin_on(STREAM)
    yield
    _core.capture_end(identity)


def test_a_visible_capture_puts_it_off(saver: TorchMemorySaver, fake_torch: FakeTorch, capture: None) -> None:
    cache(fake_torch, 2 * MIB)
    report = release_cached()
    assert (report.skipped, report.rounds) == ("capture", 0)
    assert "capture" in str(report)
    assert fake_torch.calls == []
    assert fake_torch.reserved_bytes(0) == 2 * MIB


def test_a_capture_does_not_start_the_cool_down(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    releaser = CacheReleaser(Clock())
    identity = _core.capture_begin_on(STREAM)
    assert releaser.release(ReleaseOptions(cool_down=10)).skipped == "capture"
    _core.capture_end(identity)
    assert releaser.release(ReleaseOptions(cool_down=10)).skipped is None


def test_a_capture_of_this_thread_puts_it_off(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_torch, "is_capturing", lambda: True)
    assert release_cached().skipped == "capture"
    assert fake_torch.calls == []


def test_a_capture_that_begins_during_the_collection_puts_it_off(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: begun.append(_core.capture_begin_on(STREAM)))
    assert release_cached().skipped == "capture"
    _core.capture_end(begun[0])
    assert fake_torch.calls == []


def test_a_capture_cannot_begin_while_garbage_is_collected_and_caches_emptied(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[bool] = []

    def try_to_begin() -> None:
        free.append(capture_gate._lock.acquire(blocking=False))
        if free[-1]:
            capture_gate._lock.release()

    def in_another_thread(*_: Any) -> None:
        thread = threading.Thread(target=try_to_begin)
        thread.start()
        thread.join()

    monkeypatch.setattr(gc, "collect", in_another_thread)
    monkeypatch.setattr(fake_torch, "synchronize", in_another_thread)
    release_cached()
    in_another_thread()
    assert free == [False, False, True]


def test_a_finaliser_that_releases_does_nothing(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner: list[str | None] = []
    monkeypatch.setattr(gc, "collect", lambda: inner.append(release_cached().skipped))
    assert release_cached().skipped is None
    assert inner == ["inside"]


def test_a_callback_of_a_pause_releases_nothing(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with saver.region("a", enable_cpu_backup=True):
        fake_torch.allocate(2 * MIB)
    inner: list[str | None] = []
    saver.pause(progress=lambda done, total: inner.append(release_cached().skipped))
    assert set(inner) == {"inside"}
    saver.resume()


def test_a_process_that_does_not_use_cuda(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "in_use", lambda: None)
    report = release_cached()
    assert (report.skipped, report.devices) == ("unused", ())


# Nesting


def test_nested_ones_release_once_at_the_outermost_end(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with releasing_cached() as outer:
        with releasing_cached() as inner:
            cache(fake_torch, 2 * MIB)
        assert inner.report is None
        assert fake_torch.calls == []
    assert outer.report is not None and outer.report.freed_bytes == 2 * MIB
    assert fake_torch.calls.count("ipc_collect") == 1


def test_releasing_cached_releases_after_an_exception(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with pytest.raises(KeyError), releasing_cached() as outer:
        cache(fake_torch, 2 * MIB)
        raise KeyError
    assert outer.report is not None and outer.report.freed_bytes == 2 * MIB
    with releasing_cached() as outer:
        pass
    assert outer.report is not None


def test_a_decorated_function(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    @releasing_cached(repeat_bytes=1)
    def step(depth: int) -> str:
        """What it says."""
        cache(fake_torch, 2 * MIB)
        return step(depth - 1) + "." if depth else ""

    assert (step(2), step.__name__, step.__doc__) == ("..", "step", "What it says.")
    assert fake_torch.calls.count("ipc_collect") == 2  # once with something to free, and once more
    assert fake_torch.reserved_bytes(0) == 0


def test_a_decorated_coroutine_function(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    @releasing_cached()
    async def sleep(inner: bool) -> int:
        if inner:
            await asyncio.gather(sleep(False), sleep(False))
        cache(fake_torch, 2 * MIB)
        await asyncio.sleep(0)
        return fake_torch.calls.count("ipc_collect")

    assert asyncio.run(sleep(True)) == 0
    assert fake_torch.calls.count("ipc_collect") == 1


def test_tasks_nest_by_themselves(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    @releasing_cached()
    async def call(turn: asyncio.Event, other: asyncio.Event) -> None:
        other.set()
        await turn.wait()

    async def overlapping() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        await asyncio.gather(call(first, second), call(second, first))

    asyncio.run(overlapping())
    assert fake_torch.calls.count("ipc_collect") == 2


def test_generators_are_not_decorated(saver: TorchMemorySaver) -> None:
    def rows() -> Iterator[int]:
        yield 1

    for function in (rows, 3):
        with pytest.raises(InvalidArgumentError, match="only functions"):
            releasing_cached()(function)  # type: ignore[type-var]
