"""What pause and resume return."""

from __future__ import annotations

from dataclasses import dataclass

from torch_memory_saver import _core

__all__ = [
    "PauseReport",
    "ResumeReport",
    "TransitionReport",
    "pause_report",
    "resume_report",
]


@dataclass(frozen=True)
class TransitionReport:
    """What one pause or resume did.

    Attributes:
        allocations: Allocations that changed state.
        bytes: Bytes of physical device memory released or mapped.
        copied_bytes: Bytes copied to or from backups. Free blocks of PyTorch's segments are not copied.
        unknown_tags: Tags in the call that no allocation ever had.
        seconds: Wall-clock time of the native part of the call.
    """

    allocations: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    unknown_tags: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class PauseReport(TransitionReport):
    """What one pause did.

    Memory that was paused already is not counted, even if the pause gave up its backup.

    Attributes:
        reusable_bytes: Bytes of paused memory that PyTorch could assign to new tensors before the resume, because they are
            free blocks of its default pool and no other pool could replace it. Not 0 only in processes that manage
            everything (``TMS_INIT_ENABLE=1``), if another thread was inside a region, or with a PyTorch before 2.11.
            Allocate inside ``disable()`` there while memory is paused.
        unmanaged_bytes: Bytes of PyTorch's default pool that stay on the GPU in spite of ``TMS_INIT_ENABLE=1``, because they
            were allocated while PyTorch's expandable segments, which bypass cudaMalloc, were on.
        possibly_shared_bytes: Bytes of paused allocations that were sent to other processes, which may still have them
            mapped: that memory returns to the driver when they drop their tensors. Whole physical handles are counted, which
            neighbouring allocations may share. An estimate from PyTorch's counters: too large after an importer was killed,
            too small after one received the same message twice.
    """

    reusable_bytes: int = 0
    unmanaged_bytes: int = 0
    possibly_shared_bytes: int = 0


@dataclass(frozen=True)
class ResumeReport(TransitionReport):
    """What one resume did."""


def pause_report(done: _core.Report, reusable_bytes: int, unmanaged_bytes: int, possibly_shared_bytes: int) -> PauseReport:
    """The report of a native pause, with the numbers of PyTorch's default pool and of memory sent to other processes."""
    return PauseReport(
        *done,
        reusable_bytes=reusable_bytes,
        unmanaged_bytes=unmanaged_bytes,
        possibly_shared_bytes=possibly_shared_bytes,
    )


def resume_report(done: _core.Report) -> ResumeReport:
    """The report of a native resume."""
    return ResumeReport(*done)
