"""The calls of a program's hooks around one pause or resume.

A call runs on the caller's thread, with no lock held:

1. It takes its turn. Two calls whose tags overlap run one after the other, with all their callbacks. Otherwise two threads
   that pause the same tag would both call every callback, and a resume that begins during the before-callbacks of a pause
   would resume its memory without callbacks. A turn is not a lock: only pauses and resumes wait for it, never a callback,
   an allocation or a free. A resume that may wait for other processes gives its turn back after its before-callbacks: it may
   wait for a pause of another thread. A callback that waits for another thread's call on the same tags waits for ever.
2. It finds the allocations that it will change. A hook is called only if one of them has one of its tags, so a pause of
   memory that is already paused calls no hook.
3. `check` raises an error if the call is certain to fail, as in a visible capture. No hook has been called by then.
4. The before-callbacks are called in the order of registration.
5. `perform` runs the operation, including its attempts within a timeout.
6. In reverse order the after-callbacks are called, or ``cancelled`` where the call has failed.

The callback that follows a failure is chosen for each hook by the state of its allocations, since an operation may raise
after it has changed them. ``after`` is called with the error if any of them has changed; otherwise ``cancelled`` is called
if ``before`` had returned. So each ``before`` is followed by exactly one of the two. All of them are called, even if one
or a signal handler raises. The call raises the first exception; KeyboardInterrupt and the like take its place. The others
are logged.

A resume in the background takes the first four steps in the call that begins it, and the last in ``PendingResume.wait()`` or
in a later call that finds it ended (pending.py). In a process without hooks only `perform` is called, at once.

Any thread may call. A pause or resume of a signal handler or finalizer is refused while its thread is inside one. A signal
whose handler raises ends the wait for a turn on the main thread. Wherever it raises, the turn ends, the callbacks that must
follow are called, and a resume that has begun is handed on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
from collections.abc import Callable
from operator import length_hint
from typing import Any, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._engine.calls.call_turns import CallTurn
from torch_memory_saver._engine.calls.hooks import HookCall, Registered, registered
from torch_memory_saver._engine.calls.silent_mistakes import warn_of_unknown_tags
from torch_memory_saver._text import joined
from torch_memory_saver._torch.base.steps import Notifier, SingleUseScope
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver.errors import ForkedProcessError, InvalidStateError, TorchMemorySaverError, add_note
from torch_memory_saver.options import PauseOptions, ResumeOptions, refuse_unrun, select_tags
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport

__all__ = [
    "PendingHooks",
    "begin_with_hooks",
    "has_before_callback",
    "has_inherited_memory",
    "refuse_inner_call",
    "with_hooks",
]

logger = logging.getLogger("torch_memory_saver")


_Result = TypeVar("_Result", PauseReport, ResumeReport)
_Begun = TypeVar("_Begun")
_Pending = TypeVar("_Pending")
_Options = TypeVar("_Options", PauseOptions, ResumeOptions)

_PAUSED = frozenset({_core.STATE_PAUSED, _core.STATE_DAMAGED, _core.STATE_REPAIRING})
#: States in which an allocation already has the target state of the operation or is about to reach it, so that the operation
#: skips it.
_SKIPPED_STATES = {
    "pause": _PAUSED | {_core.STATE_PAUSING},
    "resume": {_core.STATE_RESUMING, _core.STATE_ACTIVE},
}
#: States in which an operation that raises has left an allocation that it changed.
_CHANGED = {"pause": _PAUSED, "resume": frozenset({_core.STATE_ACTIVE})}


class _Thread(threading.local):
    #: Whether this thread is in a call with hooks, or calls the callbacks of a background resume.
    inside = False


_thread = _Thread()
_inherited_memory = False


class _InsideCall(SingleUseScope):
    """A context manager inside which pauses and resumes of this thread are refused."""

    def __init__(self) -> None:
        self._outside = _thread.inside

    def _begin(self) -> None:
        _thread.inside = True

    def _end(self) -> None:
        _thread.inside = self._outside


def refuse_inner_call(operation: str) -> None:
    """Raise InvalidStateError if this thread is already inside a pause or resume, or inside a callback of one.

    Each operation calls this function first. The native core checks a part of this as well, but only after PyTorch's pools
    have been prepared for the pause. A signal handler or finalizer would wait for the turn of its own thread otherwise.
    """
    if _thread.inside or _core.in_transition():
        raise InvalidStateError(
            f"{operation}: this thread is inside pause() or resume() already; do not call them from signal handlers, "
            "callbacks, hooks or finalisers",
            operation=operation,
        )


def has_inherited_memory() -> bool:
    """Return whether this process was forked from one that had managed memory: its pauses and resumes are refused."""
    return _inherited_memory


def has_before_callback(operation: str, tags: Tags) -> bool:
    """Return whether a callback of the program runs before an operation that selects `tags`."""
    return _Callbacks(operation, tags, registered(operation)).has_before


def with_hooks(
    operation: str, options: _Options, check: Callable[[_Options], object], perform: Callable[[_Options], _Result]
) -> _Result:
    """Perform an operation, with the hooks of its tags around it.

    Args:
        operation: "pause" or "resume".
        options: Options of the operation. The wait for the turn ends at their deadline. If other processes or threads may
            have to pause first, the turn is given back before `perform` is called.
        check: Called before the hooks. It raises an error if the operation is certain to fail.
        perform: Performs the operation and returns its report.

    Raises:
        InvalidStateError: Another call with hooks still had the turn at the deadline.
    """
    call = _Call(operation, options, check, perform)
    report: _Result = call.run(options.deadline, not options.may_wait_for_others)
    return report


def begin_with_hooks(
    operation: str,
    options: _Options,
    check: Callable[[_Options], object],
    begin: Callable[[_Options, list[_Begun]], object],
    add: Callable[[_Begun, PendingHooks | None, Tags], _Pending],
) -> _Pending:
    """Begin an operation that continues in the background, after calling the before-callbacks.

    `begin` appends the operation to a list. It must not be interrupted between the two: an operation that has begun gets no
    ``cancelled``. `add` is called with it, and with the callbacks that remain or None, even if a signal handler has raised
    since, and then perhaps twice. Its result is returned, and :meth:`PendingHooks.wait` is called at the end of the
    operation.
    """
    call = _BackgroundCall(operation, options, check, begin, add)
    call.run(math.inf, True)
    pending: _Pending = call.pending
    return pending


class _Call(SingleUseScope):
    """A pause or resume with its callbacks: a scope whose end calls those that follow, wherever a signal handler raises.

    The arguments are those of :func:`with_hooks`.
    """

    def __init__(
        self,
        operation: str,
        options: PauseOptions | ResumeOptions,
        check: Callable[[Any], object],
        perform: Callable[[Any], Any],
    ) -> None:
        self._operation = operation
        self._options = options
        self._check = check
        self._perform = perform
        self._callbacks = _Callbacks(operation, options.tags, [])
        self._report: Any = None
        self._error: BaseException | None = None

    def run(self, deadline: float, keeps_turn: bool) -> Any:
        """Perform the operation, and return its report.

        Args:
            deadline: Time at which the wait for the turn ends.
            keeps_turn: Whether the turn lasts until the end of the call. Otherwise it ends when the operation begins.
        """
        try:
            return _core.within(_InsideCall(), self._run, deadline, keeps_turn)
        finally:
            self._error = None  # breaks a reference cycle (traceback, frame, object) that would keep the callers' tensors

    def _run(self, deadline: float, keeps_turn: bool) -> Any:
        hooks = registered(self._operation)
        if not hooks:
            return _core.within(self, self._call_before_and_perform, None)
        turn = CallTurn(self._operation, self._options.tags, deadline)
        return _core.within(turn, self._run_in_turn, turn, keeps_turn, hooks)

    def _run_in_turn(self, turn: CallTurn, keeps_turn: bool, hooks: list[Registered]) -> Any:
        self._callbacks = _Callbacks(self._operation, self._options.tags, hooks)
        if self._callbacks:
            self._check(self._options)
        else:
            keeps_turn = False
        return _core.within(self, self._call_before_and_perform, None if keeps_turn else turn)

    def _call_before_and_perform(self, ending: CallTurn | None) -> Any:
        """Call the before-callbacks, end a turn, and perform the operation."""
        try:
            self._callbacks.call_before()
            if ending is not None:
                ending.give_back()
            self._report = self._perform(self._options)
        except BaseException as error:
            self._report, self._error = None, error
            raise
        return self._report

    def _end(self) -> None:
        if self._report is None and self._error is None:
            self._error = KeyboardInterrupt("a signal handler has raised an exception")
        self._callbacks.call_following(self._report, self._error)

    def _left(self, entry: None, exception: BaseException | None) -> None:
        error, self._error = self._error, None
        self._callbacks.raise_failure(error)


class _BackgroundCall(_Call):
    """The begin of a resume in the background. Its end hands the resume on, with the callbacks that remain.

    The arguments are those of :func:`begin_with_hooks`.

    Attributes:
        pending: The result of `add`.
    """

    pending: Any

    def __init__(
        self,
        operation: str,
        options: PauseOptions | ResumeOptions,
        check: Callable[[Any], object],
        begin: Callable[[Any, list[Any]], object],
        add: Callable[[Any, PendingHooks | None, Tags], object],
    ) -> None:
        begun: list[Any] = []
        super().__init__(operation, options, check, lambda options: begin(options, begun))
        self._begun = begun
        self._add = add
        self._hooks: PendingHooks | None = None

    def _end(self) -> None:
        if not self._begun:
            super()._end()
            return
        if self._hooks is None and self._callbacks:
            self._hooks = PendingHooks(self._callbacks)
        self.pending = self._add(self._begun[0], self._hooks, self._options.tags)


class PendingHooks:
    """The callbacks of a background resume that remain to be called. Any thread may use the object.

    Attributes:
        uncalled: The callbacks, until a thread begins to call them.
        finished: Whether the callbacks have returned.
    """

    def __init__(self, callbacks: _Callbacks) -> None:
        self.uncalled = [callbacks]
        self.finished = False
        self._finish = Notifier()

    def end(self) -> None:
        """Wake the threads that wait for the callbacks. May be repeated."""
        self.finished = True
        self._finish.notify()

    def wait(self, wait_for_end: Callable[[], ResumeReport], has_ended: Callable[[], bool]) -> ResumeReport:
        """Wait with `wait_for_end`, and then call the callbacks unless another thread has begun to call them.

        A thread that is not the first waits until the callbacks have returned.

        Raises:
            InvalidStateError: This thread is inside a pause, a resume or a callback, and the callbacks have not been called
                yet.
            Exception: Raised by `wait_for_end`, or the first exception of a callback.
        """
        if not self.finished:
            refuse_inner_call("wait")
        try:
            report = wait_for_end()
        except ForkedProcessError:
            raise  # the callbacks are called in the parent
        except TorchMemorySaverError as error:
            if has_ended():  # otherwise a signal handler raised it, and the resume goes on
                self._call_once(None, error)
            raise
        self._call_once(report, None)
        return report

    def _call_once(self, report: ResumeReport | None, error: BaseException | None) -> None:
        claim = _Claim(self, report, error)
        _core.within(_InsideCall(), _core.within, claim, self._await_others, claim)

    def _await_others(self, claim: _Claim) -> None:
        if not claim.callbacks:
            self._finish.wait_until(lambda: self.finished, math.inf)


class _Claim(SingleUseScope):
    """A scope by which the first thread claims the callbacks. Its end calls them, and then wakes the other threads.

    Attributes:
        callbacks: The callbacks of the call on the first thread, and nothing on other threads.
    """

    def __init__(self, hooks: PendingHooks, report: ResumeReport | None, error: BaseException | None) -> None:
        self._hooks = hooks
        self._report = report
        self._error = error
        self.callbacks: list[_Callbacks] = []

    def _begin(self) -> None:
        with contextlib.suppress(IndexError):  # another thread was first
            _core.move(self._hooks.uncalled, self.callbacks)

    def _end(self) -> None:
        for callbacks in self.callbacks:
            callbacks.call_following(self._report, self._error)
            self._hooks.end()

    def _left(self, entry: None, exception: BaseException | None) -> None:
        error, self._error = self._error, None
        for callbacks in self.callbacks:
            callbacks.raise_failure(error)


class _Once:
    """A call of a callback that is made once, however often :meth:`make` is called.

    A signal handler that raises comes before the callback or after it. If it comes before, :meth:`make` can be repeated.

    Attributes:
        begun: Whether the callback was called.
        callback: "before", "after" or "cancelled".
        results: The type of the result, if the callback has returned. The result is not kept: it may be a tensor that the
            pause is to find freed.
    """

    def __init__(self, callback: str, function: Callable[[Any], object], argument: object) -> None:
        self.callback = callback
        self.results: list[type] = []
        self._arguments = iter([argument])
        self._calls = map(type, map(function, self._arguments))

    @property
    def begun(self) -> bool:
        return not length_hint(self._arguments)

    def make(self) -> None:
        self.results.extend(self._calls)


class _MatchedHook:
    """One hook, and the part of the call that concerns it.

    Attributes:
        before: The call of the before-callback.
        following: The call of the after-callback or of ``cancelled``, once it is known which of them follows.
    """

    def __init__(self, hook: Registered, operation: str, rows: list[_core.Segment]) -> None:
        self.hook = hook
        self.addresses = frozenset(row.address for row in rows)
        self.call = HookCall(
            operation=operation,
            tags=tuple(sorted({row.tag for row in rows})),
            devices=tuple(sorted({row.device for row in rows})),
            allocations=len(rows),
            bytes=sum(row.reserved_bytes for row in rows),
        )
        self.before = _Once("before", hook.before, self.call)
        self.following: _Once | None = None

    def choose(self, changed: bool, report: PauseReport | ResumeReport | None, error: BaseException | None) -> _Once | None:
        """Return the call that follows, if one does."""
        if changed:
            if self.hook.removed and not self.before.results:
                return None
            return _Once("after", self.hook.after, dataclasses.replace(self.call, report=report, error=error))
        return _Once("cancelled", self.hook.cancelled, error) if self.before.results else None

    def make(self, once: _Once) -> None:
        """Make a call. An exception gets a note with the names of hook and tags."""
        try:
            once.make()
            for result in once.results:
                refuse_unrun("a callback", result)
        except BaseException as raised:
            if once.begun:
                call, name = self.call, self.hook.name
                text = f"the {once.callback}-callback {name} raised this, in a {call.operation} of {joined(call.tags)}"
                add_note(raised, text)
            raise


class _Callbacks:
    """The callbacks of one call. Only one thread at a time may use the object."""

    def __init__(self, operation: str, tags: Tags, registered: list[Registered]) -> None:
        self._operation = operation
        self._hooks: list[_MatchedHook] = []  # those whose following callbacks have not been called
        self._all_begun = False
        self._failure: BaseException | None = None
        rows = _rows_to_change(operation, tags) if registered else []
        for hook in registered if rows else ():
            names = select_tags(hook.tags)
            mine = [row for row in rows if selects(names, row.tag)]
            if mine:
                self._hooks.append(_MatchedHook(hook, operation, mine))
            else:
                warn_of_unknown_tags(f"on_{operation}", names)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    @property
    def has_before(self) -> bool:
        return any(matched.hook.has_before for matched in self._hooks)

    def call_before(self) -> None:
        """Call the before-callbacks until one raises."""
        for matched in self._hooks:
            if matched.hook.removed:
                continue
            matched.make(matched.before)
        self._all_begun = True

    def call_following(self, report: PauseReport | ResumeReport | None, error: BaseException | None) -> None:
        """Call the after-callbacks in reverse order, or ``cancelled`` where `error` has prevented the change.

        Repeating this after the exception of a signal handler calls the callbacks that remain.
        """
        asks = self._hooks and error is not None and self._all_begun
        changed = _changed(self._operation) if asks else frozenset()
        while self._hooks:
            matched = self._hooks[-1]
            if matched.following is None:
                has_changed = error is None or not changed.isdisjoint(matched.addresses)
                matched.following = matched.choose(has_changed, report, error)
            if matched.following is not None:
                self._make_following(matched, matched.following, error)
            self._hooks.pop()

    def _make_following(self, matched: _MatchedHook, once: _Once, error: BaseException | None) -> None:
        """Call the callback, and keep its exception for :meth:`raise_failure`."""
        try:
            matched.make(once)
        except BaseException as raised:
            if not once.begun:
                raise
            # Another function, because a variable of this frame that has the exception would be a reference cycle.
            self._keep_failure(matched.hook.name, once.callback, error, raised)

    def _keep_failure(self, name: str, callback: str, error: BaseException | None, raised: BaseException) -> None:
        first = _more_urgent(error if self._failure is None else self._failure, raised)
        self._failure = None if first is error else first
        what = f"after-callback {name} raised; the memory is {self._operation}d, and"
        if callback == "cancelled":
            what = f"cancelled-callback of {name} raised;"
        logger.error("%s: the %s the others are called", self._operation, what, exc_info=raised)

    def raise_failure(self, error: BaseException | None) -> None:
        """Raise the exception that the call has to raise because of a callback in place of `error`, if there is one."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        try:
            raise failure from error
        finally:
            # Breaks reference cycles (traceback, frame, variable) that would keep the callers' tensors.
            del failure, error


def _rows_to_change(operation: str, tags: Tags) -> list[_core.Segment]:
    """Return the allocations of the tags that the operation is going to change."""
    skipped = _SKIPPED_STATES[operation]
    return [row for row in _core.segments() if row.state not in skipped and selects(tags, row.tag)]


def _changed(operation: str) -> frozenset[int]:
    """Return the addresses of all allocations in a state that the operation brings about."""
    states = _CHANGED[operation]
    return frozenset(row.address for row in _core.segments() if row.state in states)


def _more_urgent(first: BaseException | None, raised: BaseException) -> BaseException:
    """Choose which exception a call raises after it has failed with `first` and then with `raised`."""
    if first is None or (isinstance(first, Exception) and not isinstance(raised, Exception)):
        return raised
    add_note(first, f"then a callback raised {type(raised).__name__}: {raised}")
    return first


def _after_fork_in_child() -> None:
    global _inherited_memory
    _inherited_memory = _core.counters()["allocations"] > 0
    _thread.inside = False


os.register_at_fork(after_in_child=_after_fork_in_child)
