"""The part of the public class that registers hooks. Registering is not a use of the saver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, TypeVar, overload

from torch_memory_saver._saver import hook_registry
from torch_memory_saver._saver.arguments import check_tags
from torch_memory_saver._torch.eager import eager_methods
from torch_memory_saver.pause_hooks import Hook, HookCall, HookHandle

__all__ = ["HookMethods"]

_Tag: TypeAlias = str | Iterable[str] | None
_When: TypeAlias = Literal["before", "after"]
_Cancelled: TypeAlias = Callable[[BaseException], Any] | None
_Callback = TypeVar("_Callback", bound=Callable[[HookCall], Any])


def _register(operation: str, tag: _Tag, when: Any, callback: Any, cancelled: _Cancelled) -> Any:
    if callback is not None or not isinstance(when, str):
        return hook_registry.register(operation, tag, when, callback, cancelled)
    tags = check_tags(tag)  # an iterator can be read only once

    def decorate(function: _Callback) -> _Callback:
        hook_registry.register(operation, tags, when, function, cancelled)
        return function

    return decorate


@eager_methods
class HookMethods:
    """on_pause() and on_resume()."""

    @overload
    def on_pause(
        self, tag: _Tag, when: _When, callback: Callable[[HookCall], Any], *, cancelled: _Cancelled = None
    ) -> HookHandle: ...

    @overload
    def on_pause(self, tag: _Tag, when: Hook) -> HookHandle: ...

    @overload
    def on_pause(
        self, tag: _Tag = None, when: _When = "before", *, cancelled: _Cancelled = None
    ) -> Callable[[_Callback], _Callback]: ...

    def on_pause(self, tag: Any = None, when: Any = "before", callback: Any = None, *, cancelled: _Cancelled = None) -> Any:
        """Has a callback called around every pause of a tag, such as one that deregisters buffers whose physical memory the
        pause takes away.

        Before-callbacks are called in the order of registration, after-callbacks in reverse, on the thread of the call, with
        no lock held. They may allocate and free, also in regions, but not pause or resume. A callback is not called
        if the pause finds nothing resident with its tag, or is refused because of a capture or of another thread's region.
        Other threads' pauses and resumes of the same tags wait until all callbacks were called.

        Args:
            tag: A tag or a pattern, several, or None for every tag, as for :meth:`pause`. Patterns are looked up at each
                call.
            when: "before" (the default) or "after"; or a :class:`Hook` with the callbacks as methods.
            callback: Called with a :class:`HookCall`. Without it, the result is a decorator, which returns the function
                itself.
            cancelled: Called with the exception, in reverse order, if ``callback`` has returned and the pause then changes
                nothing of these tags: a later callback has raised, or the pause has failed.

        Returns:
            A handle, whose ``remove()`` ends the registration.

        Raises:
            InvalidArgumentError: An argument of another kind, or a coroutine function.
        """
        return _register("pause", tag, when, callback, cancelled)

    @overload
    def on_resume(
        self, tag: _Tag, when: _When, callback: Callable[[HookCall], Any], *, cancelled: _Cancelled = None
    ) -> HookHandle: ...

    @overload
    def on_resume(self, tag: _Tag, when: Hook) -> HookHandle: ...

    @overload
    def on_resume(
        self, tag: _Tag = None, when: _When = "before", *, cancelled: _Cancelled = None
    ) -> Callable[[_Callback], _Callback]: ...

    def on_resume(self, tag: Any = None, when: Any = "before", callback: Any = None, *, cancelled: _Cancelled = None) -> Any:
        """Has a callback called around every resume of a tag, with the arguments of :meth:`on_pause`.

        A callback is not called if the resume finds nothing paused with its tag. It is called once for a call with
        ``timeout``. With ``wait=False`` the before-callbacks are called before ``resume`` returns. The after-callbacks are
        called once: by :meth:`PendingResume.wait`, by a pause of these tags, which waits for the resume, or by the next
        resume of them. A resume with ``timeout``, ``exclusive`` or ``wait=False`` does not keep other threads' calls waiting
        once its before-callbacks were called.

        Raises:
            InvalidArgumentError: As for :meth:`on_pause`.
        """
        return _register("resume", tag, when, callback, cancelled)
