"""The decisions of the ranks of a process group: they begin a call together, and all keep its result or all undo it.

The ranks use the store of the group, so that a rank that has been killed delays the others only until their timeout, and no
collective call is left half-way.

**Numbers.** The calls of a group have numbers, which are the same on all ranks. A rank that makes a call joins the earliest
call about which the ranks have not decided: it looks from the last call to which it has agreed (:class:`Position`) for the
first one without an agreement. So a rank that has missed calls, or whose call has failed, is in step again with its next
call. A process makes one call of a group at a time, and it agrees to a call at most once. A rank that comes too late and one
that has missed a call look the same: both find a decision against them. If a late rank failed at once, the call after a
missed one would fail as well, because the others would wait in it for that rank. So both join the next call and wait there.

**Two decisions.** The ranks decide twice about a call:

1. The *agreement*: each rank has checked whether it can do its part, and has changed nothing. All ranks begin their parts,
   or none does.
2. The *outcome*: each rank has done its part. All ranks keep it, or all undo it.

A decision is written by the first rank that writes its key (``compare_set``), and every rank obeys what is written there.
The last rank that votes decides: all go on, unless ranks have refused. A rank that refuses the agreement waits for the votes
of the others as well, so that no rank comes too late to learn the reason. A rank that has waited until its deadline, or that
a signal has interrupted, decides against the agreement. A rank whose part has failed decides against the outcome at once,
because all ranks are in the call by then. So a rank that votes too late reads the decision against it.

============================  =========================================================================================
``ranks/RANK``                call that the rank has joined last, see :class:`_Joined` (JSON)
``NUMBER/operation``          operation of the rank that has joined the call first
``NUMBER/DECISION/votes``     number of ranks that have voted about the agreement or the outcome
``NUMBER/agreement/refusals`` number of ranks that have refused
``NUMBER/DECISION``           the decision: the failures by rank, none if all ranks go on, and the calls of the ranks (JSON)
============================  =========================================================================================

When the ranks have agreed to a call, all of them have left the calls before it, whose keys are deleted.

**What the stores of PyTorch guarantee.** ``compare_set`` and ``add`` are atomic in TCPStore, FileStore and HashStore, and
``compare_set`` creates a missing key if the expected value is empty. Waiting for a key is not used: a server of TCPStore
without libuv wakes nobody who waits for a key that ``compare_set`` makes, HashStore wakes nobody after ``add``,
FileStore rounds a timeout up to whole seconds, and a client of TCPStore answers no other thread during its wait. So a rank
asks whether the decision exists (``check``), at first often and later less often. ``get`` waits for a missing key, so it is
called for keys that exist only.

A store that does not answer delays a rank only until its deadline as well (:class:`BoundedCalls`). Ranks that lose the store
cannot learn the decision.
"""

from __future__ import annotations

import _thread
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from torch_memory_saver._services import SingleUseScope
from torch_memory_saver.errors import InvalidStateError

__all__ = ["Ballot", "BoundedCalls", "Clock", "Decision", "OnlyCall", "Position", "Store", "StoreLost"]

_PREFIX = "torch_memory_saver/ranks"
_AGREEMENT, _OUTCOME = "agreement", "outcome"
#: The keys of one call.
_KEYS = ("agreement", "agreement/votes", "agreement/refusals", "outcome", "outcome/votes", "operation")
#: The part of the timeout after which a rank stops to wait for the others. The rest is for writing and reading the decision.
_PART_FOR_WAITING = 0.9
#: The shortest and the longest time that the store has for an answer. Python waits no longer.
_MIN_ANSWER_S, _MAX_ANSWER_S = 1.0, threading.TIMEOUT_MAX / 2
#: The shortest and the longest time between two questions whether a decision exists.
_PERIODS_S = (0.0005, 0.05)
#: The longest wait of the main thread before it looks for signals. One that arrives just before a wait does not end it.
_SIGNAL_PERIOD_S = 0.25
#: The most tags of a call that a message names.
_NAMED_TAGS = 8

_Result = TypeVar("_Result")


