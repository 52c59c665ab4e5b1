"""Guards that a signal handler that raises anywhere in a call with hooks leaves no turn taken, no callback uncalled, and no
begun resume out of the list of pending ones; and that a finalizer may register and remove hooks anywhere."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from interruptions import Interruption, every_interruption, finalize_at_every_place
from other_threads import in_thread
from processes import wait_until
from recorded_hooks import Recorder

from torch_memory_saver import _core
from torch_memory_saver._engine import engine
from torch_memory_saver._engine.calls import call_turns, hook_calls
from torch_memory_saver._engine.calls import hooks as registry
from torch_memory_saver._engine.calls.hook_calls import begin_with_hooks, with_hooks
from torch_memory_saver._engine.process import pending_resumes
from torch_memory_saver.options import PauseOptions, ResumeOptions

Call = Callable[[], object]


def _accept(options: object) -> None:
    """Refuse nothing."""


@pytest.fixture(autouse=True)
def _nothing_pending() -> None:
    """Forget resumes of earlier tests."""
    pending_resumes.settle("pause", None, math.inf)


def _two_hooks(hooks: Recorder) -> None:
    hooks.allocate("a")
    for name in ("one", "two"):
        hooks.on_pause(name)
        hooks.on_resume(name)


def _check_followed(events: list[str], changed: bool, place: int) -> None:
    """Check that after or cancelled has followed each before, in reverse order."""
    begun = [event.split()[0] for event in events if event.endswith(" before")]
    follows = "after" if changed else "cancelled"
    assert events == [f"{name} before" for name in begun] + [f"{name} {follows}" for name in reversed(begun)], place
    assert begun == ["one", "two"] or not changed, place


@pytest.fixture
def calls(hooks: Recorder) -> dict[str, Call]:
    """A pause and a resume of the tag, without what the engine does beside the core."""
    core: Any = _core
    tags = (hooks.tag("a"),)
    waiting = ResumeOptions.check(tags)._replace(deadline=0.0)  # a test that finds a turn taken fails, and does not wait
    return {
        "pause": lambda: with_hooks(
            "pause", PauseOptions.check(tags, timeout=0.0), _accept, lambda options: core.pause(options.tags, None)
        ),
        "resume": lambda: with_hooks("resume", waiting, _accept, lambda options: core.resume(options.tags, None)),
    }


@pytest.mark.parametrize(("operation", "opposite"), [("pause", "resume"), ("resume", "pause")])
def test_an_interrupted_call_gives_its_turn_back_and_calls_what_follows(
    hooks: Recorder, calls: dict[str, Call], operation: str, opposite: str
) -> None:
    _two_hooks(hooks)
    target = {_core.STATE_PAUSED if operation == "pause" else _core.STATE_ACTIVE}
    if operation == "resume":
        hooks.saver.pause()
    hooks.take_events()
    outcomes = []
    for place in every_interruption(calls[operation]):
        outcomes.append(hooks.states() == target)
        _check_followed(hooks.take_events(), outcomes[-1], place)
        assert call_turns._running == [], place
        in_thread(calls[operation])
        calls[opposite]()
        hooks.take_events()
    assert outcomes.count(True) > 20 and outcomes.count(False) > 20


@pytest.mark.parametrize("operation", ["pause", "resume"])
def test_an_interrupted_call_that_fails_cancels_its_hooks(
    hooks: Recorder, calls: dict[str, Call], monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    _two_hooks(hooks)
    if operation == "resume":
        hooks.saver.pause()
    hooks.take_events()
    failures: list[BaseException] = []

    def fail(*arguments: Any) -> Any:
        raise KeyError("no")

    def use() -> None:
        try:
            calls[operation]()
        except KeyError as error:
            failures.append(error)

    with monkeypatch.context() as patched:
        patched.setattr(_core, operation, fail)
        for place in every_interruption(use):
            _check_followed(hooks.take_events(), False, place)
            assert call_turns._running == [], place
    assert len(failures) == 1
    assert hooks.take_events() == ["one before", "two before", "two cancelled", "one cancelled"]


def _begin(tags: tuple[str, ...]) -> Any:
    def begin(options: ResumeOptions, begun: list[_core.Pending]) -> None:
        _core.record_each(begun, _core.resume_begin, [(options.tags, None)])

    return begin_with_hooks("resume", ResumeOptions.check(tags, wait=False), _accept, begin, pending_resumes.add)


@pytest.mark.parametrize("with_callbacks", [True, False])
def test_a_resume_that_has_begun_is_pending_after_an_interruption(hooks: Recorder, with_callbacks: bool) -> None:
    if with_callbacks:
        _two_hooks(hooks)
    else:
        hooks.allocate("a")
    tags = (hooks.tag("a"),)
    _core.pause(tags, None)
    outcomes = []
    for place in every_interruption(lambda: _begin(tags)):
        outcomes.append(bool(pending_resumes._resumes))
        assert call_turns._running == [], place
        in_thread(lambda: pending_resumes.settle("pause", tags, 0.0 if not outcomes[-1] else math.inf))
        assert hooks.states() == {_core.STATE_ACTIVE if outcomes[-1] else _core.STATE_PAUSED}, place
        if with_callbacks:
            _check_followed(hooks.take_events(), outcomes[-1], place)
            assert not outcomes[-1] or hooks.received["one", "after"].error is None
        assert pending_resumes._resumes == []
        _core.pause(tags, None)
    pending_resumes.settle("pause", tags, math.inf)
    assert outcomes.count(True) > 5 and outcomes.count(False) > 5


def test_a_signal_just_after_a_resume_without_hooks_has_begun(hooks: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later pause of the tags has to wait for its end."""

    def interrupt(*arguments: Any) -> Any:
        raise Interruption

    hooks.allocate("a")
    hooks.saver.pause()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "warn_of_unknown_tags", interrupt)
        with pytest.raises(Interruption):
            hooks.saver.resume(hooks.tag("a"), wait=False)
    assert len(pending_resumes._resumes) == 1
    assert hooks.saver.pause(hooks.tag("a")).allocations == 1


