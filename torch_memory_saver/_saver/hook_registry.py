"""The registered hooks of this process, in the order of their registration.

Registering is not a use of the saver: it loads no driver and does not fix the hook mode, so that modules may register while
they are imported. Hooks are held strongly, until they are removed. A forked child inherits them.

Any thread. The lock is held for the exchange of a tuple, never while a callback runs. A call reads the tuple once, without
the lock: what is registered later counts from the next call on.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from torch_memory_saver._saver.arguments import check_tags
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.pause_hooks import Hook, HookHandle

__all__ = ["Registered", "hooks_of", "register"]

_WHEN = ("before", "after")


def _nothing(_: Any) -> None:
    """The callback that a registration lacks."""


class Registered:
    """One registration.

    Attributes:
        tags: As given: names and patterns; None is every tag.
        before, after, cancelled: The callbacks.
        name: Of the program's function or class, for messages.
        removed: Whether it has been removed.
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
_hooks: dict[str, tuple[Registered, ...]] = {"pause": (), "resume": ()}


def hooks_of(operation: str) -> tuple[Registered, ...]:
    """The hooks of "pause" or "resume"."""
    return _hooks[operation]


def register(
    operation: str,
    tag: object,
    when: object,
    callback: Any = None,
    cancelled: Callable[[BaseException], Any] | None = None,
) -> HookHandle:
    """Registers a hook, with the arguments of :meth:`TorchMemorySaver.on_pause`.

    Raises:
        InvalidArgumentError: An argument is not valid there.
    """
    tags = check_tags(tag)
    if isinstance(when, Hook):
        if callback is not None or cancelled is not None:
            raise InvalidArgumentError("a Hook has its callbacks as methods: pass no others with it")
        for method in (when.before, when.after, when.cancelled):
            _check_callback("a method of the hook", method)
        return _add(operation, Registered(tags, type(when).__qualname__, when.before, when.after, when.cancelled))
    if not isinstance(when, str) or when not in _WHEN:
        raise InvalidArgumentError(f'when must be "before", "after" or a Hook, not {when!r}')
    _check_callback("callback", callback)
    if cancelled is not None:
        _check_callback("cancelled", cancelled)
        if when == "after":
            raise InvalidArgumentError('cancelled undoes what a before-callback did: pass it with when="before"')
    name = getattr(callback, "__qualname__", None) or repr(callback)
    if when == "after":
        return _add(operation, Registered(tags, name, after=callback))
    return _add(operation, Registered(tags, name, before=callback, cancelled=cancelled or _nothing))


def _check_callback(name: str, callback: object) -> None:
    if not callable(callback):
        raise InvalidArgumentError(f"{name} must be a callable, not {type(callback).__name__}: {callback!r}")
    if inspect.iscoroutinefunction(callback):
        raise InvalidArgumentError(
            f"{name} must be an ordinary function, not a coroutine function ({callback!r}): nothing would await it"
        )


def _add(operation: str, hook: Registered) -> HookHandle:
    def remove() -> None:
        hook.removed = True
        with _lock:
            _hooks[operation] = tuple(other for other in _hooks[operation] if other is not hook)

    with _lock:
        _hooks[operation] = (*_hooks[operation], hook)
    return HookHandle(remove)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)
