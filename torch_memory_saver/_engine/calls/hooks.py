"""The callbacks of a program around pauses and resumes: their types, their registry, and the calls.

**Registry.** Registering is not a use of the saver: it loads no driver and does not fix the hook mode, so that modules may
register while they are imported. Hooks are held strongly until they are removed. A forked child inherits them. A call reads
the registry once: a hook that is registered later applies from the next call on.

**One call**, on the caller's thread, with no lock held:

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
raises. The call raises the first exception; KeyboardInterrupt and the like take its place. The others are logged.

A resume in the background takes the first four steps in the call that begins it, and the last in ``PendingResume.wait()`` or
in a later call that finds it ended (pending.py). In a process without hooks only `perform` is called, at once.

Any thread may call. One lock guards the registry. It is not held while a callback or an operation runs. A signal whose
handler raises ends the wait for a turn on the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._engine.calls.call_turns import CallTurn
from torch_memory_saver._engine.calls.silent_mistakes import warn_of_unknown_tags
from torch_memory_saver._text import joined
from torch_memory_saver._torch.base.steps import SingleUseScope
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver.errors import (
    ForkedProcessError,
    InvalidArgumentError,
    InvalidStateError,
    TorchMemorySaverError,
    add_note,
)
from torch_memory_saver.options import (
    PauseOptions,
    ResumeOptions,
    check_callback,
    check_tags,
    errors_of,
    refuse_unrun,
    select_tags,
)
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport

__all__ = [
    "Hook",
    "HookCall",
    "HookHandle",
    "PendingHooks",
    "begin_with_hooks",
    "has_inherited_memory",
    "refuse_inner_call",
    "register",
    "with_hooks",
]

logger = logging.getLogger("torch_memory_saver")


@dataclass(frozen=True)
class HookCall:
    """Description of the pause or resume around which a callback is called.

    It covers the allocations of the hook's tags that the call selects and that were not yet in the target state when the
    call began, as they were at that time.

    Attributes:
        operation: "pause" or "resume".
        tags: Tags of the allocations, in alphabetical order; at least one.
        devices: Devices of the allocations, in ascending order.
        allocations: Number of the allocations.
        bytes: Bytes of physical memory of the allocations.
        report: Report that the call returns. None before the call, and if the call raises.
        error: For after-callbacks, the exception that the call raises although it has paused or resumed memory of these
            tags, such as a DriverError for the part that is damaged. None otherwise.
    """

    operation: str
    tags: tuple[str, ...]
    devices: tuple[int, ...]
    allocations: int
    bytes: int
    report: PauseReport | ResumeReport | None = None
    error: BaseException | None = None


class Hook:
    """Callbacks around a pause, or around a resume, that belong together.

    Override the methods that are needed, and pass an instance to :meth:`TorchMemorySaver.on_pause` or
    :meth:`TorchMemorySaver.on_resume`.
    """

    def before(self, call: HookCall) -> None:
        """Run before the pause or resume changes anything.

        If this method raises, the call does not take place and raises the exception. The method must undo its own changes
        before it raises.
        """

    def after(self, call: HookCall) -> None:
        """Run after the call has paused or resumed memory of the hook's tags.

        If this method raises, the memory stays paused or resumed, and the call raises the exception after all other
        after-callbacks were called.
        """

    def cancelled(self, error: BaseException) -> None:
        """Run in place of :meth:`after` if the call changes nothing of the hook's tags because of `error`.

        The method is called only if ``before`` has returned. An exception that it raises is logged.
        """


class HookHandle:
    """A registered callback or hook, which lives until it is removed."""

    def __init__(self, remove: Callable[[], None], what: str) -> None:
        self._remove = remove
        self._what = what

    def __repr__(self) -> str:
        return f"<HookHandle: {self._what}>"

    def remove(self) -> None:
        """End the registration.

        A second call does nothing. In a pause or resume that has begun, ``after`` or ``cancelled`` still follows a
        ``before`` that was called.
        """
        self._remove()
        self._what = f"removed: {self._what.removeprefix('removed: ')}"


_WHEN = ("before", "after")


def _nothing(_: Any) -> None:
    """Do nothing, as the callback that a registration lacks."""


class _Registered:
    """One registration of callbacks.

    Attributes:
        tags: Names and patterns as given, or None for every tag.
        before, after, cancelled: The callbacks.
        name: Name of the program's function or class, for messages.
        removed: Whether the registration has been removed.
    """

    __slots__ = ("after", "before", "cancelled", "name", "removed", "tags")

    def __init__(
        self,
        tags: tuple[str, ...] | None,
        name: str,
        before: Callable[[Any], Any] = _nothing,
        after: Callable[[Any], Any] = _nothing,
        cancelled: Callable[[BaseException], Any] = _nothing,
    ) -> None:
        self.tags = tags
        self.name = name
        self.before = before
        self.after = after
        self.cancelled = cancelled
        self.removed = False


_lock = threading.Lock()
_hooks: dict[str, tuple[_Registered, ...]] = {"pause": (), "resume": ()}


def register(
    operation: str,
    tag: object,
    when: object,
    callback: Any = None,
    cancelled: Callable[[BaseException], Any] | None = None,
) -> HookHandle:
    """Register a hook, with the arguments of :meth:`TorchMemorySaver.on_pause`.

    Raises:
        InvalidArgumentError: An argument is invalid for that method.
    """
    with errors_of(f"on_{operation}"):
        tags = check_tags(tag)
        if isinstance(when, Hook):
            if callback is not None or cancelled is not None:
                raise InvalidArgumentError("a Hook has its callbacks as methods: pass no others with it")
            methods = (when.before, when.after, when.cancelled)
            if methods == tuple(method.__get__(when) for method in (Hook.before, Hook.after, Hook.cancelled)):
                raise InvalidArgumentError(f"{type(when).__qualname__} overrides none of before, after and cancelled")
            for method in methods:
                check_callback("a method of the hook", method)
            return _add(operation, _Registered(tags, type(when).__qualname__, *methods), "around")
        if not isinstance(when, str) or when not in _WHEN:
            raise InvalidArgumentError(f'when must be "before", "after" or a Hook, not {when!r}')
        check_callback("callback", callback)
        if cancelled is not None:
            check_callback("cancelled", cancelled)
            if when == "after":
                raise InvalidArgumentError('cancelled undoes what a before-callback did: pass it with when="before"')
        name = getattr(callback, "__qualname__", None) or repr(callback)
        if when == "after":
            return _add(operation, _Registered(tags, name, after=callback), when)
        return _add(operation, _Registered(tags, name, before=callback, cancelled=cancelled or _nothing), when)


def _add(operation: str, hook: _Registered, when: str) -> HookHandle:
    def remove() -> None:
        hook.removed = True
        with _lock:
            _hooks[operation] = tuple(other for other in _hooks[operation] if other is not hook)

    with _lock:
        _hooks[operation] = (*_hooks[operation], hook)
    tags = "every tag" if hook.tags is None else joined(hook.tags)
    return HookHandle(remove, f"{hook.name} {when} each {operation} of {tags}")


_Result = TypeVar("_Result", PauseReport, ResumeReport)
_Begun = TypeVar("_Begun")
_Pending = TypeVar("_Pending")
_Options = TypeVar("_Options", PauseOptions, ResumeOptions)

_PAUSED = frozenset({_core.STATE_PAUSED, _core.STATE_DAMAGED, _core.STATE_REPAIRING})
#: States in which an allocation already has the target state of the operation or is about to reach it, so that the operation
#: skips it.
_UNCONCERNED = {
    "pause": _PAUSED | {_core.STATE_PAUSING},
    "resume": {_core.STATE_RESUMING, _core.STATE_ACTIVE},
}
#: States in which an operation that raises has left an allocation that it changed.
_CHANGED = {"pause": _PAUSED, "resume": frozenset({_core.STATE_ACTIVE})}


class _Thread(threading.local):
    #: Whether a callback runs on this thread.
    inside = False


_thread = _Thread()
_inherited_memory = False


def refuse_inner_call(operation: str) -> None:
    """Raise InvalidStateError if this thread is already inside a pause or resume, or inside a callback of one.

    Each operation calls this function first. The native core checks a part of this as well, but only after PyTorch's pools
    have been prepared for the pause.
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
    return _HookRun(operation, tags).has_before_callback


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
    if not _hooks[operation]:
        return perform(options)
    turn = CallTurn(options.tags)
    try:
        if not turn.take(options.deadline):
            raise InvalidStateError(
                f"{operation}: another pause or resume of these tags, which calls hooks, did not end within the timeout. "
                "Wait for it, or pass a longer timeout",
                operation=operation,
            )
        run = _HookRun(operation, options.tags)
        if not run.has_hooks:
            turn.give_back()
            return perform(options)
        check(options)
        try:
            run.call_before()
            if options.may_wait_for_others:
                turn.give_back()
            report = perform(options)
        except BaseException as error:
            _raise(run.call_after(None, error), error)
            raise
        _raise(run.call_after(report, None))
        return report
    finally:
        turn.give_back()


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
    since. Its result is returned, and :meth:`PendingHooks.wait` is called at the end of the operation.
    """
    begun: list[_Begun] = []
    if not _hooks[operation]:
        begin(options, begun)
        return add(begun[0], None, options.tags)
    turn = CallTurn(options.tags)
    try:
        turn.take()
        run = _HookRun(operation, options.tags)
        callbacks = PendingHooks(run) if run.has_hooks else None
        if callbacks is not None:
            check(options)
        try:
            run.call_before()
            begin(options, begun)
        except BaseException as error:
            if begun:
                add(begun[0], callbacks, options.tags)
            else:
                _raise(run.call_after(None, error), error)
            raise
        return add(begun[0], callbacks, options.tags)
    finally:
        turn.give_back()


class PendingHooks:
    """The callbacks of a background resume that remain to be called. Any thread may use the object.

    Attributes:
        called: Whether a thread has begun to call the callbacks.
    """

    def __init__(self, run: _HookRun) -> None:
        self._uncalled = [run]  # empty once a thread has begun to call the callbacks
        self._finished = threading.Event()

    @property
    def called(self) -> bool:
        return not self._uncalled

    def wait(self, wait_for_end: Callable[[], ResumeReport], has_ended: Callable[[], bool]) -> ResumeReport:
        """Wait with `wait_for_end`, and then call the callbacks unless another thread has begun to call them.

        A thread that is not the first waits until the callbacks have returned.

        Raises:
            InvalidStateError: This thread is inside a pause, a resume or a callback, and the callbacks have not been called
                yet.
            Exception: Raised by `wait_for_end`, or the first exception of a callback.
        """
        if not self._finished.is_set():
            refuse_inner_call("wait")
        try:
            report = wait_for_end()
        except ForkedProcessError:
            raise  # the callbacks are called in the parent
        except TorchMemorySaverError as error:
            if has_ended():  # otherwise a signal handler raised it, and the resume goes on
                _raise(self._call_once(None, error), error)
            raise
        _raise(self._call_once(report, None))
        return report

    def _call_once(self, report: ResumeReport | None, error: BaseException | None) -> BaseException | None:
        claim = _Claim(self._uncalled, self._finished)
        return _core.within(claim, self._call_or_wait, report, error, claim.runs)

    def _call_or_wait(
        self, report: ResumeReport | None, error: BaseException | None, runs: list[_HookRun]
    ) -> BaseException | None:
        if runs:
            return runs[0].call_after(report, error)
        self._finished.wait()
        return None


class _Claim(SingleUseScope):
    """A context manager inside which the first thread calls the callbacks. Its end wakes the others, also after a signal.

    Attributes:
        runs: The hooks of the call on the first thread, and nothing on other threads.
    """

    def __init__(self, uncalled: list[_HookRun], finished: threading.Event) -> None:
        self._uncalled = uncalled
        self._finished = finished
        self.runs: list[_HookRun] = []

    def _begin(self) -> None:
        with contextlib.suppress(IndexError):  # another thread was first
            _core.move(self._uncalled, self.runs)

    def _end(self) -> None:
        if self.runs:
            self._finished.set()


class _MatchedHook:
    """One hook, and the part of the call that concerns it."""

    def __init__(self, hook: _Registered, operation: str, rows: list[_core.Segment]) -> None:
        self.hook = hook
        self.addresses = frozenset(row.address for row in rows)
        self.call = HookCall(
            operation=operation,
            tags=tuple(sorted({row.tag for row in rows})),
            devices=tuple(sorted({row.device for row in rows})),
            allocations=len(rows),
            bytes=sum(row.reserved_bytes for row in rows),
        )


class _HookRun:
    """The hooks of one call. Only one thread at a time may use the object."""

    def __init__(self, operation: str, tags: Tags) -> None:
        self._operation = operation
        rows = _concerned_rows(operation, tags)
        self._hooks: list[_MatchedHook] = []
        for hook in _hooks[operation] if rows else ():
            names = select_tags(hook.tags)
            mine = [row for row in rows if selects(names, row.tag)]
            if mine:
                self._hooks.append(_MatchedHook(hook, operation, mine))
            else:
                warn_of_unknown_tags(f"on_{operation}", names)
        self._begun: list[_MatchedHook] = []
        self._returned: list[type] = []
        self._all_begun = False

    @property
    def has_hooks(self) -> bool:
        return bool(self._hooks)

    @property
    def has_before_callback(self) -> bool:
        return any(matched.hook.before is not _nothing for matched in self._hooks)

    def call_before(self) -> None:
        """Call the before-callbacks until one raises."""
        for matched in self._hooks:
            if matched.hook.removed:
                continue
            self._begun.append(matched)
            _call(partial(self._record, matched), matched, "before")
        self._all_begun = True

    def _record(self, matched: _MatchedHook) -> None:
        # One call of C code: a signal handler that raises cannot come between the callback's return and its record. The
        # result is not kept: it may be a tensor that the pause is to find freed.
        self._returned.extend(map(type, map(matched.hook.before, (matched.call,))))
        refuse_unrun("a callback", self._returned[-1])

    def call_after(self, report: PauseReport | ResumeReport | None, error: BaseException | None) -> BaseException | None:
        """Call the after-callbacks in reverse order, or ``cancelled`` where `error` has prevented the change.

        Return the exception that the call has to raise in place of `error`, if any.
        """
        returned = self._begun[: len(self._returned)]
        changed = _changed(self._operation) if error is not None and self._all_begun else frozenset()
        first = error
        for matched in reversed(self._hooks):
            hook, call = matched.hook, matched.call
            begun = matched in returned
            if error is None or not changed.isdisjoint(matched.addresses):
                if hook.removed and not begun:
                    continue
                ended = dataclasses.replace(call, report=report, error=error)
                raised = _attempt(partial(hook.after, ended), matched, "after")
                when = f"after-callback {hook.name} raised; the memory is {self._operation}d, and the others are called"
            elif begun:
                raised = _attempt(partial(hook.cancelled, error), matched, "cancelled")
                when = f"cancelled-callback of {hook.name} raised; the others are called"
            else:
                continue
            if raised is not None:
                logger.error("%s: the %s", self._operation, when, exc_info=raised)
                first = _more_urgent(first, raised)
        return first if first is not error else None


def _raise(failure: BaseException | None, cause: BaseException | None = None) -> None:
    """Raise the exception, if there is one."""
    if failure is None:
        return
    try:
        raise failure from cause
    finally:
        # Breaks reference cycles (traceback, frame, variable) that would keep the callers' tensors.
        del failure, cause


def _concerned_rows(operation: str, tags: Tags) -> list[_core.Segment]:
    """Return the allocations of the tags that the operation is going to change."""
    unconcerned = _UNCONCERNED[operation]
    return [row for row in _core.segments() if row.state not in unconcerned and selects(tags, row.tag)]


def _changed(operation: str) -> frozenset[int]:
    """Return the addresses of all allocations in a state that the operation brings about."""
    states = _CHANGED[operation]
    return frozenset(row.address for row in _core.segments() if row.state in states)


def _call(callback: Callable[[], object], matched: _MatchedHook, when: str) -> None:
    """Call `callback`, and refuse pause and resume inside. An exception gets a note with the names of hook and tags."""
    outside = _thread.inside
    try:
        _thread.inside = True
        refuse_unrun("a callback", type(callback()))
    except BaseException as raised:
        call, name = matched.call, matched.hook.name
        add_note(raised, f"the {when}-callback {name} raised this, in a {call.operation} of {joined(call.tags)}")
        raise
    finally:
        _thread.inside = outside


def _attempt(callback: Callable[[], object], matched: _MatchedHook, when: str) -> BaseException | None:
    """Call `callback` and return its exception, or None."""
    try:
        _call(callback, matched, when)
    except BaseException as raised:
        return raised
    return None


def _more_urgent(first: BaseException | None, raised: BaseException) -> BaseException:
    """Choose which exception a call raises after it has failed with `first` and then with `raised`."""
    if first is None or (isinstance(first, Exception) and not isinstance(raised, Exception)):
        return raised
    add_note(first, f"then a callback raised {type(raised).__name__}: {raised}")
    return first


def _after_fork_in_child() -> None:
    global _lock, _inherited_memory
    _lock = threading.Lock()  # another thread may have held it
    _inherited_memory = _core.counters()["allocations"] > 0
    _thread.inside = False


os.register_at_fork(after_in_child=_after_fork_in_child)
