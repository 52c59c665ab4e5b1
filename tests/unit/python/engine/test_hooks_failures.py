"""Guards hooks where something fails: at each callback, at each driver call of the operation, before it and after its commit
point. Each before-callback that has returned is followed by exactly one other, which fits the state of the memory."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_torch import FakeTorch
from recorded_hooks import SIZE, Recorder
from threads import InsideRegion

from torch_memory_saver import HookCall, TorchMemorySaver, _core
from torch_memory_saver._engine import engine
from torch_memory_saver._torch.sharing.sent_memory import SharedMemory
from torch_memory_saver.errors import (
    CaptureInProgressError,
    DriverError,
    InvalidStateError,
    OutOfMemoryError,
    TorchMemorySaverError,
)

ERROR_UNKNOWN = 999
ERROR_OUT_OF_MEMORY = 2
ACTIVE, PAUSED, DAMAGED = {_core.STATE_ACTIVE}, {_core.STATE_PAUSED}, {_core.STATE_DAMAGED}
NAMES = ("one", "two", "three")


@pytest.fixture(params=["pause", "resume", "pending"])
def operation(request: pytest.FixtureRequest, hooks: Recorder) -> Callable[[], Any]:
    """A call with three hooks, on an allocation with contents that it concerns."""
    hooks.allocate("a", backup=_core.BACKUP_PINNED)
    if request.param == "pause":
        call: Any = hooks.saver.pause
    else:
        hooks.saver.pause()
        call = hooks.saver.resume if request.param == "resume" else lambda: hooks.saver.resume(wait=False).wait()
    for name in NAMES:
        (hooks.on_pause if request.param == "pause" else hooks.on_resume)(name)
    return lambda: call()


def notes(error: BaseException) -> list[str]:
    if sys.version_info < (3, 11):
        pytest.skip("needs notes of exceptions: Python 3.11")
    return getattr(error, "__notes__", [])


# -- callbacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", NAMES)
def test_a_before_callback_raises(hooks: Recorder, operation: Callable[[], Any], failing: str, kind: Any) -> None:
    before = hooks.states()
    raised = hooks.raises[failing, "before"] = kind("no")
    with pytest.raises(kind) as caught:
        operation()
    assert caught.value is raised
    assert hooks.states() == before
    ran = NAMES[: NAMES.index(failing)]
    expected = [f"{name} before" for name in (*ran, failing)] + [f"{name} cancelled" for name in reversed(ran)]
    assert hooks.take_events() == expected
    assert all(hooks.received[name, "cancelled"] is raised for name in ran)
    hooks.raises.clear()
    operation()
    assert hooks.states() != before


@pytest.mark.parametrize("failing", NAMES)
def test_an_after_callback_raises(
    hooks: Recorder, operation: Callable[[], Any], failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = hooks.states()
    raised = hooks.raises[failing, "after"] = KeyError("no")
    with pytest.raises(KeyError) as caught:
        operation()
    assert caught.value is raised
    assert hooks.states() != before, "the operation is complete"
    assert hooks.take_events()[3:] == ["three after", "two after", "one after"]
    (record,) = [record for record in caplog.records if "after-callback" in record.getMessage()]
    assert "raised; the memory is" in record.getMessage() and "Recorded" in record.getMessage()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_note_names_the_callback_and_the_tags(saver: TorchMemorySaver, fake_torch: FakeTorch, when: Any) -> None:
    def fails(call: HookCall) -> None:
        raise KeyError("no")

    with saver.region("kv_cache"):
        fake_torch.allocate(1)
    handle = saver.on_pause(None, when, fails)
    with pytest.raises(KeyError) as caught:
        saver.pause()
    handle.remove()
    (note,) = notes(caught.value)
    assert note.startswith(f"torch_memory_saver: the {when}-callback ") and note.endswith("in a pause of kv_cache")
    assert fails.__qualname__ in note


def test_several_after_callbacks_raise(
    hooks: Recorder, operation: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = hooks.raises["three", "after"] = KeyError("first")
    hooks.raises["one", "after"] = ValueError("second")
    with pytest.raises(KeyError) as caught:
        operation()
    assert caught.value is first
    assert hooks.take_events()[3:] == ["three after", "two after", "one after"]
    assert sum("after-callback" in record.getMessage() for record in caplog.records) == 2
    assert any("ValueError: second" in note for note in notes(first))


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_raised_in_place_of_an_ordinary_exception(
    hooks: Recorder, operation: Callable[[], Any], ending: Any
) -> None:
    hooks.raises["three", "after"] = KeyError("first")
    hooks.raises["two", "after"] = ending()
    hooks.raises["one", "after"] = KeyError("last")
    with pytest.raises(ending):
        operation()
    assert hooks.take_events()[3:] == ["three after", "two after", "one after"]


def test_a_cancelled_callback_raises(
    hooks: Recorder, operation: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    raised = hooks.raises["three", "before"] = KeyError("no")
    hooks.raises["two", "cancelled"] = ValueError("worse")
    with pytest.raises(KeyError) as caught:
        operation()
    assert caught.value is raised
    assert hooks.take_events()[3:] == ["two cancelled", "one cancelled"]
    (record,) = [record for record in caplog.records if "cancelled-callback" in record.getMessage()]
    assert record.exc_info is not None and record.exc_info[0] is ValueError
    assert any("ValueError: worse" in note for note in notes(raised))


def test_a_cancelled_callback_is_interrupted(hooks: Recorder, operation: Callable[[], Any]) -> None:
    raised = hooks.raises["three", "before"] = KeyError("no")
    hooks.raises["two", "cancelled"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        operation()
    assert caught.value.__cause__ is raised
    assert hooks.take_events()[3:] == ["two cancelled", "one cancelled"]


def test_the_single_form_has_its_own_cancelled(hooks: Recorder) -> None:
    hooks.allocate("a")
    received: list[BaseException] = []
    hooks.keep(hooks.saver.on_pause(None, "before", lambda call: None, cancelled=received.append))
    hooks.on_pause("two")
    raised = hooks.raises["two", "before"] = KeyError("no")
    with pytest.raises(KeyError):
        hooks.saver.pause()
    assert received == [raised]


# -- the operation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing_calls(simulator: Any) -> Callable[[Callable[[], Any]], Iterator[TorchMemorySaverError | None]]:
    """Repeats an operation, letting its driver calls fail one after the other, until it succeeds. Yields its errors."""

    def repeat(operation: Callable[[], Any]) -> Iterator[TorchMemorySaverError | None]:
        for succeed in itertools.count():
            fired = simulator.failures_fired()
            simulator.fail_after("*", succeed, 1, ERROR_UNKNOWN)
            error = None
            try:
                operation()
            except TorchMemorySaverError as raised:
                error = raised
            injected = simulator.failures_fired() > fired
            simulator.stop_failing()
            yield error
            if not injected:
                return

    return repeat


def check_pairs(hooks: Recorder, error: BaseException | None, changed: bool) -> None:
    """Each hook that was called was called twice, with what fits the state of its memory."""
    events = hooks.take_events()
    last = "after" if changed else "cancelled"
    assert events == [f"{name} before" for name in NAMES] + [f"{name} {last}" for name in reversed(NAMES)]
    if changed:
        received = hooks.received["one", "after"]
        assert received.error is error
        assert (received.report is None) == (error is not None)


@pytest.mark.parametrize("backup", [_core.BACKUP_NONE, _core.BACKUP_PINNED])
def test_every_driver_call_of_a_pause_fails(hooks: Recorder, failing_calls: Any, backup: int) -> None:
    for name in NAMES:
        hooks.on_pause(name)
    hooks.allocate("a", "a", backup=backup)
    kinds = set()
    for error in failing_calls(hooks.saver.pause):
        changed = not hooks.states() <= ACTIVE
        kinds.add((error is not None, changed))
        check_pairs(hooks, error, changed)
        hooks.saver.resume()
        assert hooks.states() == ACTIVE
    assert {(True, False), (False, True)} <= kinds


@pytest.mark.parametrize("background", [False, True])
def test_every_driver_call_of_a_resume_fails(hooks: Recorder, failing_calls: Any, background: bool) -> None:
    for name in NAMES:
        hooks.on_resume(name)
    hooks.allocate("a", "a", backup=_core.BACKUP_PINNED)
    hooks.saver.pause()

    def resume() -> Any:
        return hooks.saver.resume(wait=False).wait() if background else hooks.saver.resume()

    kinds = set()
    for error in failing_calls(resume):
        changed = bool(hooks.states() & ACTIVE)
        kinds.add((error is not None, changed))
        check_pairs(hooks, error, changed)
        hooks.saver.pause()
        assert not hooks.states() & ACTIVE
    assert {(True, False), (False, True)} <= kinds
    hooks.saver.resume()


def test_memory_that_is_damaged_has_been_paused(hooks: Recorder, simulator: Any) -> None:
    """Its after-callback runs, with the error, since a resume will follow, and the callbacks of that."""
    hooks.on_pause("p")
    hooks.on_resume("r")
    hooks.allocate("a")
    simulator.fail_after("cuMemUnmap", 0, 1 << 30, ERROR_UNKNOWN)
    with pytest.raises(DriverError) as caught:
        hooks.saver.pause()
    assert hooks.states() == DAMAGED
    assert hooks.take_events() == ["p before", "p after"]
    assert hooks.received["p", "after"].error is caught.value
    with pytest.raises(DriverError):
        hooks.saver.resume()
    assert hooks.take_events() == ["r before", "r cancelled"]
    simulator.stop_failing()
    hooks.saver.resume()
    assert hooks.take_events() == ["r before", "r after"]


def test_a_resume_that_leaves_a_part_damaged(hooks: Recorder, simulator: Any) -> None:
    """The hook of what was resumed has its after, that of the damaged memory is cancelled."""
    hooks.allocate("whole", "damaged")
    hooks.saver.pause(hooks.tag("whole"))
    simulator.fail_after("cuMemUnmap", 0, 1 << 30, ERROR_UNKNOWN)
    with pytest.raises(DriverError):
        hooks.saver.pause(hooks.tag("damaged"))
    hooks.on_resume("whole", hooks.tag("whole"))
    hooks.on_resume("damaged", hooks.tag("damaged"))
    with pytest.raises(DriverError) as caught:
        hooks.saver.resume()
    assert hooks.take_events() == ["whole before", "damaged before", "damaged cancelled", "whole after"]
    assert hooks.received["whole", "after"].error is hooks.received["damaged", "cancelled"] is caught.value


def test_out_of_memory_cancels_and_the_call_can_be_repeated(hooks: Recorder, simulator: Any) -> None:
    hooks.allocate("a")
    hooks.saver.pause()
    hooks.on_resume("r")
    simulator.take_memory(simulator.device_memory - SIZE // 2)
    with pytest.raises(OutOfMemoryError):
        hooks.saver.resume()
    assert hooks.take_events() == ["r before", "r cancelled"]
    with pytest.raises(OutOfMemoryError):
        hooks.saver.resume(timeout=0.02)
    assert hooks.take_events() == ["r before", "r cancelled"], "once for all attempts"
    simulator.take_memory(-(simulator.device_memory - SIZE // 2))
    hooks.saver.resume(timeout=60)
    assert hooks.take_events() == ["r before", "r after"]


def test_a_timeout_with_several_attempts_calls_once(hooks: Recorder, simulator: Any) -> None:
    hooks.allocate("a")
    hooks.saver.pause()
    hooks.on_resume("r")
    # The driver's first answers are out of memory, although it has enough: attempts that are undone.
    simulator.fail_after("cuMemCreate", 0, 3, ERROR_OUT_OF_MEMORY)
    fired = simulator.failures_fired()
    hooks.saver.resume(timeout=60)
    assert simulator.failures_fired() - fired == 3
    assert hooks.take_events() == ["r before", "r after"]


def test_progress_that_raises_when_the_pause_is_complete(hooks: Recorder) -> None:
    """Its after-callback is called, with the exception."""
    hooks.allocate("a", backup=_core.BACKUP_PINNED)
    hooks.on_pause("p")
    raised = KeyError("no")

    def progress(done: int, total: int) -> None:
        if done == total:
            raise raised

    def pause() -> None:
        with pytest.raises(KeyError):
            hooks.saver.pause(progress=progress)

    pause()
    for _ in range(100):
        if hooks.states() == PAUSED:
            break
        # A busy machine has reported the end of the copy before the pause was complete.
        assert hooks.take_events() == ["p before", "p cancelled"]
        pause()
    assert hooks.states() == PAUSED
    assert hooks.take_events() == ["p before", "p after"]
    assert hooks.received["p", "after"].error is raised


def test_an_interrupt_after_the_change_is_told_to_the_after_callback(
    hooks: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks.allocate("a")
    hooks.on_pause("p")
    late = KeyboardInterrupt()

    def report(*arguments: Any) -> Any:
        raise late

    monkeypatch.setattr(engine, "pause_report", report)
    with pytest.raises(KeyboardInterrupt) as caught:
        hooks.saver.pause()
    assert caught.value is late
    assert hooks.states() == PAUSED
    assert hooks.take_events() == ["p before", "p after"]
    assert hooks.received["p", "after"].error is late


# -- preconditions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pause", "resume", "begin"])
def test_a_visible_capture_calls_no_hook(hooks: Recorder, call: str) -> None:
    hooks.allocate("a")
    hooks.on_pause("p")
    hooks.on_resume("r")
    if call != "pause":
        hooks.saver.pause()
        hooks.take_events()
    functions = {"pause": hooks.saver.pause, "resume": hooks.saver.resume, "begin": lambda: hooks.saver.resume(wait=False)}
    before = hooks.states()
    failures = _core.counters()["failures_total"]
    identity = _core.capture_begin("captured", _core.BACKUP_NONE)
    try:
        with pytest.raises(CaptureInProgressError, match="capture is under way") as caught:
            functions[call]()
    finally:
        _core.capture_end(identity)
    assert caught.value.operation == ("pause" if call == "pause" else "resume")
    assert hooks.take_events() == []
    assert hooks.states() == before
    assert _core.counters()["failures_total"] == failures + 1


def test_a_capture_that_has_ended_unseen_does_not_prevent_hooks(
    hooks: Recorder, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch says that there is one, and the core says that there is none."""
    hooks.allocate("a")
    hooks.on_pause("p")
    monkeypatch.setattr(fake_torch, "is_capturing", lambda: True)
    hooks.saver.pause()
    assert hooks.take_events() == ["p before", "p after"]


