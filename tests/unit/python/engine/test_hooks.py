"""Guards on_pause and on_resume: the order of callbacks, which of them a call concerns, what they receive, and how they are
registered and removed."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import pytest
from deferred import DEFERRED
from fake_torch import FakeTorch
from recorded_hooks import SIZE, Recorder

import torch_memory_saver as package
from torch_memory_saver import _core
from torch_memory_saver._engine import background
from torch_memory_saver._engine.calls import hook_calls
from torch_memory_saver._engine.calls import hooks as hooks_module
from torch_memory_saver._engine.calls.hooks import Hook, HookCall
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.saver import TorchMemorySaver


def test_before_in_order_after_in_reverse(hooks: Recorder) -> None:
    hooks.allocate("a")
    for name in ("one", "two"):
        hooks.on_pause(name)
        hooks.on_resume(f"{name}r")
    report = hooks.saver.pause(hooks.tag("a"))
    assert hooks.take_events() == ["one before", "two before", "two after", "one after"]
    assert hooks.received["one", "after"].report == report
    report = hooks.saver.resume(hooks.tag("a"))
    assert hooks.take_events() == ["oner before", "twor before", "twor after", "oner after"]
    assert hooks.received["oner", "after"].report == report


def test_single_callbacks_keep_their_places(hooks: Recorder) -> None:
    hooks.allocate("a")
    calls: list[str] = []
    hooks.keep(hooks.saver.on_pause(None, "after", lambda call: calls.append("first after")))
    hooks.keep(hooks.saver.on_pause(None, "before", lambda call: calls.append("second before")))
    hooks.keep(hooks.saver.on_pause(None, "before", lambda call: calls.append("third before")))
    hooks.keep(hooks.saver.on_pause(None, "after", lambda call: calls.append("fourth after")))
    hooks.saver.pause(hooks.tag("a"))
    assert calls == ["second before", "third before", "fourth after", "first after"]


def test_the_memory_is_there_before_and_gone_after(hooks: Recorder) -> None:
    hooks.allocate("a", "b")
    seen: dict[str, set[int]] = {}

    def look(when: str) -> Any:
        return lambda call: seen.update({f"{call.operation} {when}": hooks.states()})

    for register in (hooks.saver.on_pause, hooks.saver.on_resume):
        for when in ("before", "after"):
            hooks.keep(register(None, when, look(when)))
    hooks.saver.pause()
    hooks.saver.resume()
    active, paused = {_core.STATE_ACTIVE}, {_core.STATE_PAUSED}
    assert seen == {"pause before": active, "pause after": paused, "resume before": paused, "resume after": active}


def test_what_a_callback_receives(hooks: Recorder) -> None:
    hooks.allocate("w", "w", "kv", "other")
    hooks.allocate("w", device=1)
    hooks.on_pause("both", [hooks.tag("w"), hooks.tag("kv")])
    hooks.on_pause("kv", hooks.tag("kv"))
    hooks.saver.pause([hooks.tag("w"), hooks.tag("kv")])
    tags = (hooks.tag("kv"), hooks.tag("w"))
    assert hooks.received["both", "before"] == HookCall("pause", tags, (0, 1), 4, 4 * SIZE)
    assert hooks.received["kv", "before"] == HookCall("pause", (hooks.tag("kv"),), (0,), 1, SIZE)
    assert hooks.received["kv", "after"].report.allocations == 4


def test_only_hooks_whose_tags_the_call_selects(hooks: Recorder) -> None:
    hooks.allocate("a/w", "b/w")
    hooks.on_pause("every")
    hooks.on_pause("a", hooks.tag("a/*"))
    hooks.on_pause("b", hooks.tag("b/w"))
    hooks.on_pause("none", hooks.tag("c"))
    hooks.saver.pause(hooks.tag("a/w"))
    assert hooks.take_events() == ["every before", "a before", "a after", "every after"]
    assert hooks.received["every", "before"].tags == (hooks.tag("a/w"),)
    hooks.saver.pause(hooks.tag("*/w"))
    assert hooks.take_events() == ["every before", "b before", "b after", "every after"]
    assert hooks.received["every", "before"].tags == (hooks.tag("b/w"),)


def test_a_pattern_matches_tags_that_appear_later(hooks: Recorder) -> None:
    hooks.on_pause("pattern", hooks.tag("layer*"))
    hooks.allocate("layer7")
    hooks.saver.pause(hooks.tag("layer7"))
    assert hooks.take_events() == ["pattern before", "pattern after"]


def test_no_hook_is_called_where_nothing_changes(hooks: Recorder) -> None:
    hooks.allocate("a")
    hooks.on_pause("p")
    hooks.on_resume("r")
    hooks.saver.resume(hooks.tag("a"))
    hooks.saver.pause(hooks.tag("never"))
    assert hooks.take_events() == []
    hooks.saver.pause(hooks.tag("a"))
    assert hooks.take_events() == ["p before", "p after"]
    hooks.saver.pause()
    assert hooks.take_events() == []
    hooks.saver.resume()
    hooks.saver.resume()
    assert hooks.take_events() == ["r before", "r after"]


def test_without_hooks_nothing_more_is_done(hooks: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a call without hooks looked for them")

    hooks.allocate("a")
    handle = hooks.on_pause("gone")
    handle.remove()
    assert hooks_module._hooks == {"pause": [], "resume": []}
    for name in ("_rows_to_change", "CallTurn", "select_tags"):
        monkeypatch.setattr(hook_calls, name, refuse)
    hooks.saver.pause()
    hooks.saver.resume()
    hooks.saver.pause()
    hooks.saver.resume(wait=False).wait()
    hooks.on_pause("there")
    with pytest.raises(AssertionError, match="looked"):
        hooks.saver.pause()


def test_removed_and_added_hooks(hooks: Recorder) -> None:
    hooks.allocate("a")
    one, two = hooks.on_pause("one"), hooks.on_pause("two")
    two.remove()
    two.remove()
    hooks.saver.pause()
    assert hooks.take_events() == ["one before", "one after"]
    hooks.saver.resume()
    one.remove()
    hooks.saver.pause()
    assert hooks.take_events() == []


def test_hooks_that_are_removed_or_added_during_a_call(hooks: Recorder) -> None:
    """What has had its before has its after; what was removed first has neither; what is new waits for the next call."""
    hooks.allocate("a")
    one = hooks.on_pause("one")
    two = hooks.on_pause("two")

    def exchange() -> None:
        one.remove()
        two.remove()
        hooks.on_pause("three")

    hooks.does["one", "before"] = exchange
    hooks.saver.pause()
    assert hooks.take_events() == ["one before", "one after"]
    hooks.saver.resume()
    hooks.saver.pause()
    assert hooks.take_events() == ["three before", "three after"]


def test_the_same_function_can_be_registered_twice(hooks: Recorder) -> None:
    hooks.allocate("a")
    calls: list[HookCall] = []
    first = hooks.keep(hooks.saver.on_pause(None, "before", calls.append))
    hooks.keep(hooks.saver.on_pause(None, "before", calls.append))
    hooks.saver.pause()
    assert len(calls) == 2
    first.remove()
    hooks.saver.resume()
    hooks.saver.pause()
    assert len(calls) == 3


def test_decorators_return_the_function(hooks: Recorder) -> None:
    hooks.allocate("a")
    before = {operation: hooks_module.registered(operation) for operation in ("pause", "resume")}
    calls: list[str] = []

    @hooks.saver.on_pause(iter([hooks.tag("a")]), "after")
    @hooks.saver.on_resume()
    def note(call: HookCall) -> None:
        calls.append(call.operation)

    try:
        assert note.__name__ == "note"
        hooks.saver.pause()
        hooks.saver.resume()
        assert calls == ["pause", "resume"]
        assert hooks_module._hooks["resume"][-1].before is note
    finally:
        hooks_module._hooks.update(before)


def test_callbacks_may_allocate_and_free(hooks: Recorder, fake_torch: FakeTorch) -> None:
    (address,) = hooks.allocate("a")
    made: list[int] = []

    def allocate() -> None:
        with hooks.saver.region(hooks.tag("a")):
            made.append(fake_torch.allocate(SIZE))
        with hooks.saver.region(hooks.tag("other")):
            made.append(fake_torch.allocate(SIZE))
        _core.free(address)
        hooks.addresses.clear()

    hooks.on_pause("one")
    hooks.does["one", "before"] = allocate
    report = hooks.saver.pause(hooks.tag("a"))
    assert hooks.take_events() == ["one before", "one after"]
    assert report.allocations == 1, "what the callback allocated with the tag is paused, what it freed is not"
    assert _core.find(made[0]).state == _core.STATE_PAUSED
    assert _core.find(made[1]).state == _core.STATE_ACTIVE
    for each in made:
        fake_torch.free(each)


def test_what_a_callback_returns_is_dropped(hooks: Recorder) -> None:
    """It may be a tensor that the pause is to find freed."""

    class Held:
        pass

    hooks.allocate("a")
    held = [Held()]
    dropped = weakref.ref(held[0])
    hooks.keep(hooks.saver.on_pause(None, "before", lambda call: held.pop()))
    hooks.on_pause("second")
    hooks.does["second", "before"] = lambda: hooks.events.append(("dropped", str(dropped() is None)))
    hooks.saver.pause()
    assert hooks.take_events() == ["second before", "dropped True", "second after"]


@pytest.mark.parametrize("callback", ["before", "after", "cancelled"])
@pytest.mark.parametrize("call", ["pause", "resume", "resume in the background"])
def test_pause_and_resume_are_refused_inside(hooks: Recorder, callback: str, call: str) -> None:
    """Also of other tags, which have nothing to wait for."""
    hooks.allocate("a")
    hooks.on_pause("one", hooks.tag("a"))
    hooks.on_pause("two", hooks.tag("a"))
    refused: list[str] = []

    def inside() -> None:
        tag = hooks.tag("other")
        with pytest.raises(InvalidStateError, match="is inside pause") as caught:
            hooks.saver.pause(tag) if call == "pause" else hooks.saver.resume(tag, wait=call == "resume")
        refused.append(caught.value.operation)

    hooks.does["one", callback] = inside
    if callback == "cancelled":
        hooks.raises["two", "before"] = KeyError("no")
        with pytest.raises(KeyError):
            hooks.saver.pause(hooks.tag("a"))
    else:
        hooks.saver.pause(hooks.tag("a"))
    assert refused == [call.split()[0]]
    hooks.raises.clear()
    hooks.does.clear()
    hooks.saver.pause(hooks.tag("a"))
    assert hooks.states() == {_core.STATE_PAUSED}, "it is refused inside only"


def test_another_thread_may_pause_other_tags_meanwhile(hooks: Recorder) -> None:
    hooks.allocate("a", "b")
    hooks.on_pause("one", hooks.tag("a"))

    def pause_other() -> None:
        thread = threading.Thread(target=lambda: hooks.saver.pause(hooks.tag("b")))
        thread.start()
        thread.join()

    hooks.does["one", "before"] = pause_other
    hooks.saver.pause(hooks.tag("a"))
    assert hooks.states() == {_core.STATE_PAUSED}


def test_work_of_the_environment_follows_the_before_callbacks(hooks: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that TMS_RELEASE_CACHED gives back what a callback has freed."""
    hooks.allocate("a")
    work = background.RegisteredWork()
    work.add("recorded", lambda: hooks.events.append(("environment", "work")))
    monkeypatch.setattr("torch_memory_saver._engine.engine.before_pause", work)
    hooks.on_pause("one")
    hooks.saver.pause()
    assert hooks.take_events() == ["one before", "environment work", "one after"]


