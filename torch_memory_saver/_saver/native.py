"""The native core's calls with the options of regions, pauses and resumes: only this module turns options into
arguments.

The core takes arguments rather than the object: ``_core.pyi`` declares the name and type of each, which mypy compares with
the options here, and the core's own check names the wrong argument. Neither would work with attributes that C looks up by
name.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_memory_saver import _core
from torch_memory_saver._saver.options import PauseOptions, RegionOptions, ResumeOptions
from torch_memory_saver._torch.layer import TorchCuda
from torch_memory_saver._torch.live import Live
from torch_memory_saver._torch.pools import Tags, may_not_free
from torch_memory_saver._torch.steps import OneUse, record
from torch_memory_saver.pending import on_main_thread

__all__ = [
    "AnnouncedCapture",
    "RegionSettings",
    "begin_resume",
    "count_guard_bytes",
    "enter_region",
    "leave_region",
    "pause",
    "refuse_early",
    "resume",
]


def enter_region(levels: list[int], options: RegionOptions) -> None:
    """Enter a level of settings on this thread, and append its id to `levels`, as one step (steps.py)."""
    record(levels, _core.region_enter, options.tag, options.backup, options.managed, options.host_policy, options.runs)


def leave_region(levels: list[int]) -> None:
    """Leave the levels of this thread that :func:`enter_region` has appended. May be repeated."""
    for level in levels:
        _core.region_leave(level)


class RegionSettings(OneUse):
    """A context manager: inside, the options apply to this thread's allocations that no pool of PyTorch serves."""

    def __init__(self, options: RegionOptions) -> None:
        self._options = options
        self._levels: list[int] = []

    def _begin(self) -> None:
        enter_region(self._levels, self._options)

    def _end(self) -> None:
        leave_region(self._levels)


class AnnouncedCapture(OneUse):
    """A context manager around a capture whose memory is managed: announces it, and its end."""

    def __init__(self, options: RegionOptions) -> None:
        self._options = options
        self._identities: list[int] = []

    def _begin(self) -> None:
        options = self._options
        record(self._identities, _core.capture_begin, options.tag, options.backup, options.host_policy, options.runs)

    def _end(self) -> None:
        for identity in self._identities:
            _core.capture_end(identity)


def refuse_early(
    operation: Callable[[tuple[str, ...], int | None], object], torch: TorchCuda | None, is_forked: bool
) -> None:
    """Raises what a call of ``_core`` would raise at once because of a capture, a lost device, or a fork. `operation`: its
    ``pause`` or ``resume``.

    The core decides, since a capture that is on its list may have ended: it is called with no tag. Only where there is a
    reason to ask, because such a call counts as a pause or resume.
    """
    if is_forked or _core.counters()["visible_captures"] or (torch is not None and may_not_free(torch)):
        operation((), None if torch is None else torch.current_stream())


def pause(
    options: PauseOptions, stream: int | None, find_live: Callable[[], Live | None] | None, preserves: bool
) -> _core.Report:
    """The native pause. `stream`: the caller's current one. `find_live`: called by the core to find the live bytes.
    `preserves`: it may list memory without a backup."""
    return _core.pause(
        options.tags,
        stream,
        interruptible=on_main_thread(),
        backup=options.backup,
        find_live=find_live,
        progress=options.progress,
        preserves=preserves,
    )


def resume(options: ResumeOptions, stream: int | None) -> _core.Report:
    """The native resume."""
    return _core.resume(
        options.tags,
        stream,
        interruptible=on_main_thread(),
        timeout=options.remaining,
        exclusive=options.exclusive,
        host_policy=options.host_policy,
        zero=options.zero,
        progress=options.progress,
    )


def begin_resume(options: ResumeOptions, stream: int | None) -> _core.Pending:
    """The native resume in the background."""
    return _core.resume_begin(
        options.tags,
        stream,
        timeout=options.remaining,
        exclusive=options.exclusive,
        host_policy=options.host_policy,
        zero=options.zero,
    )


def count_guard_bytes(tags: Tags, stream: int | None, ranges: bytes) -> list[int | None]:
    """The native count. `ranges`: begins and ends, as native 64-bit numbers."""
    return _core.count_guard_bytes(tags, stream, ranges, interruptible=on_main_thread())
