"""Pauses and resumes that all ranks of a process group make, or none.

Each rank makes its own call. Then the ranks vote over the store of the process group (``vote``). If one of them has failed
or does not vote, each of the others makes the opposite call for what it has moved (``moves``), and all of them raise
:class:`~torch_memory_saver.errors.RanksError`.

Importing this package does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch_memory_saver._services import group_of_ranks
from torch_memory_saver.errors import InvalidArgumentError, RanksError
from torch_memory_saver.options import check_timeout
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport

from .moves import Pause, Resume, Undone, first_line
from .vote import Ballot, BoundedCalls, Clock, StoreLost

__all__ = ["pause_all", "resume_all"]

#: The default timeout, in seconds.
TIMEOUT_S = 60.0
#: The part of the timeout for which a rank waits in its own call. The rest is for the others to learn that it has failed.
_PART_FOR_OWN_CALL = 0.5


def pause_all(
    tags: str | Iterable[str] | None = None,
    group: Any = None,
    timeout: float = TIMEOUT_S,
    *,
    backup: Literal["host", "mmap", "disk", "discard"] | None = None,
) -> PauseReport:
    """Pause memory on all ranks, or on none.

    All ranks of the group make this call, in the same order as other calls of this module. If it fails on one rank, the
    others resume what they have paused. Memory that was paused before stays paused.

    Contents that the pause does not keep are lost if it is undone: pass ``backup="host"`` to keep them.

    A callback of a pause or resume must not wait for other ranks, because a rank that fails does not call it. So the hook of
    :func:`torch_memory_saver.nccl.suspend_on_pause` cannot be combined with this function.

    Args:
        tags: One tag or pattern, or an iterable of them, as for :meth:`TorchMemorySaver.pause`. None selects every tag.
        group: Process group of torch.distributed, of any backend. None selects the default group.
        timeout: Seconds until this call raises if another rank does not take part. The opposite call comes after that. For
            half of this time, a rank waits for other threads that are inside a region of the tags.
        backup: Place in which the pause keeps the contents, as for :meth:`TorchMemorySaver.pause`.

    Returns:
        The report of this rank.

    Raises:
        RanksError: A rank has failed, has not taken part in time, or was killed. The message names the rank, its error, and
            what this rank could not undo.
        InvalidStateError: torch.distributed is not initialized.
        InvalidArgumentError: `group` is not a process group of this process, or `timeout` is not a positive number of
            seconds.
    """
    report: PauseReport = _on_all_ranks("pause_all", group, timeout, lambda: Pause(tags, backup))
    return report


def resume_all(tags: str | Iterable[str] | None = None, group: Any = None, timeout: float = TIMEOUT_S) -> ResumeReport:
    """Resume memory on all ranks, or on none.

    All ranks of the group make this call, in the same order as other calls of this module. If it fails on one rank, the
    others pause what they have resumed, with its contents. Memory that was resident before stays resident.

    Args:
        tags: One tag or pattern, or an iterable of them, as for :meth:`TorchMemorySaver.resume`. None selects every tag.
        group: Process group of torch.distributed, of any backend. None selects the default group.
        timeout: Seconds until this call raises if another rank does not take part. The opposite call comes after that. For
            half of this time, a rank waits for memory that other processes hold.

    Returns:
        The report of this rank.

    Raises:
        RanksError, InvalidStateError, InvalidArgumentError: The reasons are those of :func:`pause_all`.
    """
    report: ResumeReport = _on_all_ranks("resume_all", group, timeout, lambda: Resume(tags))
    return report


class _OwnPart:
    """The call of this rank.

    Attributes:
        report: Report of the call, or None if it has failed.
        error: Exception of the call, or None.
    """

    def __init__(self, begin: Callable[[], Pause | Resume], seconds: float) -> None:
        self._begin = begin
        self._seconds = seconds
        self._move: Pause | Resume | None = None
        self.report: Any = None
        self.error: BaseException | None = None

    def perform(self) -> str | None:
        """Make the call, and return the reason for which it has failed, or None."""
        try:
            self._move = self._begin()
            self.report = self._move.perform(self._seconds)
        except BaseException as error:
            self.error = error
            return f"{type(error).__name__}: {error}"
        return None

    def undo(self) -> Undone:
        """Make the opposite call, also for the part that a failed call has moved."""
        return Undone((), ()) if self._move is None else self._move.undo()


def _on_all_ranks(operation: str, group: Any, timeout: float, begin: Callable[[], Pause | Resume]) -> Any:
    clock = Clock(_check_timeout(operation, timeout))
    store, rank, ranks = group_of_ranks(operation, group)
    ballot = Ballot(store, rank, ranks, operation, clock)
    calls = BoundedCalls(clock)
    own = _OwnPart(begin, clock.seconds * _PART_FOR_OWN_CALL)
    failures: dict[int, str] = {}
    lost = ""
    try:
        reason = calls.ask(ballot.begin) or own.perform()
        failures = calls.ask(lambda: ballot.vote(reason))
    except StoreLost as raised:
        lost = str(raised)
    interruption = calls.interruption
    if own.error is not None and not isinstance(own.error, Exception):
        interruption = own.error
    if not failures and not lost:
        if interruption is not None:
            raise interruption
        return own.report
    undone = own.undo()
    error = RanksError(
        _message(operation, rank, failures, lost, own.error, undone),
        operation=operation,
        failures=failures,
        not_undone=undone.problems,
    )
    try:
        if interruption is not None:
            raise interruption from error
        raise error from own.error
    finally:
        # Breaks reference cycles (traceback, frame, variable) that would keep the callers' tensors.
        del error, interruption, own


def _check_timeout(operation: str, timeout: object) -> float:
    seconds = check_timeout(timeout)
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError(f"timeout must be a positive number of seconds, not {timeout!r}", operation=operation)
    return seconds


def _message(
    operation: str, rank: int, failures: dict[int, str], lost: str, own_error: BaseException | None, undone: Undone
) -> str:
    reasons = {failed: reason.partition("\n")[0] for failed, reason in sorted(failures.items())}
    if lost:
        first = (
            f"{operation}: the store of the process group is lost ({lost}), so that the ranks could not decide. The process "
            "that hosts the store has probably ended. Other ranks may have completed the call."
        )
    elif len(reasons) == 1:
        first = "".join(f"{operation} failed on rank {failed}: {reason}" for failed, reason in reasons.items())
    else:
        first = f"{operation} failed on ranks {', '.join(map(str, reasons))}"
    points = [f"rank {failed}: {reason}" for failed, reason in reasons.items()] if len(reasons) > 1 else []
    if own_error is not None and rank not in failures:
        points.append(f"This rank, {rank}, has failed as well: {first_line(own_error)}")
    if undone.tags:
        points.append(f"This rank, {rank}, has undone its part: {', '.join(map(repr, undone.tags))}")
    elif not undone.problems:
        points.append(f"Nothing was changed on this rank, {rank}.")
    points += [f"This rank, {rank}, could not undo everything: {problem}." for problem in undone.problems]
    return "\n- ".join([first, *points])
