"""Guards the hooks of resumes in the background: who calls the after-callbacks, how often, and what failures do."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from interruptions import every_interruption
from processes import wait_until
from recorded_hooks import TIMEOUT_S, Gate, Recorder

from torch_memory_saver import _core
from torch_memory_saver._engine import engine
from torch_memory_saver._engine.calls import hook_calls
from torch_memory_saver._engine.calls.hook_calls import PendingHooks
from torch_memory_saver._engine.process import pending_resumes
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
        return hooks.saver.resume(hooks.tag("a"), wait=False)

    return begin


def test_after_callbacks_are_called_by_wait_and_once(hooks: Recorder, pending: Any, pool: ThreadPoolExecutor) -> None:
    begun = pending()
    wait_until(lambda: begun.done)
    assert hooks.take_events() == ["one before", "two before"]
    threads: list[int] = []
    hooks.does["one", "after"] = lambda: threads.append(threading.get_ident())
    report = pool.submit(lambda: (begun.wait(), threads.append(threading.get_ident()))[0]).result(TIMEOUT_S)
    assert threads[0] == threads[1] != threading.get_ident()
    assert begun.wait() == report == hooks.received["one", "after"].report
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
    assert hooks.received["one", "cancelled"] is caught.value
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


def test_a_signal_just_after_a_resume_has_begun(hooks: Recorder, pending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resume goes on, so it is not cancelled. The next call of its tags has the callbacks called."""
    with monkeypatch.context() as patched:
        patched.setattr(engine, "warn_of_unknown_tags", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            pending()
    assert hooks.take_events() == ["one before", "two before"]
    hooks.saver.pause()
    assert hooks.take_events() == ["two after", "one after"]
    assert hooks.received["one", "after"].error is None


def test_a_signal_while_the_callbacks_begin_leaves_no_thread_waiting() -> None:
    callbacks: list[PendingHooks] = []

    def call() -> None:
        callbacks.append(PendingHooks(cast("Any", SimpleNamespace(call_following=_nothing, raise_failure=_nothing))))
        callbacks[-1]._call_once(None, None)

    for place in every_interruption(call):
        for each in callbacks:
            assert each.uncalled or each.finished, place
    assert not callbacks[-1].uncalled and callbacks[-1].finished


def _nothing(*arguments: Any) -> None:
    pass


def _interrupt(*arguments: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_the_next_call_of_its_tags_calls_what_no_wait_has_called(hooks: Recorder, pending: Any, call: str) -> None:
    pending()
    gc.collect()
    _core.resume((hooks.tag("a"),), None)  # waits for its turn
    wait_until(lambda: pending_resumes._resumes[0].done)
    hooks.allocate("b")
    getattr(hooks.saver, call)(hooks.tag("b"))
    assert hooks.take_events() == ["one before", "two before"]
    getattr(hooks.saver, call)(hooks.tag("a"))
    assert hooks.take_events() == ["two after", "one after"]
    assert pending_resumes._resumes == []


@contextlib.contextmanager
def held_turn(hooks: Recorder, pool: ThreadPoolExecutor) -> Iterator[None]:
    """Inside, a pause of tag "b" on another thread has the native core's turn."""
    hooks.allocate("b", backup=_core.BACKUP_PINNED)
    gate = Gate()
    pausing = pool.submit(_core.pause, (hooks.tag("b"),), None, False, None, gate)
    assert gate.reached.wait(TIMEOUT_S)
    try:
        yield
    finally:
        gate.opened.set()
        pausing.result(TIMEOUT_S)


def test_a_pause_waits_for_a_pending_resume_of_its_tags(hooks: Recorder, pool: ThreadPoolExecutor) -> None:
    hooks.allocate("a")
    hooks.saver.pause()
    hooks.on_resume("one", hooks.tag("a"))
    with held_turn(hooks, pool):
        begun = hooks.saver.resume(hooks.tag("a"), wait=False)
        with pytest.raises(
            InvalidStateError, match=r"pause: a resume\(wait=False\) of 'hooks\d+/a' has not ended"
        ) as caught:
            pending_resumes.settle("pause", (hooks.tag("a"), "c"), 0.0)
        assert caught.value.operation == "pause"
        pending_resumes.settle("pause", (hooks.tag("b"),), 0.0)
        pausing = pool.submit(hooks.saver.pause, hooks.tag("a"))
        assert not begun.done and not pausing.done()
    assert pausing.result(TIMEOUT_S).allocations == 1
    assert begun.wait().allocations == 1
    assert hooks.take_events() == ["one before", "one after"]


def test_a_pending_resume_leaves_later_pauses_alone(hooks: Recorder, pool: ThreadPoolExecutor) -> None:
    """The native pause does not wait for it: what the resume selects is decided when it begins."""
    hooks.allocate("a")
    with held_turn(hooks, pool):
        pausing = pool.submit(_core.pause, (hooks.tag("a"),), None)
        begun = _core.resume_begin((hooks.tag("a"),), None)
    assert pausing.result(TIMEOUT_S).allocations == 1
    assert _core.pending_wait(begun).allocations == 0
    assert [row.state for row in _core.segments() if row.tag == hooks.tag("a")] == [_core.STATE_PAUSED]


def test_a_callback_of_a_pause_s_pending_resume_raises(hooks: Recorder, pending: Any) -> None:
    """The pause goes on: the exception is that of another call."""
    begun = pending()
    hooks.raises["two", "after"] = KeyError("no")
    assert hooks.saver.pause().allocations == 1
    assert hooks.take_events() == ["one before", "two before", "two after", "one after"]
    assert begun.wait().allocations == 1


def test_a_pause_inside_a_callback_of_the_pending_resume(hooks: Recorder, pending: Any) -> None:
    begun = pending()
    hooks.does["one", "after"] = hooks.saver.pause
    with pytest.raises(InvalidStateError, match="pause: this thread is inside"):
        begun.wait()
    assert hooks.states() == ACTIVE


def test_a_wait_between_two_callbacks_of_its_own_thread(
    hooks: Recorder, pending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a finalizer makes it. It would wait for the callbacks that its thread has begun."""
    begun = pending()
    hooks.raises["two", "after"] = KeyError("no")
    refused: list[bool] = []

    def wait(*_: object, **__: object) -> None:
        with pytest.raises(InvalidStateError, match="wait: this thread is inside"):
            begun.wait()
        refused.append(True)

    monkeypatch.setattr(hook_calls.logger, "error", wait)
    with pytest.raises(KeyError):
        begun.wait()
    assert refused == [True]


def test_a_pause_waits_for_callbacks_that_another_thread_calls(hooks: Recorder, pending: Any) -> None:
    """Otherwise a callback would deregister memory that the other thread has not finished to register."""
    begun = pending()
    waiting = begun._hooks._finish._waiting

    def let_another_thread_pause() -> None:
        pause.start()
        wait_until(lambda: bool(waiting) or hooks.events[-1] == ("p", "before"))
        hooks.events.append(("callback", "ends"))

    hooks.on_pause("p")
    hooks.does["one", "after"] = let_another_thread_pause  # the last of the callbacks
    pause = threading.Thread(target=hooks.saver.pause)
    begun.wait()
    pause.join(TIMEOUT_S)
    assert hooks.take_events()[-4:] == ["one after", "callback ends", "p before", "p after"]
    assert hooks.states() == {_core.STATE_PAUSED}
    assert waiting == []


def test_no_pending_resume_is_overlooked_while_another_is_removed(hooks: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        hooks.allocate(name)
    hooks.saver.pause()
    begun = [hooks.saver.resume(hooks.tag(name), wait=False) for name in ("a", "b")]
    first, resumes = begun[0], pending_resumes._resumes
    concerns = type(first)._concerns

    def removed_meanwhile(resume: Any, tags: Any) -> bool:
        if resume is first and first in resumes:
            resumes.remove(first)  # another thread has seen that it has ended
        return concerns(resume, tags)

    monkeypatch.setattr(type(first), "_concerns", removed_meanwhile)
    assert pending_resumes._of(None) == begun


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