class Store(Protocol):
    """The methods of a ``torch.distributed.Store`` that a vote uses."""

    def set(self, key: str, value: str, /) -> None:
        """Set the value of a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that exists."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number of a key, which is 0 at first, and return the sum."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the value of a key if it is the expected one, which is empty for a new key. Return the value."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete a key."""
        ...


class StoreLost(Exception):
    """The store has failed or has not answered in time, so that the decision of the ranks is not known."""


class Position:
    """The place of this process in the calls of one group.

    Attributes:
        number: Number of the last call to which this process has agreed.
        calls: The call that is under way, under the key "now". Empty if there is none.
    """

    def __init__(self) -> None:
        self.number = 0
        self.calls: dict[str, OnlyCall] = {}


#: The positions in the groups of this process, by store. A group that is made anew has a new store.
_positions: weakref.WeakKeyDictionary[Store, Position] = weakref.WeakKeyDictionary()


class OnlyCall(SingleUseScope):
    """A context manager around one call of a group. Its result is the position of this process.

    A dictionary serves as the lock, because it shows which call has it after a signal handler has raised.

    Args:
        operation: Name of the operation.
        store: Store of the group.

    Raises:
        InvalidStateError: A call of the group is under way in this process. Raised at the entry.
    """

    def __init__(self, operation: str, store: Store) -> None:
        self._operation = operation
        self.position = _positions.setdefault(store, Position())

    def _begin(self) -> Position:
        if self.position.calls.setdefault("now", self) is not self:
            raise InvalidStateError(
                f"{self._operation}: this process is already inside a call of the same process group, on another thread or "
                "in a callback or signal handler. Make the calls of a group one after the other",
                operation=self._operation,
            )
        return self.position

    def _end(self) -> None:
        if self.position.calls.get("now") is self:
            self.position.calls.pop("now", None)


class Clock:
    """The timeout of the wait for one decision.

    Attributes:
        seconds: Timeout of the call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Begin the timeout again for the decision that follows."""
        self._began = time.monotonic()

    @property
    def has_ended(self) -> bool:
        """Whether this rank waits no longer for others."""
        return time.monotonic() >= self._began + self.seconds * _PART_FOR_WAITING

    def sleep(self) -> None:
        """Sleep until the store is queried again: an eighth of the wait so far, within limits."""
        shortest, longest = _PERIODS_S
        time.sleep(min(longest, max(shortest, (time.monotonic() - self._began) / 8)))

    def answer(self) -> float:
        """Return the seconds for which this rank may wait for an answer of the store."""
        remaining = max(self.seconds * (1 - _PART_FOR_WAITING), self._began + self.seconds - time.monotonic())
        return min(max(_MIN_ANSWER_S, remaining), _MAX_ANSWER_S)


class Decision(NamedTuple):
    """A decision of the ranks.

    Attributes:
        number: Number of the call.
        failures: Reasons of the failure, by rank; empty if all ranks go on.
        calls: Sentences about the calls of the ranks; empty if all ranks go on.
    """

    number: int
    failures: dict[int, str]
    calls: tuple[str, ...]


class _Joined(NamedTuple):
    """A call that a rank has joined, as the rank publishes it.

    Attributes:
        number: Number of the call.
        operation: Name of the operation.
        tags: Tags of the rank's part, or None for every tag.
        vote: Last decision about which the rank has voted, or "" before its first vote.
        refusal: Reason for which the rank has refused, or "" if it has not.
    """

    number: int
    operation: str
    tags: list[str] | None
    vote: str = ""
    refusal: str = ""

    def __str__(self) -> str:
        if self.tags is None:
            return f"{self.operation} of every tag"
        more = len(self.tags) - _NAMED_TAGS
        names = ", ".join(map(repr, self.tags[:_NAMED_TAGS])) or "no tag"
        return f"{self.operation} of {names}" + (f" and {more} more" if more > 0 else "")


