"""The vote of the ranks of a process group: all go on, or all undo what they have done.

The ranks use the store of the group, so that a rank that has been killed delays the others only until their timeout, and no
collective call is left half-way. Each rank counts its calls in the store. The calls with the same number belong together, as
collective calls do. These are the keys:

========================  =============================================================================================
``calls/RANK``            number of calls that the rank has begun
``agreements/RANK``       number of the last call to which the rank has agreed
``NUMBER/operation``      operation of the rank that has begun call NUMBER first
``NUMBER/agreed``         number of ranks that have agreed to call NUMBER
``NUMBER/decision``       decision about call NUMBER: the failures in JSON, by rank; none if all ranks go on
========================  =============================================================================================

The first rank that writes the decision has decided (``compare_set``), and every rank obeys what is written there. The last
rank that agrees decides that all go on. A rank that has failed, or that has waited until the deadline, decides that all
undo. So a rank that agrees too late reads the decision against it, and undoes as well.

When the ranks go on with a call, all of them have read the decision about the call before it, whose keys are deleted.

A store that does not answer delays a rank only until its deadline as well (:class:`BoundedCalls`). Ranks that lose the store
cannot learn the decision.
"""

from __future__ import annotations

import _thread
import json
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

__all__ = ["Ballot", "BoundedCalls", "Clock", "Store", "StoreLost"]

_PREFIX = "torch_memory_saver/ranks"
#: The part of the timeout after which a rank stops to wait for the others. The rest is for writing and reading the decision.
_PART_FOR_WAITING = 0.9
#: The shortest wait that a store is asked for. Stores take a wait of less than a millisecond for one without an end.
_SHORTEST_WAIT_S = 0.01

_Result = TypeVar("_Result")


class Store(Protocol):
    """The methods of a ``torch.distributed.Store`` that a vote uses."""

    def set(self, key: str, value: str, /) -> None:
        """Set the value of a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key."""
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

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys exist. Raises an exception at the timeout."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete a key, and return whether it existed."""
        ...


class StoreLost(Exception):
    """The store has failed or has not answered in time, so that the decision of the ranks is not known."""


class Clock:
    """The timeout of one call.

    Attributes:
        seconds: Timeout of the call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    def wait(self) -> float:
        """Return the seconds for which this rank may still wait for others."""
        return max(_SHORTEST_WAIT_S, self._began + self.seconds * _PART_FOR_WAITING - time.monotonic())

    def answer(self) -> float:
        """Return the seconds for which this rank may wait for an answer of the store.

        A rank whose own part has taken longer than the timeout still has some time to learn the decision.
        """
        return max(self.seconds * (1 - _PART_FOR_WAITING), self._began + self.seconds - time.monotonic())


class Ballot:
    """One call of one rank. The methods call the store, which may never answer: see :class:`BoundedCalls`.

    Args:
        store: Store of the group.
        rank: Global rank of this process.
        ranks: Global ranks of the group.
        operation: Name of the operation.
        clock: Timeout of the call.
    """

    def __init__(self, store: Store, rank: int, ranks: tuple[int, ...], operation: str, clock: Clock) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._operation = operation
        self._clock = clock
        self._number = 0

    def begin(self) -> str | None:
        """Begin the next call of this rank.

        Returns:
            Reason for which the rank must not perform its part, or None.
        """
        self._number = self._store.add(f"{_PREFIX}/calls/{self._rank}", 1)
        operation = self._store.compare_set(self._key("operation"), "", self._operation).decode()
        if self._store.check([self._key("decision")]):
            return "the other ranks had decided before this rank made the call"
        if operation != self._operation:
            return f"this rank called {self._operation} while another rank called {operation}"
        return None

    def vote(self, failure: str | None) -> dict[int, str]:
        """Vote, wait for the decision, and return the failures by rank.

        The dictionary is empty if all ranks go on.

        Args:
            failure: Reason for which this rank has failed, or None if it agrees.
        """
        if failure is not None:
            return self._decide({self._rank: failure})
        if self._store.add(self._key("agreed"), 1) == len(self._ranks):
            return self._go_on()
        self._store.set(f"{_PREFIX}/agreements/{self._rank}", str(self._number))
        try:
            self._store.wait([self._key("decision")], timedelta(seconds=self._clock.wait()))
        except Exception:  # The store has an error of its own for the timeout. If it is lost, its next method raises.
            return self._give_up()
        return _failures(self._store.get(self._key("decision")))

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self._number}/{name}"

    def _decide(self, failures: dict[int, str]) -> dict[int, str]:
        """Write the decision, unless there is one, and return the one that holds."""
        return _failures(self._store.compare_set(self._key("decision"), "", json.dumps(failures)))

    def _go_on(self) -> dict[int, str]:
        failures = self._decide({})
        if not failures and self._number > 1:
            for name in ("operation", "agreed", "decision"):
                self._store.delete_key(f"{_PREFIX}/{self._number - 1}/{name}")
        return failures

    def _give_up(self) -> dict[int, str]:
        """Decide at the deadline: against the ranks that are missing."""
        if self._store.add(self._key("agreed"), 0) == len(self._ranks):  # the last rank was killed before it could decide
            return self._decide({})
        missing = {}
        for rank in self._ranks:
            if rank == self._rank or self._store.add(f"{_PREFIX}/agreements/{rank}", 0) >= self._number:
                continue
            has_begun = self._store.add(f"{_PREFIX}/calls/{rank}", 0) >= self._number
            what = "did not end its part of the call" if has_begun else "did not make the call"
            missing[rank] = f"the rank {what} within the timeout of {self._clock.seconds:g} seconds"
        # A rank that agrees at this moment may be missing from both lists.
        return self._decide(missing or {self._rank: "the rank did not learn the decision within the timeout"})


def _failures(decision: bytes) -> dict[int, str]:
    return {int(rank): reason for rank, reason in json.loads(decision).items()}


class BoundedCalls:
    """Calls of the store that end in time, even if the machine that hosts the store is lost and never answers.

    Each call runs on a thread of its own, which is left behind if the store does not answer. A signal whose handler raises
    does not end a call, because the rank has to know the decision.

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
                    _thread.start_new_thread(run, ())
                    has_started = True
                result = results.get(timeout=max(0.0, deadline - time.monotonic()))
                break
            except queue.Empty:
                raise StoreLost("it does not answer") from None
            except BaseException as raised:
                self.interruption = raised
        if isinstance(result, Exception):
            first_line = next(iter(str(result).splitlines()), "")
            raise StoreLost(f"{type(result).__name__}: {first_line}") from result
        return result[0]
