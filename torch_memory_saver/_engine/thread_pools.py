"""Calls that are handed to a thread pool inside a region. They belong to the region until they return.

A library that loads on a thread pool of its own, as transformers does, gives its user no function to bind to the region.
``ThreadPoolExecutor.submit`` is replaced at the first region of the process, so ``map`` and asyncio's ``to_thread`` and
``run_in_executor`` follow as well. Only the call follows, not the thread: a worker that starts inside a region also works
for threads outside of it.

The program has not asked for this, so no pause waits for such a call or fails because of it. A pause ends the region of a
running call (:meth:`Regions.begin_pause`), and a call that cannot enter its region allocates ordinary memory. Both are
logged once for each function. A call may wait for others of its region (admission.py). The results and errors of futures do
not change.

Any thread; no lock.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any, cast

from torch_memory_saver._engine.region import Region, is_bound
from torch_memory_saver._patches import is_replaced, replace, restore
from torch_memory_saver._text import warn_once
from torch_memory_saver._torch.binding.layer import TorchCuda
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.records.frames import Frame, innermost_frame

__all__ = ["follow_thread_pools", "stop_following"]

#: Whether ``submit`` is replaced. Each entry of a region asks.
_is_following = False


def follow_thread_pools(store: PoolStore, find_torch: Callable[[], TorchCuda | None], manages_everything: bool) -> None:
    """Replace ``ThreadPoolExecutor.submit``, if it is not replaced yet.

    Args:
        store: The pools and frames of the process.
        find_torch: Returns PyTorch's layer, or None while it is not loaded.
        manages_everything: Whether the threads' memory outside of regions is managed (``TMS_INIT_ENABLE``). Only
            disable() is followed then.
    """
    global _is_following
    if _is_following:
        return
    original = ThreadPoolExecutor.submit  # before the check, so that it is never a replacement by another thread
    if is_replaced(ThreadPoolExecutor, "submit"):
        _is_following = True
        return

    @functools.wraps(cast("Callable[..., Any]", original))
    def submit(*arguments: Any, **keywords: Any) -> Any:
        stack = store.regions.stack()
        if not stack or len(arguments) < 2:  # in no region, or a mistake, which the original names
            return original(*arguments, **keywords)
        executor, function, *rest = arguments
        frame = innermost_frame(stack)
        if frame is not None and frame.threads and frame.managed is not manages_everything and not is_bound(function):
            store.prepare_threads(frame)
            function = _FollowingCall(_FollowingRegion(store, find_torch, frame, function), function)
        return original(executor, function, *rest, **keywords)

    replace("concurrent.futures.ThreadPoolExecutor.submit", ThreadPoolExecutor, "submit", submit)
    _is_following = True


def stop_following() -> None:
    """Undo :func:`follow_thread_pools`, unless something else has replaced ``submit`` since then. For tests."""
    global _is_following
    restore(ThreadPoolExecutor, "submit")
    _is_following = is_replaced(ThreadPoolExecutor, "submit")


class _FollowingRegion(Region):
    """The region of one call, with the options of the region in which the call was handed over."""

    def __init__(
        self, store: PoolStore, find_torch: Callable[[], TorchCuda | None], origin: Frame, function: object
    ) -> None:
        super().__init__(store, find_torch, origin.options)
        self._origin = origin
        self._function = function

    def _open(self) -> Frame:
        frame = super()._open()
        frame.origin, frame.function = self._origin, _name(self._function)
        return frame


class _FollowingCall:
    """A function that is called inside a region. Pickled, it is the function alone, for interpreters with other regions."""

    __slots__ = ("_function", "_region")

    def __init__(self, region: _FollowingRegion, function: Any) -> None:
        self._region = region
        self._function = function

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        entered = self._enter()
        try:
            return self._function(*arguments, **keywords)
        finally:
            if entered:
                self._leave()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._function,)

    def _enter(self) -> bool:
        try:
            self._region.__enter__()
        except Exception as error:  # whatever it is, the call itself has not failed
            _warn("allocates ordinary memory", self._function, error)
            return False
        return True

    def _leave(self) -> None:
        try:
            self._region.__exit__(*sys.exc_info())
        except Exception as error:
            _warn("has left its region with an error", self._function, error)


def _warn(what: str, function: object, error: Exception) -> None:
    name = _name(function)
    warn_once(
        f"following {what} {name}",
        "%s(), which was submitted to a thread pool inside a region, %s: %s",
        name,
        what,
        error,
    )


def _name(function: Any) -> str:
    """Return the name of a function, also of one in a ``functools.partial`` or, as asyncio passes it, in ``Context.run``."""
    while isinstance(function, functools.partial):
        runs = isinstance(getattr(function.func, "__self__", None), Context) and function.args
        function = function.args[0] if runs else function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