def test_a_resume_before_the_core_pauses_is_refused(hooks: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler or finalizer makes it. It would wait for the turn of its own thread."""
    hooks.allocate("a")
    hooks.on_pause("one")
    hooks.on_resume("other")
    refused: list[str] = []

    def resume() -> None:
        with pytest.raises(InvalidStateError) as caught:
            hooks.saver.resume(timeout=0)
        refused.append(str(caught.value))

    work = background.RegisteredWork()
    work.add("a finalizer", resume)
    monkeypatch.setattr("torch_memory_saver._engine.engine.before_pause", work)
    hooks.saver.pause()
    assert [text.startswith("resume: this thread is inside pause()") for text in refused] == [True]
    assert hooks.states() == {_core.STATE_PAUSED}


@pytest.mark.parametrize("options", [{"exclusive": True}, {"timeout": 1}, {"zero": True}, {"host_memory": "retain"}])
def test_options_of_a_resume_change_nothing(hooks: Recorder, options: dict[str, Any]) -> None:
    hooks.allocate("a", backup=_core.BACKUP_PINNED)
    hooks.saver.pause()
    hooks.on_resume("r")
    hooks.saver.resume(**options)
    assert hooks.take_events() == ["r before", "r after"]


def test_registering_is_not_a_use(saver: TorchMemorySaver) -> None:
    saver.on_pause(None, "before", lambda call: None).remove()
    assert saver._impl is None


def test_the_module_has_the_functions() -> None:
    assert package.on_pause == package.torch_memory_saver.on_pause
    assert package.on_resume == package.torch_memory_saver.on_resume


async def _coroutine(call: HookCall) -> None:
    pass


class _Asynchronous(Hook):
    async def after(self, call: HookCall) -> None:  # type: ignore[override]
        pass


class _Misspelt(Hook):
    def befor(self, call: HookCall) -> None:
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, "before", print), "tag must be"),
        ((print, "before"), r"tag must be .*\. Write a decorator with parentheses: .* @on_pause\(\)\."),
        (("", "during", print), "when must be"),
        ((None, print), "when must be"),
        ((None, Hook), "when must be"),
        ((None, "before", 3), "callback must be a callable, not int"),
        ((None, "after", _coroutine), "coroutine"),
        ((None, "after", functools.partial(_coroutine)), "coroutine"),
        ((None, _Asynchronous()), "coroutine"),
        ((None, Hook(), print), "a Hook has its callbacks"),
        ((None, _Misspelt()), "_Misspelt overrides none of before, after and cancelled"),
    ],
)
def test_what_cannot_be_registered(saver: TorchMemorySaver, arguments: Any, message: str) -> None:
    for call, register in (("on_pause", saver.on_pause), ("on_resume", saver.on_resume)):
        with pytest.raises(InvalidArgumentError, match=f"^{call}: .*{message}") as caught:
            made = register(*arguments)
            made(print)  # the decorator, if it is one
        assert caught.value.operation == call
    assert hooks_module._hooks == {"pause": [], "resume": []}


@pytest.mark.parametrize("function", DEFERRED)
def test_callbacks_whose_body_never_runs_are_refused(saver: TorchMemorySaver, function: Any) -> None:
    hook = Hook()
    hook.cancelled = function  # type: ignore[method-assign]
    for register in (saver.on_pause, saver.on_resume):
        with pytest.raises(InvalidArgumentError, match="a call would not run its body"):
            register(None, "before", function)
        with pytest.raises(InvalidArgumentError, match="a call would not run its body"):
            register()(function)
        with pytest.raises(InvalidArgumentError, match="cancelled must be an ordinary function"):
            register(None, "before", print, cancelled=function)
        with pytest.raises(InvalidArgumentError, match="a method of the hook must be an ordinary function"):
            register(None, hook)
    assert hooks_module._hooks == {"pause": [], "resume": []}


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("function", DEFERRED)
def test_callbacks_whose_result_shows_that_no_body_ran_are_refused(hooks: Recorder, function: Any) -> None:
    hooks.allocate("a")
    hidden = functools.wraps(function, updated=())(lambda *arguments: function(*arguments))
    before = hooks.saver.on_pause(None, "before", hidden)
    with pytest.raises(InvalidArgumentError, match=r"a callback has returned a .+, whose body has not run"):
        hooks.saver.pause()
    assert hooks.states() == {_core.STATE_ACTIVE}
    before.remove()
    after = hooks.saver.on_pause(None, "after", hidden)
    with pytest.raises(InvalidArgumentError, match="whose body has not run"):
        hooks.saver.pause()
    assert hooks.states() == {_core.STATE_PAUSED}
    after.remove()


def test_cancelled_belongs_to_before(saver: TorchMemorySaver) -> None:
    with pytest.raises(InvalidArgumentError, match="undoes what a before-callback did"):
        saver.on_pause(None, "after", print, cancelled=print)
    with pytest.raises(InvalidArgumentError, match="cancelled must be a callable"):
        saver.on_pause(None, "before", print, cancelled=3)  # type: ignore[call-overload]
