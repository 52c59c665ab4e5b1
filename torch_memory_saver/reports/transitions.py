"""The reports that pause and resume return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch_memory_saver import _core
from torch_memory_saver._text import binary_size, duration, joined

__all__ = [
    "PauseReport",
    "ResumeReport",
    "TransitionReport",
    "pause_report",
    "resume_report",
]


@dataclass(frozen=True)
class TransitionReport:
    """The effect that one pause or resume had.

    Attributes:
        allocations: Number of allocations that changed state.
        bytes: Bytes of physical device memory released or mapped.
        copied_bytes: Bytes copied to or from backups. Free blocks of PyTorch's segments are not copied.
        unknown_tags: Number of tags in the call that no allocation ever had.
        seconds: Wall-clock time of the native part of the call.
        bytes_by_tag: The part of ``bytes`` that each tag has, for at most four tags. ``repr`` and ``==`` ignore it.
    """

    #: The printed texts: the verb, and the texts for sizes that only one kind of report has. Sizes of 0 are not printed.
    _verb: ClassVar[str] = "changed"
    _nothing: ClassVar[str] = "nothing"
    _remarks: ClassVar[Mapping[str, str]] = {}

    allocations: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    unknown_tags: int = 0
    seconds: float = 0.0
    bytes_by_tag: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False, kw_only=True)
    #: Text about unknown tags, or about discarded backups, for printing.
    _note: str = field(default="", repr=False, compare=False, kw_only=True)

    def __str__(self) -> str:
        names = sorted(self.bytes_by_tag) + ["others"] * (0 < sum(self.bytes_by_tag.values()) < self.bytes)
        tags = f" of {joined(names)}" if names else ""
        copied = binary_size(self.copied_bytes) if self.copied_bytes else "nothing"
        moved = f"{binary_size(self.bytes)}{tags} in {duration(self.seconds)}, {copied} copied"
        remarks = [f"{binary_size(size)} {what}" for name, what in self._remarks.items() if (size := getattr(self, name))]
        nothing = "nothing" if self._note else self._nothing
        sizes = ", ".join([f"{self._verb} {moved if self.allocations else nothing}", *remarks])
        return f"{sizes}; {self._note}" if self._note else sizes


@dataclass(frozen=True)
class PauseReport(TransitionReport):
    """The effect that one pause had.

    Memory that was already paused is not counted, even if the pause dropped its backup.

    Attributes:
        unchanged_bytes: Bytes that were not copied, because the backup that the last resume retained has them already
            (``host_memory="retain"``). ``copied_bytes`` and ``unchanged_bytes`` together are all that is kept.
        reusable_bytes: Bytes of paused memory that PyTorch could assign to new tensors before the resume, because they are
            free blocks of its default pool and no other pool could replace that pool. The number can differ from 0 only in
            processes that manage everything (``TMS_INIT_ENABLE=1``), if another thread was inside a region, or with a
            PyTorch before 2.11. In these cases, allocate inside ``disable()`` while memory is paused.
        possibly_shared_bytes: Bytes of paused allocations that were sent to other processes and may still be mapped there.
            The memory goes back to the driver when those processes drop their tensors. Whole physical handles are counted,
            which neighbouring allocations may share. The number is an estimate from PyTorch's counters: it is too large
            after an importer was killed, and too small after an importer received the same message twice.
        no_longer_managed_bytes: Bytes of parameters and buffers of modules that ``manage()`` had moved to the tags, and that
            lie in ordinary memory now, because something has replaced their memory. This pause did not release them. The
            first such pause logs their names and the call that moves them back.
    """

    _verb = "paused"
    _nothing = "nothing, because none of this memory was resident"
    _remarks: ClassVar[Mapping[str, str]] = {
        "unchanged_bytes": "unchanged",
        "reusable_bytes": "that new tensors could use before the resume",
        "possibly_shared_bytes": "possibly still mapped by other processes",
        "no_longer_managed_bytes": "of replaced parameters not paused",
    }

    unchanged_bytes: int = 0
    reusable_bytes: int = 0
    possibly_shared_bytes: int = 0
    no_longer_managed_bytes: int = 0


@dataclass(frozen=True)
class ResumeReport(TransitionReport):
    """The effect that one resume had."""

    _verb = "resumed"
    _nothing = "nothing, because none of this memory was paused"


def pause_report(
    done: _core.Report, unknown: str, reusable_bytes: int, possibly_shared_bytes: int, no_longer_managed_bytes: int
) -> PauseReport:
    """Return the report of a native pause.

    The other arguments are the text about unknown tags, and the numbers of PyTorch's default pool, of memory sent to other
    processes, and of modules.
    """
    return PauseReport(
        **_common(done, unknown),
        unchanged_bytes=done.unchanged_bytes,
        reusable_bytes=reusable_bytes,
        possibly_shared_bytes=possibly_shared_bytes,
        no_longer_managed_bytes=no_longer_managed_bytes,
    )


def resume_report(done: _core.Report, unknown: str) -> ResumeReport:
    """Return the report of a native resume, with the text about unknown tags."""
    return ResumeReport(**_common(done, unknown))


def _common(done: _core.Report, unknown: str) -> dict[str, Any]:
    """Return the fields that both reports have, by name."""
    names = [field.name for field in fields(TransitionReport) if field.name != "_note"]
    return {"_note": unknown, **{name: getattr(done, name) for name in names}}
