"""Guards TMS_RELEASE_CACHED: it runs before pauses or periodically, from the first use on, and again after a capture."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver._engine.background import Periodic, RegisteredWork
from torch_memory_saver.observe.memory import release as module

#: A stand-in for torch that counts how often its cache is emptied; `saver` finds it in sys.modules.
PROGRAM = """
import os, sys, threading
from types import SimpleNamespace
import torch_memory_saver
from torch_memory_saver.observe.memory import release
assert threading.active_count() == 1
done = []
event = threading.Event()
def stand_in(self, options):
    done.append(threading.current_thread() is threading.main_thread())
    event.set()
    return SimpleNamespace(skipped=None)
release.CacheReleaser.release = stand_in
saver = torch_memory_saver.torch_memory_saver
"""


def test_before_each_pause(program: Any) -> None:
    text = """
saver.resume()
assert (done, threading.active_count()) == ([], 1)
saver.pause(); saver.pause()
assert done == [True, True], done
"""
    assert program(PROGRAM + text, preloaded=False, TMS_RELEASE_CACHED="pause").stderr == ""


def test_periodically_from_the_first_use_on_and_in_forked_children(program: Any) -> None:
    text = """
assert done == []
saver.stats()
assert event.wait(60)
assert not any(done), "on a thread of its own"
def child():
    event.clear()
    assert event.wait(60)
pid = os.fork()
if pid == 0:
    status = 1
    try:
        child()
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(pid, 0)[1] == 0
event.clear()
assert event.wait(60)
"""
    program(PROGRAM + text, preloaded=False, TMS_RELEASE_CACHED="0.01")


def test_without_the_variable_nothing_runs(program: Any) -> None:
    text = """
import sys
saver.pause()
assert done == [] and threading.active_count() == 1
"""
    program(PROGRAM + text, preloaded=False)
    program(PROGRAM + text, preloaded=False, TMS_RELEASE_CACHED=" ")


@pytest.mark.parametrize("value", ["pauses", "0", "-1", "nan", "inf"])
def test_other_values_are_reported_and_ignored(value: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        module.start_releases(value)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"TMS_RELEASE_CACHED='{value}' is ignored (allowed: pause, or a number of seconds above 0)"


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Why the next releases do nothing."""
    reasons: list[str | None] = []
    monkeypatch.setattr(module, "release_cached", lambda: SimpleNamespace(skipped=reasons.pop(0)))
    return reasons


def test_a_release_that_a_capture_put_off_is_tried_again_soon(skipped: list[str | None]) -> None:
    skipped += ["capture", "capture", "unused", None]
    delays: list[float] = []

    def wait(seconds: float) -> bool:
        delays.append(seconds)
        return not skipped

    Periodic("test", 60, lambda: module._release_or_put_off(60), wait)._run()
    assert delays == [60, 1.0, 1.0, 60, 60]
    skipped.append("capture")
    assert module._release_or_put_off(0.25) == 0.25


def _waits(count: int) -> Iterator[bool]:
    yield from [False] * count
    while True:
        yield True


def test_a_failure_is_logged_and_the_work_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        raise KeyError("the reason")

    waits = _waits(3)
    before = RegisteredWork()
    before.add("the work", work)
    with caplog.at_level(logging.WARNING):
        Periodic("the work", 1, work, lambda seconds: next(waits))._run()
        before.run()
    assert len(calls) == 4
    assert [record.getMessage() for record in caplog.records] == ["the work failed"] * 4
    assert "the reason" in caplog.text
