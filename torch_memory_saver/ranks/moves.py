"""One rank's part of a pause or resume of all ranks: its checks, the call, and the opposite call that undoes it.

Pauses and resumes select tags. So a tag is undone only if all of its allocations in the new state were moved by this call.
Otherwise the opposite call would also move memory that was in that state before.

A pause that undoes a resume keeps all contents that the resume has restored. It uses the backups of the regions, if all of
these contents had one, and host memory otherwise. Memory that had no contents before the resume gets no backup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_memory_saver._services import check_pause, check_resume
from torch_memory_saver.options import PauseOptions, ResumeOptions, choose_pause_backup, select_tags
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport
from torch_memory_saver.reports.usage import Allocation
from torch_memory_saver.saver import torch_memory_saver

__all__ = ["Pause", "Resume", "Undone", "first_line"]


class Undone(NamedTuple):
    """The result of the opposite call.

    Attributes:
        tags: Tags of the memory that is in its former state again.
        problems: Sentences about what could not be undone.
    """

    tags: tuple[str, ...]
    problems: tuple[str, ...]


class _Move:
    """One pause or resume of this process.

    Args:
        tags: Tags or patterns, as for a pause.

    Attributes:
        tags: Names of the tags, or None for every tag.
        is_begun: Whether the call has begun to change memory.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    operation: str
    before: str
    after: str
    #: The description of the state after the call, for messages.
    result: str

    def __init__(self, tags: Any) -> None:
        self.tags = select_tags(tags)
        self.is_begun = False
        self._earlier: dict[int, Allocation] = {}

    def _begin(self) -> None:
        self._earlier = {row.address: row for row in self._selected()}
        self.is_begun = True

    def undo(self) -> Undone:
        """Make the opposite call for each tag that this call has moved. The call itself may have failed."""
        if not self.is_begun:
            return Undone((), ())
        undone, problems = [], []
        now = list(self._selected())
        for tag, moved in self._moved(now).items():
            others = sum(row.tag == tag and row.state == self.after for row in now) - len(moved)
            if others:
                problems.append(f"the tag {tag!r} stays {self.result}, because this call has not moved all of its memory")
                continue
            try:
                self._undo(tag, moved)
            except Exception as error:
                problems.append(f"the tag {tag!r} stays {self.result}: {first_line(error)}")
            else:
                undone.append(tag)
                problems.extend(self._losses(tag, moved))
        return Undone(tuple(undone), (*problems, *self._other_losses(now)))

    def _selected(self) -> Iterable[Allocation]:
        rows = torch_memory_saver.stats().allocations
        return (row for row in rows if self.tags is None or row.tag in self.tags)

    def _moved(self, now: Iterable[Allocation]) -> dict[str, list[Allocation]]:
        """Return the allocations that this call has moved, as they were before, by tag."""
        moved: dict[str, list[Allocation]] = {}
        for row in now:
            earlier = self._earlier.get(row.address)
            if row.state == self.after and earlier is not None and earlier.state == self.before:
                moved.setdefault(row.tag, []).append(earlier)
        return moved

    def _undo(self, tag: str, moved: list[Allocation]) -> None:
        raise NotImplementedError

    def _losses(self, tag: str, moved: list[Allocation]) -> Iterable[str]:
        """Return sentences about lost contents of a tag that is in its former state again."""
        return ()

    def _other_losses(self, now: list[Allocation]) -> Iterable[str]:
        """Return sentences about lost contents of allocations that the call has not moved."""
        return ()


class Pause(_Move):
    """A pause of this process.

    Args:
        tags: Tags or patterns.
        backup: Place in which the pause keeps the contents, as for :meth:`TorchMemorySaver.pause`.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    operation = "ranks.pause"
    before = "active"
    after = "paused"
    result = "paused"

    def __init__(self, tags: Any, backup: Any) -> None:
        super().__init__(tags)
        choose_pause_backup(backup)
        self._backup = backup

    def check(self, seconds: float) -> None:
        """Raise what the call is known to fail with, after waiting at most so many seconds for other threads."""
        check_pause(PauseOptions.check(self.tags, backup=self._backup, timeout=seconds))

    def perform(self, seconds: float) -> PauseReport:
        """Make the call, which waits at most so many seconds for other threads."""
        self._begin()
        return torch_memory_saver.pause(self.tags, backup=self._backup, timeout=seconds)

    def _undo(self, tag: str, moved: list[Allocation]) -> None:
        torch_memory_saver.resume(tag)

    def _losses(self, tag: str, moved: list[Allocation]) -> Iterable[str]:
        if self._backup == "discard" or (self._backup is None and any(row.backup == "none" for row in moved)):
            yield f"the tag {tag!r} is resident without the contents that have no backup"

    def _other_losses(self, now: list[Allocation]) -> Iterable[str]:
        if self._backup != "discard":
            return
        had = {address for address, row in self._earlier.items() if row.state == "paused" and row.backup_bytes}
        for tag in dict.fromkeys(row.tag for row in now if row.address in had and not row.backup_bytes):
            yield f"backups of the tag {tag!r}, which was paused before, are discarded"


class Resume(_Move):
    """A resume of this process."""

    operation = "ranks.resume"
    before = "paused"
    after = "active"
    result = "resident"

    def check(self, seconds: float) -> None:
        """Raise what the call is known to fail with."""
        check_resume(ResumeOptions.check(self.tags))

    def perform(self, seconds: float) -> ResumeReport:
        """Make the call, which waits at most so many seconds for memory that other processes hold."""
        self._begin()
        return torch_memory_saver.resume(self.tags, timeout=seconds)

    def _undo(self, tag: str, moved: list[Allocation]) -> None:
        with_contents = [row for row in moved if row.backup_bytes]
        if not with_contents:
            torch_memory_saver.pause(tag, backup="discard")
        else:
            torch_memory_saver.pause(tag, backup="host" if any(row.backup == "none" for row in with_contents) else None)


def first_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}"
