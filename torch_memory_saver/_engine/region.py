"""The context manager of region() and disable(), and functions that are bound to a region. The context manager is a class
rather than a generator, because entering a region must take microseconds.

It enters a region of the native core and, if torch is used, routes pools. Leaving removes only that one; later
regions of the same thread stay in force (frames.py).

A signal handler may raise between any two bytecodes of an entry or exit. An entry is then undone, and an exit is completed,
before the exception goes on: ``_core.Scope`` repeats ``_leave``, and each of its steps can be repeated (steps.py).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.base import region_settings
from torch_memory_saver._torch.binding.layer import TorchCuda, eager_methods, in_use
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.records.frames import (
    Frame,
    FunctionDecorator,
    choose_frame,
    innermost_frame,
    note_entered,
    note_left,
    refuse_deferred_body,
    warn,
)
from torch_memory_saver.errors import ForkedProcessError, InvalidArgumentError, InvalidStateError, TorchMemorySaverError
from torch_memory_saver.options import RegionOptions, refuse_unrun

__all__ = ["Region", "bind_region", "check_bound", "is_bound"]

logger = logging.getLogger("torch_memory_saver")

#: The attribute of functions that are bound to a region.
_BOUND = "_torch_memory_saver_bound"


@eager_methods
class Region(_core.Scope, FunctionDecorator):
    """The context manager that region() and disable() return: one region each. An object may be entered again, even
    while it is entered, on any thread. ``_core.Scope`` calls its methods."""

    def __init__(
        self, store: PoolStore, find_torch: Callable[[], TorchCuda | None], options: RegionOptions, threads: bool = True
    ) -> None:
        self._store = store
        self._find_torch = find_torch
        self._options = options
        self._threads = threads
        self._frames: list[Frame] = []

    def __repr__(self) -> str:
        return f"<{self._options}, {'entered' if self._frames else 'not entered'}>"

    def _open(self) -> Frame:
        frame = Frame(self._find_torch(), self._options, self._store.regions.stack())
        frame.threads = self._threads
        return frame

    def _enter(self, frame: Frame) -> None:
        torch = frame.torch
        self._frames.append(frame)
        region_settings.enter_region(frame.ids, self._options, follows=frame.managed and frame.origin is not None)
        self._store.make_room(frame)
        self._store.regions.enter(frame)
        if torch is not None:
            if not self._store.regions.single_device:
                _core.refresh_peers()
            frame.reading = self._store.outside_memory.begin(torch, frame)
        note_entered(frame)

    def _choose(self) -> Frame:
        if not self._frames:
            raise InvalidStateError(
                f"{self._options} cannot be left, because it is not entered: __exit__ was called twice, or without "
                "__enter__. Use a with statement",
                operation="leave a region",
            )
        return choose_frame(self._frames, self._store.regions.stack())

    def _leave(self, frame: Frame) -> None:
        if not frame.used:
            frame.used = tuple(frame.pools)
        region_settings.leave_region(frame.ids)
        self._store.regions.leave(frame)
        if frame in self._frames:
            self._frames.remove(frame)

    def _left(self, frame: Frame, exception: BaseException | None) -> None:
        self._store.return_memory(frame)
        if frame.torch is not None and not self._store.regions.single_device:
            try:
                _core.refresh_peers()
            except ForkedProcessError:
                pass  # a process forked inside the region leaves it as well, and has no memory to share
            except TorchMemorySaverError as error:
                if exception is None:
                    raise
                # Does not replace the exception of the region's body.
                logger.warning("leaving region(tag=%r) after an exception: %s", self._options.tag, error)
        if exception is None:
            self._store.outside_memory.end(frame, frame.used)
        self._return_idle(frame)
        try:
            if frame.stack is self._store.regions.stack():
                note_left(frame)
            else:
                warn(
                    f"{frame} is left on another thread than it was entered on. Leave a region on the thread that entered "
                    "it.",
                    frames_up=2,
                )
        except RuntimeWarning:  # warnings are errors in this program
            if exception is None:
                raise

    def _return_idle(self, frame: Frame) -> None:
        if frame.torch is not in_use():
            return  # the child of a process that was inside the region has none of its memory
        try:
            self._store.return_idle_of(frame, frame.used)
        except (TorchMemorySaverError, RuntimeError) as error:  # a lost device
            logger.warning("%s has been left, but its idle memory was not returned: %s", frame, error)

    def _recreate_cm(self) -> Region:
        return Region(self._store, self._find_torch, self._options, self._threads)


def check_bound(function: object) -> None:
    """Check that a function can be bound to a region.

    Raises:
        InvalidArgumentError: It is not callable.
        TypeError: It is a coroutine function or a generator function.
    """
    if not callable(function):
        raise InvalidArgumentError(f"function must be a callable, not {type(function).__name__}: {function!r}")
    refuse_deferred_body(function)


def bind_region(store: PoolStore, find_torch: Callable[[], TorchCuda | None], function: Any) -> Any:
    """Wrap a function so that each call is inside a region with the options of the caller's innermost region. Outside of
    every region return the function itself.

    Each call enters a region of its own, so a call may run at any time and on any thread. A call that returns a coroutine
    raises InvalidArgumentError, because the coroutine's body would run outside the region.

    Raises:
        InvalidArgumentError: It is not callable.
        TypeError: It is a coroutine function or a generator function.
    """
    check_bound(function)
    frame = innermost_frame(store.regions.stack())
    if frame is None:
        return function
    in_region = Region(store, find_torch, frame.options, frame.threads)(function)

    @functools.wraps(function)
    def bound(*arguments: Any, **keywords: Any) -> Any:
        result = in_region(*arguments, **keywords)
        if type(result) is CoroutineType:  # a generator may be an ordinary result, such as module.parameters()
            refuse_unrun("function", CoroutineType)
        return result

    setattr(bound, _BOUND, True)
    return bound


def is_bound(function: object) -> bool:
    """Return whether :func:`bind_region` has made a function."""
    return getattr(function, _BOUND, False) is True
