"""The callbacks that a program registers around pauses and resumes: their types, and the registry.

Registering is not a use of the saver: it loads no driver and does not fix the hook mode, so that modules may register while
they are imported. Hooks are held strongly until they are removed. A forked child inherits them.

Any thread may call, and so may signal handlers and finalizers. There is no lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_memory_saver._text import joined
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.options import check_callback, check_tags, errors_of
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport

__all__ = ["Hook", "HookCall", "HookHandle", "Registered", "register", "registered"]


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


class Registered:
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

    @property
    def has_before(self) -> bool:
        return self.before is not _nothing


#: The registrations by operation. There is no lock, because each change of a list is one call of C code.
_hooks: dict[str, list[Registered]] = {"pause": [], "resume": []}


def registered(operation: str) -> list[Registered]:
    """Return the registrations for an operation, in their order."""
    return list(_hooks[operation])


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
            return _add(operation, Registered(tags, type(when).__qualname__, *methods), "around")
        if not isinstance(when, str) or when not in _WHEN:
            raise InvalidArgumentError(f'when must be "before", "after" or a Hook, not {when!r}')
        check_callback("callback", callback)
        if cancelled is not None:
            check_callback("cancelled", cancelled)
            if when == "after":
                raise InvalidArgumentError('cancelled undoes what a before-callback did: pass it with when="before"')
        name = getattr(callback, "__qualname__", None) or repr(callback)
        if when == "after":
            return _add(operation, Registered(tags, name, after=callback), when)
        return _add(operation, Registered(tags, name, before=callback, cancelled=cancelled or _nothing), when)


def _add(operation: str, hook: Registered, when: str) -> HookHandle:
    def remove() -> None:
        hook.removed = True
        with contextlib.suppress(ValueError):  # it was removed before
            _hooks[operation].remove(hook)

    _hooks[operation].append(hook)
    tags = "every tag" if hook.tags is None else joined(hook.tags)
    return HookHandle(remove, f"{hook.name} {when} each {operation} of {tags}")