class Ballot:
    """One call of one rank. The methods call the store, which may never answer: see :class:`BoundedCalls`.

    Args:
        store: Store of the group.
        rank: Global rank of this process.
        ranks: Global ranks of the group.
        operation: Name of the operation.
        tags: Tags of this rank's part, or None for every tag.
        clock: Timeout of the call.
        position: Position of this process in the group, see :class:`OnlyCall`.
        interruption: Returns the exception of a signal handler that was raised during this call, or None.

    Attributes:
        number: Number of the call, or 0 before this rank has joined one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: tuple[int, ...],
        operation: str,
        tags: Iterable[str] | None,
        clock: Clock,
        position: Position,
        interruption: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._operation = operation
        self._tags = None if tags is None else list(tags)
        self._clock = clock
        self._position = position
        self._interruption = interruption
        self.number = 0

    def join(self) -> str | None:
        """Join the earliest undecided call.

        Returns:
            Reason for which this rank cannot do its part, or None.
        """
        self.number = self._position.number + 1
        while self._store.check([self._key(_AGREEMENT)]):
            self.number += 1
        operation = self._store.compare_set(self._key("operation"), "", self._operation).decode()
        self._publish()
        if operation != self._operation:
            return f"this rank called {self._operation} while another rank called {operation}"
        return None

    def agree(self, refusal: str | None) -> Decision:
        """Vote about the agreement, wait for the decision and return it.

        Args:
            refusal: Reason for which this rank cannot do its part, or None if it agrees.
        """
        self._position.number = self.number
        self._publish(_AGREEMENT, refusal or "")
        if refusal is not None:
            self._store.add(self._key(f"{_AGREEMENT}/refusals"), 1)
        if self._count(_AGREEMENT, 1):
            return self._end(_AGREEMENT)
        return self._wait(_AGREEMENT)

    def conclude(self, failure: str | None) -> Decision:
        """Vote about the outcome, wait for the decision and return it.

        Args:
            failure: Reason for which the part of this rank has failed, or None.
        """
        if failure is not None:
            return self._decide(_OUTCOME, {self._rank: failure})
        self._publish(_OUTCOME)
        if self._count(_OUTCOME, 1):
            decision = self._end(_OUTCOME)
            self._delete_earlier()
            return decision
        return self._wait(_OUTCOME)

    def abandon(self, failure: str) -> Decision:
        """Decide against the call wherever it stands, unless the ranks have decided, and return the decision that holds."""
        if not self.number:
            return Decision(0, {self._rank: failure}, ())
        decision = self._decide(_AGREEMENT, {self._rank: failure})
        return decision if decision.failures else self._decide(_OUTCOME, {self._rank: failure})

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self.number}/{name}"

    def _publish(self, vote: str = "", refusal: str = "") -> None:
        joined = _Joined(self.number, self._operation, self._tags, vote, refusal)
        self._store.set(f"{_PREFIX}/ranks/{self._rank}", json.dumps(joined))

    def _count(self, name: str, votes: int) -> bool:
        """Add to the votes, and return whether all ranks have voted."""
        return self._store.add(self._key(f"{name}/votes"), votes) == len(self._ranks)

    def _wait(self, name: str) -> Decision:
        while not self._store.check([self._key(name)]):
            if self._clock.has_ended or (name == _AGREEMENT and self._interruption() is not None):
                return self._give_up(name)
            self._clock.sleep()
        return self._decision(self._store.get(self._key(name)))

    def _end(self, name: str) -> Decision:
        """Decide when all ranks have voted."""
        if name == _AGREEMENT and self._store.add(self._key(f"{name}/refusals"), 0):
            return self._decide(name, self._failures(name))
        return self._decide(name, {})

    def _give_up(self, name: str) -> Decision:
        """Decide without the votes of all ranks: at the deadline, or when a signal has interrupted this rank."""
        if self._count(name, 0):  # the last rank was killed before it decided
            return self._end(name)
        interruption = self._interruption()
        if name == _AGREEMENT and interruption is not None:
            return self._decide(name, {self._rank: f"the call was interrupted by {type(interruption).__name__}"})
        # A rank that votes at this moment has published its vote before, so that nothing may be missing.
        lost = f"the rank did not learn the decision within the timeout of {self._clock.seconds:g} seconds"
        return self._decide(name, self._failures(name) or {self._rank: lost})

    def _failures(self, name: str) -> dict[int, str]:
        """Return the reasons of the ranks that have refused or have not voted."""
        timeout = f"within the timeout of {self._clock.seconds:g} seconds"
        failures = {}
        for rank in self._ranks:
            joined = self._joined(rank)
            if joined is None or joined.number != self.number:
                failures[rank] = f"the rank did not make the call {timeout}"
            elif joined.refusal:
                failures[rank] = joined.refusal
            elif joined.vote != name:
                part = "checks" if name == _AGREEMENT else "part of the call"
                failures[rank] = f"the rank did not end its {part} {timeout}"
        return failures

    def _decide(self, name: str, failures: dict[int, str]) -> Decision:
        """Write the decision, unless there is one, and return the one that holds."""
        decision = json.dumps([failures, self._calls() if failures else []])
        return self._decision(self._store.compare_set(self._key(name), "", decision))

    def _decision(self, value: bytes) -> Decision:
        failures, calls = json.loads(value)
        return Decision(self.number, {int(rank): reason for rank, reason in failures.items()}, tuple(calls))

    def _joined(self, rank: int) -> _Joined | None:
        key = f"{_PREFIX}/ranks/{rank}"
        return _Joined(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _calls(self) -> list[str]:
        """Return sentences about the calls that the ranks have joined last."""
        ranks: dict[str, list[int]] = {}
        for rank in self._ranks:
            ranks.setdefault(self._describe(self._joined(rank)), []).append(rank)
        return [f"{_names(those)} {what}" for what, those in ranks.items()]

    def _describe(self, joined: _Joined | None) -> str:
        if joined is None:
            return "made no call of this group"
        if joined.number > self.number:
            return f"went on to call {joined.number}, {joined}"
        if joined.number < self.number:
            return f"did not make this call, after call {joined.number}, {joined}"
        if joined.refusal:
            return f"made this call, {joined}, and refused it"
        ends = {"": "and did not end the checks", _AGREEMENT: "and agreed to it", _OUTCOME: "and did the part of it"}
        return f"made this call, {joined}, {ends[joined.vote]}"

    def _delete_earlier(self) -> None:
        """Delete the keys of the calls before this one, to which all ranks have agreed."""
        number = self.number - 1
        while self._store.check([f"{_PREFIX}/{number}/operation"]):
            for name in _KEYS:
                self._store.delete_key(f"{_PREFIX}/{number}/{name}")
            number -= 1


def _names(ranks: list[int]) -> str:
    """Return the ranks as text, such as "ranks 0-3, 7"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join('-'.join(map(str, part)) for part in parts)}"


