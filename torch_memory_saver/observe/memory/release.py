"""The release of memory that this process only caches: `release_cached()`, its report, and the variable TMS_RELEASE_CACHED.

A process that shares a GPU keeps the memory that PyTorch cached at its highest use, while its neighbours run out of
memory. No process can empty the cache of another process, so the function is called in each of them. With TMS_RELEASE_CACHED
it is called before each pause, or at an interval in seconds, without a change of the program.

Any thread may call. One release runs at a time, under the lock of `CacheReleaser`. A thread that is inside a pause, a resume
or another release does nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._services import (
    DeviceMemory,
    Periodic,
    TorchCuda,
    before_pause,
    capture_gate,
    device_memory,
    devices_in_use,
    layer,
)
from torch_memory_saver._text import binary_size, duration
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.options import check_bytes
from torch_memory_saver.saver import torch_memory_saver as saver

__all__ = [
    "CacheReleaser",
    "DeviceRelease",
    "ReleaseOptions",
    "ReleaseReport",
    "read_seconds",
    "release_cached",
    "releasing_cached",
    "start_releases",
]

logger = logging.getLogger("torch_memory_saver")

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Maximum number of rounds of one call. Other threads may allocate and free as well, so that each round frees something.
_MAX_ROUNDS = 10
_REASONS = {
    "capture": "a stream capture is visible",
    "cool-down": "the last release was less than the cool-down ago",
    "inside": "this thread is inside a pause, a resume or another release",
    "unused": "this process does not use CUDA through PyTorch",
}
_VARIABLE = "TMS_RELEASE_CACHED"
#: Seconds after which a periodic release that a capture has put off is tried again, or the period if that is shorter.
_AGAIN_AFTER_S = 1.0


@dataclass(frozen=True)
class DeviceRelease:
    """The memory that PyTorch holds on one device before and after a release.

    All sizes are in bytes, and of this process only.

    Attributes:
        device: CUDA ordinal.
        reserved_before: PyTorch's ``memory_reserved``: its segments, paused ones included.
        reserved_after: ``memory_reserved`` after the release.
        allocated_before: PyTorch's ``memory_allocated``: its tensors. A garbage collection lowers it.
        allocated_after: ``memory_allocated`` after the release.
        freed_bytes: Physical memory that PyTorch no longer holds. Paused segments are reserved, but hold no physical memory.
            Memory that has become slack (``stats().slack_bytes``) is still held. 0 if other threads allocated more.
        paused_bytes: The part of `reserved_after` that is paused.
    """

    device: int
    reserved_before: int
    reserved_after: int
    allocated_before: int
    allocated_after: int
    freed_bytes: int
    paused_bytes: int = 0

    def __str__(self) -> str:
        kept, used = binary_size(self.reserved_after), binary_size(self.allocated_after)
        paused = f", {binary_size(self.paused_bytes)} of them paused (no device memory)" if self.paused_bytes else ""
        before = binary_size(self.reserved_before)
        return f"{kept} of {before} stay reserved on device {self.device}, {used} of them in tensors{paused}"


@dataclass(frozen=True)
class ReleaseReport:
    """The result of one `release_cached`.

    It concerns this process only: no release reaches the caches of other processes.

    Attributes:
        pid: The id of this process.
        devices: The devices on which this process has a context. Empty if nothing was done.
        rounds: The number of rounds, each of which collects garbage and empties the caches. 0 if nothing was done.
        seconds: Wall-clock time of the call.
        skipped: Reason why nothing was done: "capture" (a capture is visible), "cool-down" (the last release ended too
            recently), "inside" (a finaliser, callback or hook called it on a thread that is inside a pause, resume or
            release) or "unused" (PyTorch does not use CUDA here). None if the release was done.
    """

    pid: int
    devices: tuple[DeviceRelease, ...] = ()
    rounds: int = 0
    seconds: float = 0.0
    skipped: str | None = None

    @property
    def freed_bytes(self) -> int:
        """Physical memory that was given back to the driver, on all devices."""
        return sum(device.freed_bytes for device in self.devices)

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"released nothing: {_REASONS[self.skipped]}"
        freed = f"released {binary_size(self.freed_bytes)} of cached memory in {duration(self.seconds)}"
        return ", ".join([freed, *map(str, self.devices)])


def release_cached(*, repeat_bytes: int | None = None, cool_down: float = 0.0, host: bool = False) -> ReleaseReport:
    """Give all GPU memory that this process caches back, between two phases, so that other processes can use it.

    Inside a region that loads layers call :meth:`TorchMemorySaver.empty_cache` instead, which collects no garbage. The
    function collects garbage, and the memory of tensors that were sent to other processes and dropped there
    (``torch.cuda.ipc_collect``). Then it waits for the devices of this process, and empties the pools of this package and of
    PyTorch, even inside regions. Tensors stay. Only this process is affected, because no process can empty the cache of
    another.

    The function does nothing while a stream capture is visible, because it would break the capture. A capture that PyTorch's
    Python code begins during the release waits. If another thread runs a release, the call waits for its end.

    Args:
        repeat_bytes: Number of bytes that a round must free so that another round follows, up to 10 rounds. None: one round.
            Finalisers of one round may make more memory free for the next.
        cool_down: Nothing is done if the last release of this process, with any arguments, ended less than this many seconds
            ago. A release that did nothing does not count.
        host: Whether to release idle pinned host memory as well: the pool of ``host_memory="pool"``, in the background, and
            PyTorch's own cache of pinned memory (with releases of PyTorch that can).

    Returns:
        The reserved and allocated bytes of each device before and after, and the bytes that were freed; or the reason why
        nothing was done.

    Raises:
        InvalidArgumentError: An argument is not valid.
        InvalidStateError: PyTorch uses an allocator without memory pools (``backend:cudaMallocAsync``).
        RuntimeError: PyTorch cannot wait for a device, because an earlier error has lost it.
    """
    return _releaser.release(ReleaseOptions.check(repeat_bytes, cool_down, host))


class releasing_cached(contextlib.AbstractContextManager["releasing_cached"]):
    """A context manager and a decorator for a phase after which `release_cached` is called, even after an exception.

    Nested ones release once, at the end of the outermost one, with its arguments. Each thread and each task of asyncio nests
    by itself; a task that is created inside one is nested in it. Functions and coroutine functions can be decorated.

    Args:
        repeat_bytes: See `release_cached`.
        cool_down: See `release_cached`.
        host: See `release_cached`.

    Attributes:
        report: The report of the release. It is None before the end, and in a nested context manager.

    Raises:
        InvalidArgumentError: An argument is not valid, or something other than a function is decorated.
    """

    def __init__(self, *, repeat_bytes: int | None = None, cool_down: float = 0.0, host: bool = False) -> None:
        self._options = ReleaseOptions.check(repeat_bytes, cool_down, host)
        self.report: ReleaseReport | None = None

    def __repr__(self) -> str:
        return f"<releasing_cached: {self.report or 'nothing released yet'}>"

    def __enter__(self) -> releasing_cached:
        _depth.set(_depth.get() + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _depth.set(_depth.get() - 1)
        if _depth.get() == 0:
            self.report = _releaser.release(self._options)

    def __call__(self, function: _Function) -> _Function:
        """Return `function` with a release of cached memory at the end of each call.

        Raises:
            InvalidArgumentError: `function` is not a function or a coroutine function.
        """
        return around(function, self._another)

    def _another(self) -> releasing_cached:
        options = self._options
        return releasing_cached(repeat_bytes=options.repeat_bytes, cool_down=options.cool_down, host=options.host)


def start_releases(value: str) -> None:
    """Start the releases that the variable TMS_RELEASE_CACHED requests.

    A value that is neither "pause" nor a number of seconds is reported and ignored.
    """
    if value.lower() == "pause":
        before_pause.add(_VARIABLE, _release)
        return
    seconds = read_seconds(value)
    if seconds is None:
        logger.warning("%s='%s' is ignored (allowed: pause, or a number of seconds above 0)", _VARIABLE, value)
        return
    Periodic("torch_memory_saver: release_cached", seconds, lambda: _release_or_put_off(seconds)).start()


@dataclass(frozen=True)
class ReleaseOptions:
    """The checked options of a release.

    Attributes:
        repeat_bytes: Number of bytes that a round must free so that another round follows. None: one round.
        cool_down: Nothing is done within this many seconds after the last release.
        host: Whether idle pinned host memory is released as well.
    """

    repeat_bytes: int | None = None
    cool_down: float = 0.0
    host: bool = False

    @classmethod
    def check(cls, repeat_bytes: object = None, cool_down: object = 0.0, host: object = False) -> ReleaseOptions:
        """Return the options of a release after checking each value.

        Raises:
            InvalidArgumentError: A value is not valid.
        """
        size = None if repeat_bytes is None else check_bytes("repeat_bytes", repeat_bytes)
        if size == 0:
            raise InvalidArgumentError(
                "repeat_bytes must be at least 1, or None for one round: a release never frees less than 0"
            )
        if isinstance(cool_down, bool) or not isinstance(cool_down, (int, float)) or not 0 <= cool_down < math.inf:
            raise InvalidArgumentError(f"cool_down must be a number of seconds that is not negative, not {cool_down!r}")
        if not isinstance(host, bool):
            raise InvalidArgumentError(f"host must be a bool, not {host!r}")
        return cls(size, float(cool_down), host)


class CacheReleaser:
    """The releases of a process, of which one runs at a time, and the end of the last one.

    Args:
        clock: Returns seconds that never go back. Only differences are used.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held.

        The cool-down begins again.
        """
        self._lock = threading.Lock()
        self._last: float | None = None  # when the last release ended
        self._local = threading.local()

    def release(self, options: ReleaseOptions) -> ReleaseReport:
        """Release cached memory with these options: see `release_cached`."""
        if _core.in_transition() or getattr(self._local, "inside", False):
            return ReleaseReport(os.getpid(), skipped="inside")
        self._local.inside = True
        try:
            with self._lock:
                return self._release(options)
        finally:
            self._local.inside = False

    def _release(self, options: ReleaseOptions) -> ReleaseReport:
        begin = self._clock()
        torch = layer.in_use()
        if torch is None:
            return ReleaseReport(os.getpid(), skipped="unused")
        if self._last is not None and begin - self._last < options.cool_down:
            return ReleaseReport(os.getpid(), skipped="cool-down")
        if capture_visible(torch):
            return ReleaseReport(os.getpid(), skipped="capture")
        before = device_memory(torch, devices_in_use())
        rounds = self._repeat(torch, options)
        if rounds == 0:  # one began during the garbage collection
            return ReleaseReport(os.getpid(), skipped="capture")
        if options.host:
            _release_host_memory(torch)
        after = device_memory(torch, [row.device for row in before])
        self._last = self._clock()
        devices = tuple(_difference(*pair) for pair in zip(before, after, strict=True))
        return ReleaseReport(os.getpid(), devices, rounds, self._last - begin)

    def _repeat(self, torch: TorchCuda, options: ReleaseOptions) -> int:
        """Do rounds while they free enough, and return how many were done.

        A capture that begins during the rounds ends them.
        """
        rounds = 0
        while rounds < _MAX_ROUNDS:
            held = _held_bytes(torch)
            with capture_gate.held():
                if capture_visible(torch):
                    break
                gc.collect()  # may destroy CUDA graphs, which breaks captures as well
                if capture_visible(torch):  # a capture that the program begins by the runtime passes no gate
                    break
                _empty_caches(torch)
            rounds += 1
            if options.repeat_bytes is None or held - _held_bytes(torch) < options.repeat_bytes:
                break
        return rounds


def capture_visible(torch: TorchCuda) -> bool:
    """Return whether a stream capture of this process is active, as far as this package can see."""
    return torch.is_capturing() or bool(_core.counters()["visible_captures"])


def _empty_caches(torch: TorchCuda) -> None:
    """Empty the caches once.

    Memory that other processes have given back and blocks that streams no longer use go to the cache first.
    """
    torch.ipc_collect()
    for device in devices_in_use():
        torch.synchronize(device)
    saver.empty_cache()  # of this package's pools and of PyTorch's, also inside regions
    torch.empty_cache()  # where a program's own hook mode does not


def _release_host_memory(torch: TorchCuda) -> None:
    saver.release_host_memory()
    torch.empty_host_cache()


def _held_bytes(torch: TorchCuda) -> int:
    return sum(row.held for row in device_memory(torch, devices_in_use()))


def _difference(before: DeviceMemory, after: DeviceMemory) -> DeviceRelease:
    return DeviceRelease(
        device=before.device,
        reserved_before=before.reserved,
        reserved_after=after.reserved,
        allocated_before=before.allocated,
        allocated_after=after.allocated,
        freed_bytes=max(0, before.held - after.held),
        paused_bytes=after.paused,
    )


#: Number of `releasing_cached` that this thread or task is inside.
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("releasing_cached", default=0)
#: The releases of this process.
_releaser = CacheReleaser()
os.register_at_fork(after_in_child=_releaser.after_fork_in_child)


def around(function: _Function, manager: Callable[[], contextlib.AbstractContextManager[Any]]) -> _Function:
    """Return `function` with each call inside a new manager.

    The call of a coroutine function ends when it has been awaited.

    Raises:
        InvalidArgumentError: `function` is no function, or its call only makes a generator.
    """
    if not callable(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidArgumentError(f"only functions and coroutine functions can be decorated, not {function!r}")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*arguments: Any, **keywords: Any) -> Any:
            with manager():
                return await function(*arguments, **keywords)

        return awaited  # type: ignore[return-value]

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        with manager():
            return function(*arguments, **keywords)

    return called  # type: ignore[return-value]


def read_seconds(value: str) -> float | None:
    """Return the seconds between two releases, or None if the value is not a number above 0."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


def _release() -> str | None:
    """Release cached memory, and return the reason if nothing was done, else None."""
    report = release_cached()
    logger.log(logging.INFO if report.skipped is None else logging.DEBUG, "%s: %s", _VARIABLE, report)
    return report.skipped


def _release_or_put_off(seconds: float) -> float | None:
    return min(seconds, _AGAIN_AFTER_S) if _release() == "capture" else None
