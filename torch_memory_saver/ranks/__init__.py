"""Pauses and resumes that all ranks of a process group make, or none.

Each rank first checks that it can do its part, and the ranks agree over the store of the process group (``vote``). Nothing
is paused or resumed before all of them have agreed. Then each rank makes its own call. If one of these fails, each of the
other ranks makes the opposite call for what it has moved (``moves``). If a call fails, all ranks that have made it raise
:class:`~torch_memory_saver.errors.RanksError`.

Importing this package does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from torch_memory_saver import _core
from torch_memory_saver._services import GroupOfRanks, group_of_ranks
from torch_memory_saver.errors import InvalidArgumentError, RanksError
from torch_memory_saver.options import check_timeout
from torch_memory_saver.reports.transitions import PauseReport, ResumeReport

from .moves import Pause, Resume, Undone, first_line
from .vote import Ballot, BoundedCalls, Clock, Decision, OnlyCall, Position, StoreLost

__all__ = ["pause", "resume"]

#: The default timeout, in seconds.
TIMEOUT_S = 60.0
#: The part of the timeout for which a rank waits in its own part. The rest is for the others to learn that it has failed.
_PART_FOR_OWN_CALL = 0.5


def pause(
    tag: str | Iterable[str] | None = None,
    group: Any = None,
    timeout: float = TIMEOUT_S,
    *,
    backup: Literal["host", "mmap", "disk", "shared", "discard"] | None = None,
) -> PauseReport:
    """Pause memory on all ranks, or on none.

    All ranks of the group make this call, in the same order as other calls of this module. The tags may differ between the
    ranks. A call joins the earliest call of the group that is not decided. So after a call that a rank has not made, or that
    was refused or failed, the next one works again. A rank that comes after the others have given up joins the next call as
    well, because it cannot know whether they will make that one. If they do not, it waits for its whole timeout, and its
    error says which call they have made. A rank makes one call of a group at a time.

    Each rank first checks what it can without releasing memory: its arguments, captures, threads inside regions of the tags,
    its devices, and room for the backups: the limits of host memory, and space on the disk. Nothing is paused before all
    ranks have agreed. If one of them cannot pause, is not there in time, or is interrupted, the call fails with nothing
    changed on any rank.

    After that a rank may still fail in its own pause (a callback raises, the process is killed, a backup finds no room). The
    others then resume what they have paused, and memory that was paused before stays paused. Contents that the pause does
    not keep are lost by that: pass ``backup="host"`` to keep them. The check holds no room, so it cannot tell what other
    processes take before the backups are written: also other ranks on the same machine, which check at the same time. It
    looks for no room if an ``on_pause`` callback runs before the pause, because the callback may make room.

    On the main thread a signal whose handler raises (Ctrl-C) ends the call within a second, with nothing changed on any
    rank, while it waits for the other ranks to agree. Once they have agreed, the signal ends the pause of this rank as it
    ends :meth:`TorchMemorySaver.pause`, and the other ranks undo theirs. If this rank has already paused, it waits for the
    outcome, and the exception is raised then: all ranks have paused, or none.

    A callback of a pause or resume must not wait for other ranks, because a rank that fails does not call it. So the hook of
    :func:`torch_memory_saver.nccl.suspend_on_pause` cannot be combined with this function.

    Args:
        tag: One tag or pattern, or an iterable of them, as for :meth:`TorchMemorySaver.pause`. None selects every tag.
        group: Process group of torch.distributed, of any backend. None selects the default group.
        timeout: Seconds for which a rank waits for the others to agree, and again for the others to do their parts after it
            has done its own. For half of this time, a rank waits for other threads that are inside a region of the tags.
        backup: Place in which the pause keeps the contents, as for :meth:`TorchMemorySaver.pause`.

    Returns:
        The report of this rank.

    Raises:
        RanksError: A rank has failed, has not taken part in time, or was killed. The message names the rank, its error, the
            group, the call and the tags of each rank, and what this rank could not undo.
        InvalidStateError: torch.distributed is not initialized, or this process is inside another call of the group.
        InvalidArgumentError: `group` is not a process group of this process, `timeout` is not a positive number of seconds,
            or another argument is invalid for :meth:`TorchMemorySaver.pause`. The call does not count: the other ranks wait
            for one with valid arguments.
    """
    report: PauseReport = _on_all_ranks(group, timeout, Pause(tag, backup))
    return report


def resume(tag: str | Iterable[str] | None = None, group: Any = None, timeout: float = TIMEOUT_S) -> ResumeReport:
    """Resume memory on all ranks, or on none.

    All ranks of the group make this call, as described for :func:`pause`. Nothing is resumed before all ranks have
    agreed. If a rank then fails in its own resume, for example for lack of memory, the others pause what they have resumed,
    with its contents. Memory that was resident before stays resident. Ctrl-C is treated as by :func:`pause`.

    Args:
        tag: One tag or pattern, or an iterable of them, as for :meth:`TorchMemorySaver.resume`. None selects every tag.
        group: Process group of torch.distributed, of any backend. None selects the default group.
        timeout: Seconds for which a rank waits for the others to agree, and again for the others to do their parts after it
            has done its own. For half of this time, a rank waits for memory that other processes hold.

    Returns:
        The report of this rank.

    Raises:
        RanksError, InvalidStateError, InvalidArgumentError: The reasons are those of :func:`pause`.
    """
    report: ResumeReport = _on_all_ranks(group, timeout, Resume(tag))
    return report


class _Call:
    """One call of this rank, with the other ranks of the group.

    Args:
        group: The process group.
        position: Position of this process in the group.
        move: Part of this rank.
        seconds: Timeout of each wait for the other ranks.
    """

    def __init__(self, group: GroupOfRanks, position: Position, move: Pause | Resume, seconds: float) -> None:
        self._group = group
        self._move = move
        self._clock = Clock(seconds)
        calls = self._calls = BoundedCalls(self._clock)
        self._ballot = Ballot(
            group.store,
            group.rank,
            group.ranks,
            move.operation,
            move.tags,
            self._clock,
            position,
            lambda: calls.interruption,
        )
        self._report: Any = None
        self._error: BaseException | None = None
        self._lost = ""

    def make(self) -> Any:
        """Make the call and return the report.

        Raises:
            RanksError: A rank has failed, and the part of this rank is undone.
            BaseException: A signal handler raised it.
        """
        decision = self._decide()
        interruption, error, raised = self._calls.interruption, None, None
        if self._error is not None and not isinstance(self._error, Exception):
            interruption = self._error
        try:
            if decision is None or decision.failures:
                error, raised = self._undo(decision)
                interruption = interruption or raised
                if interruption is None:
                    raise error from self._error
                raise interruption from error
            if interruption is not None:
                raise interruption
            return self._report
        finally:
            # Breaks reference cycles (traceback, frame, variable) that would keep the callers' tensors.
            del error, interruption, raised
            self._error = self._calls.interruption = None

    def _undo(self, decision: Decision | None) -> tuple[RanksError, BaseException | None]:
        """Undo the part of this rank. Return the error of the call, and the exception of a signal handler, if any."""
        undone = self._move.undo()
        error = RanksError(
            self._message(decision, undone),
            operation=self._move.operation,
            failures={} if decision is None else decision.failures,
            not_undone=undone.problems,
        )
        return error, undone.interruption

    def _decide(self) -> Decision | None:
        """Take part in the decisions, and return the last one, or None if the store is lost."""
        try:
            try:
                return self._decide_in_order()
            except StoreLost:
                raise
            except BaseException as raised:  # by a signal handler, between two steps
                self._calls.interruption = raised
                reason = _reason(raised)
                return self._calls.ask(lambda: self._ballot.abandon(reason))
        except StoreLost as raised:
            self._lost = str(raised)
            return None

    def _decide_in_order(self) -> Decision:
        refusal = self._calls.ask(self._ballot.join) or self._check()
        decision = self._calls.ask(lambda: self._ballot.agree(refusal))
        if decision.failures:
            return decision
        failure = self._perform()
        self._clock.restart()
        return self._calls.ask(lambda: self._ballot.conclude(failure))

    def _check(self) -> str | None:
        """Return the reason for which this rank cannot do its part, or None."""
        if self._calls.interruption is not None:
            raise self._calls.interruption
        try:
            self._move.check(self._clock.seconds * _PART_FOR_OWN_CALL)
        except Exception as error:
            self._error = error
            return _reason(error)
        return None

    def _perform(self) -> str | None:
        """Do the part of this rank, and return the reason for which it has failed, or None."""
        try:
            self._report = self._move.perform(self._clock.seconds * _PART_FOR_OWN_CALL)
        except BaseException as error:
            self._error = error
            return _reason(error)
        return None

    def _message(self, decision: Decision | None, undone: Undone) -> str:
        operation, rank = self._move.operation, self._group.rank
        points: list[str] = []
        if decision is None:
            first = (
                f"{operation}: the store of the process group is lost ({self._lost}), so that the ranks could not decide. "
                "The process that hosts the store has probably ended."
            )
            if self._move.is_begun:
                first += " Other ranks may have completed the call."
        else:
            reasons = {failed: _quoted(reason, failed == rank) for failed, reason in sorted(decision.failures.items())}
            if len(reasons) == 1:
                first = "".join(f"{operation} failed on rank {failed}: {reason}" for failed, reason in reasons.items())
            else:
                first = f"{operation} failed on ranks {', '.join(map(str, reasons))}"
                points += [f"rank {failed}: {reason}" for failed, reason in reasons.items()]
        if self._error is not None and (decision is None or rank not in decision.failures):
            points.append(f"This rank, {rank}, has failed as well: {first_line(self._error)}")
        if undone.tags:
            points.append(f"This rank, {rank}, has undone its part: {', '.join(map(repr, undone.tags))}")
        elif not undone.problems:
            points.append(f"Nothing was changed on this rank, {rank}.")
        points += [f"This rank, {rank}, could not undo everything: {problem}." for problem in undone.problems]
        if decision is not None and decision.calls:
            points.append(
                f"This was call {decision.number} of the process group {self._group.name!r}: {'; '.join(decision.calls)}."
            )
        return "\n- ".join([first, *points])


def _on_all_ranks(group: Any, timeout: object, move: Pause | Resume) -> Any:
    seconds = _check_timeout(move.operation, timeout)
    found = group_of_ranks(move.operation, group)
    only_call = OnlyCall(move.operation, found.store)
    return _core.within(only_call, lambda: _Call(found, only_call.position, move, seconds).make())


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _quoted(reason: str, of_this_rank: bool) -> str:
    """Return the first line of a reason. "This process" in the error of another rank means that rank's process."""
    line = reason.partition("\n")[0]
    is_error = line.partition(":")[0].isidentifier()  # and not what the vote says of a rank
    return f"it reported {line}" if is_error and not of_this_rank else line


def _check_timeout(operation: str, timeout: object) -> float:
    if timeout is None:
        raise InvalidArgumentError(
            "timeout must be a positive number of seconds, not None: pause() and resume() do not wait with None, but "
            f"{operation} always waits for the other ranks",
            operation=operation,
        )
    seconds = check_timeout(timeout)
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError(f"timeout must be a positive number of seconds, not {timeout!r}", operation=operation)
    return seconds
