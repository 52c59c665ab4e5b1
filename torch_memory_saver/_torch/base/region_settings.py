"""The settings of the native core that apply to this thread's allocations: those of regions, and of announced captures.

Only this module turns the options of a region into arguments of the core. The core takes arguments rather than the object:
``_core.pyi`` declares the name and type of each, which mypy compares with the options here, and the core's own check names
the wrong argument. Neither would work with attributes that C looks up by name.
"""

from __future__ import annotations

import threading

from torch_memory_saver import _core
from torch_memory_saver._torch.base.steps import SingleUseScope
from torch_memory_saver.options import RegionOptions

__all__ = ["AnnouncedCapture", "RegionSettings", "enter_region", "has_announced_capture", "leave_region"]


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The captures that this thread has announced and that have not ended.
        self.announced: set[AnnouncedCapture] = set()


_thread = _Thread()


def enter_region(ids: list[int], options: RegionOptions, follows: bool = False) -> None:
    """Enter a region of the native core on this thread, and append its id to `ids`, as one step (steps.py).

    Args:
        ids: The ids of the regions that were entered.
        options: Options of the region.
        follows: Whether ``_core.region_end_following`` may end it.
    """
    _core.record_each(ids, _core.region_enter, [(*options, follows)])


def leave_region(ids: list[int]) -> None:
    """Leave the regions whose ids :func:`enter_region` has appended, on any thread. May be repeated."""
    for region in ids:
        _core.region_leave(region)


class RegionSettings(SingleUseScope):
    """A context manager inside which the options apply to this thread's allocations that no pool of PyTorch serves."""

    def __init__(self, options: RegionOptions) -> None:
        self._options = options
        self._ids: list[int] = []

    def _begin(self) -> None:
        enter_region(self._ids, self._options)

    def _end(self) -> None:
        leave_region(self._ids)


class AnnouncedCapture(SingleUseScope):
    """A context manager around a capture of the thread that makes the object: announces it, and its end. The options are
    those of its memory, or None if it is not managed."""

    def __init__(self, options: RegionOptions | None) -> None:
        self._options = options
        self._identities: list[int] = []
        self._announced = _thread.announced

    def _begin(self) -> None:
        options = self._options
        arguments: tuple[object, ...] = (None, _core.BACKUP_NONE)
        if options is not None:
            arguments = options.tag, options.backup, options.host_policy, options.runs
        self._announced.add(self)
        _core.record_each(self._identities, _core.capture_begin, [arguments])

    def _end(self) -> None:
        for identity in self._identities:
            _core.capture_end(identity)
        self._announced.discard(self)


def has_announced_capture() -> bool:
    """Return whether this thread has announced a capture that has not ended."""
    return bool(_thread.announced)