def test_a_region_of_another_thread_calls_no_hook(hooks: Recorder, fake_torch: FakeTorch) -> None:
    hooks.on_pause("p")
    with InsideRegion(hooks.saver, hooks.tag("a"), fake_torch):
        with pytest.raises(InvalidStateError, match="is still inside region"):
            hooks.saver.pause(hooks.tag("a"), timeout=None)
        assert hooks.take_events() == []


def test_a_capture_that_a_callback_begins_cancels(hooks: Recorder) -> None:
    hooks.allocate("a")
    hooks.on_pause("p")
    begun: list[int] = []
    hooks.does["p", "before"] = lambda: begun.append(_core.capture_begin("captured", _core.BACKUP_NONE))
    hooks.does["p", "cancelled"] = lambda: _core.capture_end(begun[0])
    with pytest.raises(CaptureInProgressError):
        hooks.saver.pause()
    assert hooks.take_events() == ["p before", "p cancelled"]
    assert hooks.states() == ACTIVE


def test_what_others_may_use_cancels(hooks: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check comes after the before-callbacks: one of them may have the others drop their tensors."""
    hooks.allocate("a")
    hooks.on_pause("p")
    left = [SIZE]
    monkeypatch.setattr(SharedMemory, "_shared_bytes", lambda self, tags: left[0])
    with pytest.raises(InvalidStateError, match="other processes may still use"):
        hooks.saver.pause(if_shared="refuse")
    assert hooks.take_events() == ["p before", "p cancelled"]
    hooks.does["p", "before"] = lambda: left.__setitem__(0, 0)
    hooks.saver.pause(if_shared="refuse")
    assert hooks.take_events() == ["p before", "p after"]