@pytest.mark.parametrize("end", ["wait", "see_ended"])
def test_an_interrupted_end_of_a_pending_resume_loses_no_callback(hooks: Recorder, end: str) -> None:
    _two_hooks(hooks)
    tags = (hooks.tag("a"),)

    def begin() -> Any:
        hooks.saver.pause(tags)
        begun = hooks.saver.resume(tags, wait=False)
        wait_until(lambda: begun.done)
        hooks.take_events()
        return begun

    def use() -> None:
        if end == "wait":
            pending[-1].wait()
        else:
            pending_resumes.see_ended(tags)

    pending = [begin()]
    for place in every_interruption(use):
        pending_resumes.see_ended(tags)
        assert hooks.take_events() == ["two after", "one after"], place
        assert pending_resumes._resumes == [], place
        pending.append(begin())
    pending_resumes.see_ended(tags)


def test_a_finalizer_may_register_and_remove_hooks(hooks: Recorder) -> None:
    before = {operation: tuple(registered) for operation, registered in registry._hooks.items()}
    held: list[Any] = []

    def finalize() -> None:
        hooks.saver.on_pause(None, "before", _accept).remove()
        while held:
            held.pop().remove()

    def use() -> None:
        handle = hooks.saver.on_pause(None, "after", _accept)
        held.append(handle)
        handle.remove()
        held.append(hooks.saver.on_pause(None, "after", _accept))

    in_thread(lambda: finalize_at_every_place(use, finalize))
    finalize()
    assert {operation: tuple(registered) for operation, registered in registry._hooks.items()} == before


@pytest.mark.parametrize("raising", ["before", "after", "operation", "cancelled"])
def test_an_exception_of_a_call_with_hooks_is_in_no_cycle(
    hooks: Recorder, monkeypatch: pytest.MonkeyPatch, raising: str
) -> None:
    """The frames of its traceback have the caller's tensors, which would live until the garbage collector runs."""

    class Tensor:
        pass

    def call() -> weakref.ref[Tensor]:
        tensor = Tensor()
        found = weakref.ref(tensor)
        with contextlib.suppress(KeyError, ZeroDivisionError, SystemExit):
            with_hooks("pause", PauseOptions.check(), _accept, perform)
        return found

    def perform(options: PauseOptions) -> Any:
        return _core.pause(options.tags, None) if raising in ("before", "after") else 1 // 0

    monkeypatch.setattr(hook_calls.logger, "disabled", True)  # pytest keeps what is logged
    _two_hooks(hooks)
    if raising != "operation":
        hooks.raises["two", raising] = KeyError("no") if raising != "cancelled" else SystemExit(1)
    gc.disable()
    try:
        found = call()
        hooks.raises.clear()
        hooks.received.clear()
        assert found() is None
    finally:
        gc.enable()
