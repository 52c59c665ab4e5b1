"""Entries of regions on one thread, and the order in which they are left.

A thread's regions are a stack, and the innermost is in force. Tasks of an event loop share a thread, and so do generators:
one may be inside a region when another enters its own, and the outer one may be left first. Leaving one region then leaves
the others in force. Memory allocated then belongs to the innermost region. Both cases cause a warning, because contents
may be lost: a tensor that should have a backup may have none.

A frame may *follow* another one: it is entered for a call that was handed to a thread pool inside that one
(_engine/thread_pools.py). A pause ends it on its thread rather than wait for it.

The context (:mod:`contextvars`) shows which task entered a region: only tasks started inside a region have it in their
context. Generators share the context of their callers, so they are recognised by the order of leaving.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch_memory_saver._torch.binding.layer import Routing, TorchCuda
from torch_memory_saver._torch.records.pool import Pool
from torch_memory_saver._torch.records.tags import Tags
from torch_memory_saver.options import RegionOptions, deferred_kind

__all__ = [
    "Frame",
    "FunctionDecorator",
    "Pause",
    "Reading",
    "Stack",
    "ThreadLife",
    "choose_frame",
    "innermost_frame",
    "note_entered",
    "note_left",
    "refuse_deferred_body",
    "warn",
]


class ThreadLife:
    """An object that lives as long as the thread whose thread-local storage holds it."""

    __slots__ = ("__weakref__",)


class Stack(list["Frame"]):
    """The frames of one thread, outermost first. The identity of the stack is that of the thread, whose number may be used
    again by a later one.

    Attributes:
        thread: The number of the thread.
        life: A weak reference to an object that lives as long as the thread.
    """

    __slots__ = ("life", "thread")

    def __init__(self, life: weakref.ref[ThreadLife]) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.life = life

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return self.life() is None

    def __str__(self) -> str:
        thread = next((each for each in threading.enumerate() if each.ident == self.thread), None)
        return f"thread {self.thread}" if thread is None or self.has_ended else f"thread {thread.name!r} ({self.thread})"


class Pause:
    """A running pause, or one that waits for threads inside regions of its tags.

    Attributes:
        stack: The frames of the pausing thread.
        tags: The tags that it selects.
        only_waits: Whether it only waits for threads, and leaves frames that follow others as they are.
    """

    __slots__ = ("only_waits", "stack", "tags")

    def __init__(self, stack: Stack, tags: Tags, only_waits: bool = False) -> None:
        self.stack = stack
        self.tags = tags
        self.only_waits = only_waits


class Reading(NamedTuple):
    """The memory of PyTorch and of this package when a region was entered or left.

    Attributes:
        unmanaged_bytes: Device memory of PyTorch that was not managed.
        allocations, frees: Numbers of managed allocations and frees since the process began.
        disabled: Number of entries of disable() since the process began.
    """

    unmanaged_bytes: int
    allocations: int
    frees: int
    disabled: int


class Frame:
    """One entry of a region or of disable() on one thread, and the pools that it routes.

    Attributes:
        torch: PyTorch, or None if only the native core's settings apply.
        options: Options of the region.
        tag: Tag of the region.
        managed: Whether allocations inside are managed; False in disable().
        stack: The frames of the thread that entered, outermost first.
        ids: The native core's id of the region; empty before its settings are in force.
        later: The frames of the thread that were entered later and stay, once the frame has been left.
        used: The pools that the frame had when it was left, if they are needed for a comparison of memory.
        outer: The innermost frame of this context at the entry.
        over: The frame of another context that was in force at the entry, if any.
        reading: PyTorch's memory at the entry, which is compared with its memory at the exit; None if nothing is compared
            (outside_memory.py).
        inner: The pools of the regions that were left inside this one.
        origin: The frame that this one follows, which is of another thread or has been left; None if it follows none.
        function: The function whose call the frame is for, if it follows one.
        threads: Whether frames follow this one.
        has_threads: Whether a frame has followed this one.
        followers: Number of frames that have followed this one.
        wait_timed_out: Whether a frame that follows this one has waited for others, none of which was left.
        ended: Whether a pause has ended a frame that follows: its thread is outside of it, and leaves it later.
        routing: The routing to the pools, from before it begins until it has ended completely.
        routed: Whether the routing is in force.
        closed: True once the frame has been left.
    """

    later: Sequence[Frame] = ()
    used: Sequence[Pool] = ()
    outer: Frame | None = None
    over: Frame | None = None
    reading: Reading | None = None
    routing: Routing | None = None
    inner: frozenset[Pool] = frozenset()
    origin: Frame | None = None
    function: object = None
    threads = True
    has_threads = False
    followers = 0
    wait_timed_out = False
    ended = False
    routed = False
    closed = False

    def __init__(self, torch: TorchCuda | None, options: RegionOptions, stack: Stack) -> None:
        self.torch = torch
        self.options = options
        self.tag = options.tag
        self.managed = options.managed
        self.stack = stack
        self.ids: list[int] = []
        self.pools: list[Pool] = []

    def __str__(self) -> str:
        return str(self.options)


#: The last frame that this context entered. It may have been left since.
_entered: ContextVar[Frame | None] = ContextVar("torch_memory_saver.region", default=None)


def _own_frame() -> Frame | None:
    """Return the innermost frame that this context has entered and not left."""
    frame = _entered.get()
    while frame is not None and frame.closed:
        frame = frame.outer
    return frame


def innermost_frame(stack: Stack) -> Frame | None:
    """Return the region that the caller is in: the innermost one that this task has entered on this thread, else the one in
    force on the thread.

    Args:
        stack: The frames of this thread, outermost first.
    """
    frame = _own_frame()
    while frame is not None and (frame.closed or frame.stack is not stack):
        frame = frame.outer
    if frame is not None:
        return frame
    return stack[-1] if stack else None


def note_entered(frame: Frame) -> None:
    """Make the innermost frame of its thread that of the context, and warn if it is inside another task's frame. To be
    called after each entry.

    Raises:
        RuntimeWarning: If warnings are errors. The frame stays open.
    """
    frame.outer = _own_frame()
    _entered.set(frame)
    below = frame.stack[-2] if len(frame.stack) > 1 else None
    if below is not None and below is not frame.outer and below.origin is None:
        frame.over = below
        warn(
            f"{frame} is entered while another task is inside {below} on the same thread. Until one of them is left, what "
            f"either allocates is {_belonging(frame)}. Do not await inside a region: put it around the allocations only.",
            frames_up=3,
        )


def note_left(frame: Frame) -> None:
    """Update the frame of the context, and warn if a later frame stays in force. To be called after each exit, on the thread
    of the frame."""
    later = frame.later
    _entered.set(_own_frame())
    if later and all(other.over is not frame for other in later):
        warn(
            f"{frame} is left while {later[-1]}, entered after it on the same thread, stays in force: what was allocated "
            f"since then is {_belonging(later[-1])}. Leave regions in reverse order: do not yield or await inside one.",
            frames_up=3,
        )


def _belonging(frame: Frame) -> str:
    return f"memory of tag {frame.tag!r}" if frame.managed else "not managed"


def warn(message: str, frames_up: int) -> None:
    """Warn about the program's use of regions, at its line: `frames_up` calls above the caller."""
    warnings.warn(message, RuntimeWarning, stacklevel=frames_up + 1)


def choose_frame(frames: Sequence[Frame], stack: Stack) -> Frame:
    """Return the frame to leave next among those that one object has entered: the last of this context, else of this thread,
    whose frames are `stack`, else of all."""
    if len(frames) > 1:
        own = _own_frame()
        while own is not None:
            if own in frames and not own.closed:
                return own
            own = own.outer
        for frame in reversed(frames):
            if frame.stack is stack:
                return frame
    return frames[-1]


class FunctionDecorator(ContextDecorator):
    """A context manager that can decorate functions, except those whose body runs after the call has returned."""

    def __call__(self, function: Callable[..., Any]) -> Any:
        refuse_deferred_body(function)
        return super().__call__(function)


def refuse_deferred_body(function: Callable[..., Any]) -> None:
    """Raise if a function runs its body after the call, because a region around the call would not be around the body.

    Raises:
        TypeError: It is a coroutine function or a generator function.
    """
    kind = deferred_kind(function)
    if kind is not None:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} is {kind}, which cannot be decorated with a region or a capture, nor bound to a region: that would end "
            "before the body runs. Use a with statement in the body, around the allocations, without an await or yield "
            "inside it."
        )
