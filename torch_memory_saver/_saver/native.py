"""The native core's calls for the options of regions, pauses and resumes: the one place where they become arguments.

The core takes arguments rather than the object: ``_core.pyi`` declares each with its name and type, which mypy compares with
the options' here, and the core's own check names the argument that is wrong. Attributes that C looked up by name would be
known to neither.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_memory_saver import _core
from torch_memory_saver._saver.options import PauseOptions, RegionOptions, ResumeOptions
from torch_memory_saver._torch.live import Live
from torch_memory_saver.pending import on_main_thread

__all__ = ["begin_capture", "begin_resume", "enter_region", "pause", "resume"]


def enter_region(options: RegionOptions) -> int:
    """A level of settings on this thread. Returns its id, for ``_core.region_leave``."""
    return _core.region_enter(
        tag=options.tag, backup=options.backup, managed=options.managed, host_policy=options.host_policy
    )


def begin_capture(options: RegionOptions) -> int:
    """A capture is about to begin, whose memory is managed: also what threads outside regions allocate meanwhile. Returns
    its id, for ``_core.capture_end``."""
    return _core.capture_begin(tag=options.tag, backup=options.backup, host_policy=options.host_policy)


def pause(options: PauseOptions, stream: int | None, find_live: Callable[[], Live | None] | None) -> _core.Report:
    """The native pause. `stream`: the caller's current one. `find_live`: what the core asks for the live bytes."""
    return _core.pause(
        options.tags,
        stream,
        interruptible=on_main_thread(),
        backup=options.backup,
        find_live=find_live,
        progress=options.progress,
    )


def resume(options: ResumeOptions, stream: int | None) -> _core.Report:
    """The native resume."""
    return _core.resume(
        options.tags,
        stream,
        interruptible=on_main_thread(),
        timeout=options.timeout,
        exclusive=options.exclusive,
        host_policy=options.host_policy,
        zero=options.zero,
        progress=options.progress,
    )


def begin_resume(options: ResumeOptions, stream: int | None) -> _core.Pending:
    """The native resume that goes on in the background."""
    return _core.resume_begin(
        options.tags,
        stream,
        timeout=options.timeout,
        exclusive=options.exclusive,
        host_policy=options.host_policy,
        zero=options.zero,
    )
