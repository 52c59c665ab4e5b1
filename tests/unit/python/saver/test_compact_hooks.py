"""Guards the hooks around compact(): those of pauses and of resumes are called, whose tags have slack, while the memory is
resident; and what follows from a failure fits the state of the memory."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from recorded_hooks import SIZE, TIMEOUT_S, Gate, Recorder

from torch_memory_saver import _core
from torch_memory_saver.errors import CaptureInProgressError, OutOfMemoryError, TorchMemorySaverError
from torch_memory_saver.pause_hooks import HookCall

ERROR_OUT_OF_MEMORY = 2
ERROR_UNKNOWN = 999
ACTIVE, PAUSED = {_core.STATE_ACTIVE}, {_core.STATE_PAUSED}
NAMES = ("one", "two")
BEFORE = ["one p before", "two p before", "one r before", "two r before"]
AFTER = ["two p after", "one p after", "two r after", "one r after"]
CANCELLED = ["two p cancelled", "one p cancelled", "two r cancelled", "one r cancelled"]


@pytest.fixture
def both(hooks: Recorder) -> Recorder:
    """Two hooks of pauses and two of resumes, and slack of the tag "w"."""
    for name in NAMES:
        hooks.on_pause(f"{name} p")
        hooks.on_resume(f"{name} r")
    hooks.make_slack("w", backup=_core.BACKUP_PINNED)
    return hooks


def test_the_order_and_what_they_are_told(both: Recorder) -> None:
    tag = both.tag("w")
    report = both.saver.compact(tag)
    assert report.bytes == SIZE
    assert both.take_events() == BEFORE + AFTER
    # Seven allocations are left; which of them share a handle with the slack is not told.
    assert both.told["one p", "before"] == both.told["one r", "before"] == HookCall("compact", (tag,), (0,), 7, 7 * SIZE)
    for name in ("one p", "one r"):
        told = both.told[name, "after"]
        assert (told.operation, told.report, told.error) == ("compact", report, None)


def test_the_memory_is_resident_for_all_of_them(both: Recorder) -> None:
    seen = []
    for name, callback in (event.rsplit(" ", 1) for event in BEFORE + AFTER):
        both.does[name, callback] = lambda: seen.append(both.states())
    both.saver.compact()
    assert seen == [ACTIVE] * 8


def test_no_hook_without_slack_of_its_tags(both: Recorder) -> None:
    both.allocate("other")
    both.on_pause("other", both.tag("other"))
    both.on_resume("of w", both.tag("w"))
    both.saver.compact(both.tag("other"))
    assert both.take_events() == []
    both.make_slack("elsewhere", device=1)
    both.saver.compact(both.tag("w"))
    events = both.take_events()
    assert "of w after" in events and not any(event.startswith("other") for event in events)
    assert both.told["one p", "before"].devices == (0,)
    both.saver.compact(both.tag("w"))
    assert both.take_events() == []


def test_slack_of_one_device_does_not_concern_another(hooks: Recorder) -> None:
    hooks.make_slack("w", device=1)
    hooks.allocate("w", device=0)
    hooks.on_pause("p")
    hooks.saver.compact()
    assert (hooks.told["p", "before"].devices, hooks.told["p", "before"].allocations) == ((1,), 7)


def test_a_capture_calls_no_hook(both: Recorder) -> None:
    identity = _core.capture_begin(None, _core.BACKUP_NONE)
    with pytest.raises(CaptureInProgressError):
        both.saver.compact()
    _core.capture_end(identity)
    assert both.take_events() == []


@pytest.mark.parametrize("failing", range(len(BEFORE)))
def test_a_before_callback_raises(both: Recorder, failing: int) -> None:
    raised = both.raises[BEFORE[failing].removesuffix(" before"), "before"] = KeyError("no")
    with pytest.raises(KeyError) as caught:
        both.saver.compact()
    assert caught.value is raised
    called = [f"{event.removesuffix(' before')} cancelled" for event in BEFORE[:failing]]
    assert both.take_events() == BEFORE[: failing + 1] + [event for event in CANCELLED if event in called]
    assert both.saver.stats().slack_bytes == SIZE


@pytest.mark.parametrize("failing", range(len(AFTER)))
def test_an_after_callback_raises(both: Recorder, failing: int, caplog: pytest.LogCaptureFixture) -> None:
    raised = both.raises[AFTER[failing].removesuffix(" after"), "after"] = KeyError("no")
    with pytest.raises(KeyError) as caught:
        both.saver.compact()
    assert caught.value is raised
    assert both.take_events() == BEFORE + AFTER
    assert both.states() == ACTIVE and both.saver.stats().slack_bytes == 0
    assert "the memory is resident, and the others are called" in caplog.text


def test_the_second_half_fails(both: Recorder, simulator: Any) -> None:
    """The pause has taken place. The resume has not: it follows, with its hooks."""
    simulator.fail_after("cuMemCreate", 0, 1 << 30, ERROR_OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError) as caught:
        both.saver.compact()
    simulator.stop_failing()
    assert both.states() == ACTIVE | PAUSED
    assert both.take_events() == [*BEFORE, *AFTER[:2], *CANCELLED[2:]]
    assert both.told["one p", "after"].error is both.told["one r", "cancelled"] is caught.value
    both.saver.resume()
    assert both.take_events() == ["one r before", "two r before", *AFTER[2:]]


def test_every_driver_call_fails(both: Recorder, simulator: Any) -> None:
    """Each before-callback is followed by one other. What is not resident has been paused for its hooks."""
    kinds = set()
    for succeed in itertools.count():
        fired = simulator.failures_fired()
        simulator.fail_after("*", succeed, 1, ERROR_UNKNOWN)
        error: BaseException | None = None
        try:
            both.saver.compact()
        except TorchMemorySaverError as raised:
            error = raised
        injected = simulator.failures_fired() > fired
        simulator.stop_failing()
        paused = not both.states() <= ACTIVE
        kinds.add((error is not None, paused))
        events = both.take_events()
        if error is None:
            assert events == BEFORE + AFTER
        else:
            assert events == BEFORE + (AFTER[:2] + CANCELLED[2:] if paused else CANCELLED)
        both.saver.resume()
        assert both.states() == ACTIVE
        both.take_events()
        if not injected:
            break
        if both.saver.stats().slack_bytes == 0:
            both.free_all()
            both.make_slack(f"again {succeed}", backup=_core.BACKUP_PINNED)
            assert both.saver.stats().slack_bytes == SIZE
            both.take_events()
    assert kinds >= {(True, False), (True, True), (False, False)}


def test_calls_of_other_threads_wait_for_the_callbacks(both: Recorder) -> None:
    gate = Gate()
    both.does["one p", "before"] = gate
    compacts = threading.Thread(target=both.saver.compact)
    compacts.start()
    assert gate.reached.wait(TIMEOUT_S)
    pauses = threading.Thread(target=both.saver.pause)
    pauses.start()
    gate.opened.set()
    for thread in (compacts, pauses):
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert both.take_events() == [*BEFORE, *AFTER, "one p before", "two p before", *AFTER[:2]]
    assert both.states() == PAUSED
