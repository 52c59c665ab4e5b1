"""One rank's part of a pause or resume of all ranks: its checks, the call, and the opposite call that undoes it.

Pauses and resumes select tags. So a tag is undone only if all of its allocations in the new state were moved by this call.
Otherwise the opposite call would also move memory that was in that state before.

A pause that undoes a resume keeps all contents that the resume has restored. It uses the backups of the regions, if all of
these contents had one, and host memory otherwise. Memory that had no contents before the resume gets no backup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._services import SingleUseScope, check_pause, check_resume
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
        interruption: Exception of a signal handler that was raised during the calls, or None. The caller raises it.
    """

    tags: tuple[str, ...]
    problems: tuple[str, ...]
    interruption: BaseException | None


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
            return Undone((), (), None)
        undoing, interruption = _Undoing(self), None
        try:
            _core.within(undoing, lambda: None)
        except BaseException as raised:
            interruption = raised
        try:
            return undoing.result(interruption)
        finally:
            del interruption  # breaks a reference cycle: the traceback has this frame

    def undo_tag(self, tag: str, moved: list[Allocation], now: list[Allocation]) -> tuple[bool, list[str]]:
        """Make the opposite call for a tag. Return whether the tag is in its former state, and the problems.

        Args:
            tag: The tag.
            moved: Allocations of the tag that this call has moved, as they were before.
            now: All allocations before the first opposite call.
        """
        others = sum(row.tag == tag and row.state == self.after for row in now) - len(moved)
        if others:
            return False, [f"the tag {tag!r} stays {self.result}, because this call has not moved all of its memory"]
        try:
            self._undo(tag, moved)
        except Exception as error:
            return False, [f"the tag {tag!r} stays {self.result}: {first_line(error)}"]
        return True, list(self._losses(tag, moved))

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


class _Undoing(SingleUseScope):
    """A context manager whose end makes the opposite call for each tag.

    A signal whose handler raises does not end it, because the other ranks undo their parts: the call is repeated.
    """

    def __init__(self, move: _Move) -> None:
        self._move = move
        self._now: list[Allocation] = []
        self._moved: dict[str, list[Allocation]] | None = None
        self._ended: dict[str, tuple[bool, list[str]]] = {}  # by tag

    def _end(self) -> None:
        if self._moved is None:
            self._now = list(self._move._selected())
            self._moved = self._move._moved(self._now)
        for tag, moved in self._moved.items():
            if tag not in self._ended:
                self._ended[tag] = self._move.undo_tag(tag, moved, self._now)

    def result(self, interruption: BaseException | None) -> Undone:
        """Return the result, with the exception that the end has raised."""
        problems = [problem for _, found in self._ended.values() for problem in found]
        undone = tuple(tag for tag, (is_undone, _) in self._ended.items() if is_undone)
        return Undone(undone, (*problems, *self._move._other_losses(self._now)), interruption)


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