class BoundedCalls:
    """Calls of the store that end in time, even if the machine that hosts the store is lost and never answers.

    Each call runs on a thread of its own, which is left behind if the store does not answer. A signal whose handler raises
    does not end a call, because the rank has to know the decision. A ballot that waits for the agreement sees the exception,
    and decides against the call.

    Attributes:
        interruption: The last exception of a signal handler that was raised during a call, or None. The caller raises it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.interruption: BaseException | None = None

    def ask(self, function: Callable[[], _Result]) -> _Result:
        """Call a function that uses the store, and return its result.

        Raises:
            StoreLost: The function has raised, or has not returned in time.
        """
        results: queue.SimpleQueue[tuple[_Result] | Exception] = queue.SimpleQueue()
        first = threading.Lock()

        def run() -> None:
            if not first.acquire(blocking=False):
                return
            try:
                results.put((function(),))
            except Exception as error:
                results.put(error)

        deadline = time.monotonic() + self._clock.answer()
        has_started = False
        while True:
            try:
                if not has_started:
                    # Thread.start() waits for the thread, and a signal can interrupt that. A second thread does nothing.
                    _start_thread(run)
                    has_started = True
                try:
                    result = results.get(timeout=min(_SIGNAL_PERIOD_S, max(0.0, deadline - time.monotonic())))
                    break
                except queue.Empty:
                    if time.monotonic() >= deadline:
                        raise StoreLost("it does not answer") from None
            except StoreLost:
                raise
            except BaseException as raised:
                self.interruption = raised
        if isinstance(result, Exception):
            first_line = next(iter(str(result).splitlines()), "")
            raise StoreLost(f"{type(result).__name__}: {first_line}") from result
        return result[0]


def _start_thread(function: Callable[[], None]) -> None:
    try:
        _thread.start_new_thread(function, ())
    except (RuntimeError, MemoryError) as error:
        raise StoreLost(f"no thread can be started to call it: {error}") from error
