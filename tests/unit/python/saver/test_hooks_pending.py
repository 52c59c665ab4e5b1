"""Guards the hooks of resumes in the background: who calls the after-callbacks, how often, and what failures do."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from processes import wait_until
from recorded_hooks import TIMEOUT_S, Gate, Recorder

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidStateError, OutOfMemoryError

ACTIVE = {_core.STATE_ACTIVE}


@pytest.fixture
def pending(hooks: Recorder) -> Any:
    """Begins one, whose before-callbacks are then called."""

    def begin() -> Any:
        hooks.allocate("a", backup=_core.BACKUP_PINNED)
        hooks.saver.pause()
        hooks.on_resume("one")
        hooks.on_resume("two")
        return hooks.saver.resume(wait=False)

    return begin


def test_after_callbacks_are_called_by_wait_and_once(hooks: Recorder, pending: Any, pool: ThreadPoolExecutor) -> None:
    begun = pending()
    wait_until(lambda: begun.done)
    assert hooks.take_events() == ["one before", "two before"]
    threads: list[int] = []
    hooks.does["one", "after"] = lambda: threads.append(threading.get_ident())
    report = pool.submit(lambda: (begun.wait(), threads.append(threading.get_ident()))[0]).result(TIMEOUT_S)
    assert threads[0] == threads[1] != threading.get_ident()
    assert begun.wait() == report == hooks.told["one", "after"].report
    assert hooks.take_events() == ["two after", "one after"]


def test_other_waits_return_after_the_callbacks(hooks: Recorder, pending: Any, pool: ThreadPoolExecutor) -> None:
    begun = pending()
    gate = hooks.does["two", "after"] = Gate()
    first = pool.submit(begun.wait)
    assert gate.reached.wait(TIMEOUT_S)
    second = pool.submit(begun.wait)
    assert not second.done()
    gate.opened.set()
    assert second.result(TIMEOUT_S) == first.result(TIMEOUT_S)
    assert hooks.take_events() == ["one before", "two before", "two after", "one after"]


@pytest.mark.parametrize("callback", ["after", "before"])
def test_wait_is_refused_inside_a_callback(hooks: Recorder, pending: Any, callback: str) -> None:
    """It would call callbacks within callbacks, or wait for the ones that it is in."""
    begun = pending()
    refused: list[str] = []

    def inside() -> None:
        with pytest.raises(InvalidStateError, match="wait: this thread is inside") as caught:
            begun.wait()
        refused.append(caught.value.operation)

    if callback == "after":
        hooks.does["one", "after"] = inside
    else:
        hooks.allocate("b")
        hooks.on_pause("p", hooks.tag("b"))
        hooks.does["p", "before"] = inside
        hooks.saver.pause(hooks.tag("b"))
    begun.wait()
    assert refused == ["wait"]
    hooks.does["one", "after"] = begun.wait
    begun.wait()


def test_a_pending_resume_fails(hooks: Recorder, pending: Any, simulator: Any) -> None:
    hooks.does["two", "before"] = lambda: simulator.fail_after("cuMemCreate", 0, 1 << 30, 2)
    begun = pending()
    with pytest.raises(OutOfMemoryError) as caught:
        begun.wait()
    assert hooks.take_events() == ["one before", "two before", "two cancelled", "one cancelled"]
    assert hooks.told["one", "cancelled"] is caught.value
    with pytest.raises(OutOfMemoryError):
        begun.wait()
    assert hooks.take_events() == []


def test_an_after_callback_of_a_pending_resume_raises(hooks: Recorder, pending: Any) -> None:
    begun = pending()
    hooks.raises["two", "after"] = KeyError("no")
    with pytest.raises(KeyError):
        begun.wait()
    assert hooks.take_events()[2:] == ["two after", "one after"]
    assert begun.wait().allocations == 1
    assert hooks.take_events() == []


def test_a_resume_that_cannot_begin(hooks: Recorder, pending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = OutOfMemoryError("no thread")

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise raised

    monkeypatch.setattr(_core, "resume_begin", refuse)
    with pytest.raises(OutOfMemoryError) as caught:
        pending()
    assert caught.value is raised
    assert hooks.take_events() == ["one before", "two before", "two cancelled", "one cancelled"]


def test_an_interrupted_wait_calls_no_hook(hooks: Recorder, pending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resume goes on, and the next wait has the callbacks called."""
    begun = pending()
    wait = _core.pending_wait
    answers: list[Callable[..., Any]] = [_interrupt, wait]
    monkeypatch.setattr(_core, "pending_wait", lambda *arguments: answers.pop(0)(*arguments))
    with pytest.raises(KeyboardInterrupt):
        begun.wait()
    assert hooks.take_events() == ["one before", "two before"]
    begun.wait()
    assert hooks.take_events() == ["two after", "one after"]


def _interrupt(*arguments: Any) -> Any:
    raise KeyboardInterrupt


def test_a_dropped_pending_resume_is_logged(hooks: Recorder, pending: Any, caplog: pytest.LogCaptureFixture) -> None:
    pending()
    gc.collect()
    (record,) = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "no after-callback of its hooks" in record.getMessage() and "Recorded" in record.getMessage()
    _core.resume((hooks.tag("a"),), None)  # waits for its turn
    assert hooks.states() == ACTIVE
    assert hooks.take_events() == ["one before", "two before"]


def test_a_pending_resume_without_hooks_of_its_tags(hooks: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    hooks.allocate("a")
    hooks.saver.pause()
    hooks.on_resume("other", hooks.tag("b"))
    hooks.saver.resume(wait=False).wait()
    hooks.saver.pause()
    hooks.saver.resume(wait=False)
    gc.collect()
    assert not [record for record in caplog.records if "dropped" in record.getMessage()]
    assert hooks.take_events() == []
