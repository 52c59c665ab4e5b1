"""Guards the vote of ranks in any order of their steps: all obey one decision, even if ranks are killed or late."""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks_store import MemoryStore, SteppedRank

from torch_memory_saver.ranks.vote import Ballot, BoundedCalls, Clock, StoreLost

RANKS = (3, 5, 8)  # of a group that is a part of the world
CALLS = 3
OPERATION = "pause_all"
#: Long enough that no test reaches it.
TIMEOUT_S = 1000.0

#: A rank, and the next thing that happens to it.
MOVES = st.tuples(st.integers(0, len(RANKS) - 1), st.sampled_from(["step"] * 12 + ["time out", "kill"]))
#: The ranks and the numbers of the calls that fail there.
FAILURES = st.sets(st.tuples(st.sampled_from(RANKS), st.integers(1, CALLS)), max_size=2)


class Run:
    """The calls of all ranks, and what each rank has learnt.

    Attributes:
        decisions: For each call, the failures that each rank has read.
        agreed: For each call, the ranks that have not failed and have begun to vote.
    """

    def __init__(self, failures: set[tuple[int, int]]) -> None:
        self.store = MemoryStore()
        self.failures = failures
        self.decisions: dict[int, dict[int, dict[int, str]]] = defaultdict(dict)
        self.agreed: dict[int, set[int]] = defaultdict(set)
        self.disturbed = bool(failures)
        self.ranks = [SteppedRank(self.store, lambda steps, rank=rank: self._program(steps, rank)) for rank in RANKS]

    def _program(self, steps: SteppedRank, rank: int) -> None:
        for call in range(1, CALLS + 1):
            ballot = Ballot(steps, rank, RANKS, OPERATION, Clock(TIMEOUT_S))
            reason = ballot.begin()
            if reason is None and (rank, call) in self.failures:
                reason = f"failed in call {call}"
            if reason is None:
                self.agreed[call].add(rank)
            self.decisions[call][rank] = ballot.vote(reason)

    def move(self, index: int, what: str) -> None:
        rank = self.ranks[index]
        if rank.ended or (what == "step" and rank.waits):
            return
        if what == "kill":
            self.disturbed = True
            rank.kill()
        elif what == "step" or rank.waits:
            self.disturbed |= rank.waits
            rank.step()

    def finish(self) -> None:
        """Lets all ranks go on. Ranks that wait reach their timeouts when nothing else happens."""
        while going := [rank for rank in self.ranks if not rank.ended]:
            for rank in [rank for rank in going if not rank.waits] or going[:1]:
                self.disturbed |= rank.waits
                rank.step()


@given(st.lists(MOVES, max_size=120), FAILURES)
def test_every_rank_obeys_the_same_decision(moves: list[tuple[int, str]], failures: set[tuple[int, int]]) -> None:
    run = Run(failures)
    for index, what in moves:
        run.move(index, what)
    run.finish()
    for call, learnt in run.decisions.items():
        decisions = list(learnt.values())
        assert all(each == decisions[0] for each in decisions), run.decisions
        if not decisions[0]:
            assert run.agreed[call] == set(RANKS)
        assert set(decisions[0]) <= set(RANKS)
    if not run.disturbed:
        assert run.decisions == {call: {rank: {} for rank in RANKS} for call in range(1, CALLS + 1)}
        assert not [key for key in run.store.values if f"/{CALLS - 1}/" in key], "keys of old calls stay in the store"


def test_a_rank_that_is_killed_before_it_votes_is_named() -> None:
    run = Run(set())
    run.ranks[1].kill()
    run.finish()
    reason = "the rank did not make the call within the timeout of 1000 seconds"
    assert run.decisions[1] == {3: {5: reason}, 8: {5: reason}}


def test_a_rank_that_is_killed_in_its_own_part_is_named() -> None:
    run = Run(set())
    while 5 not in run.agreed[1]:
        run.ranks[1].step()
    run.ranks[1].kill()
    run.finish()
    reason = "the rank did not end its part of the call within the timeout of 1000 seconds"
    assert run.decisions[1] == {3: {5: reason}, 8: {5: reason}}


def test_a_late_rank_reads_the_decision_against_it() -> None:
    store = MemoryStore()
    early, late = (Ballot(store, rank, RANKS[:2], OPERATION, Clock(TIMEOUT_S)) for rank in RANKS[:2])
    assert early.begin() is late.begin() is None
    decision = early.vote(None)
    assert set(decision) == {5}
    assert late.vote(None) == decision


def test_a_rank_that_calls_after_the_decision_must_not_do_its_part() -> None:
    store = MemoryStore()
    early, late = (Ballot(store, rank, RANKS[:2], OPERATION, Clock(TIMEOUT_S)) for rank in RANKS[:2])
    assert early.begin() is None
    decision = early.vote(None)
    reason = late.begin()
    assert reason == "the other ranks had decided before this rank made the call"
    assert late.vote(reason) == decision


def test_ranks_that_make_different_calls_all_fail() -> None:
    store = MemoryStore()
    pausing = Ballot(store, 0, (0, 1), "pause_all", Clock(TIMEOUT_S))
    resuming = Ballot(store, 1, (0, 1), "resume_all", Clock(TIMEOUT_S))
    assert pausing.begin() is None
    reason = resuming.begin()
    assert reason == "this rank called resume_all while another rank called pause_all"
    assert resuming.vote(reason) == pausing.vote(None) == {1: reason}


def test_the_last_rank_is_killed_between_its_agreement_and_the_decision() -> None:
    run = Run(set())
    for index in (0, 2):
        while not run.ranks[index].waits:
            run.ranks[index].step()
    while run.store.values["torch_memory_saver/ranks/1/agreed"] != b"3":
        run.ranks[1].step()
    run.ranks[1].kill()
    run.finish()
    assert run.decisions[1] == {3: {}, 8: {}}


# -- calls of the store that end in time -------------------------------------------------------------------------------


def test_a_store_that_never_answers_is_lost() -> None:
    never = threading.Event()
    with pytest.raises(StoreLost, match="it does not answer"):
        BoundedCalls(Clock(0.01)).ask(lambda: never.wait(30))  # seconds, so that a failure of this test ends
    never.set()


def test_a_store_that_fails_is_lost() -> None:
    def fail() -> None:
        raise RuntimeError("Connection was likely closed.\nframe #0")

    with pytest.raises(StoreLost, match=r"^RuntimeError: Connection was likely closed\.$"):
        BoundedCalls(Clock(TIMEOUT_S)).ask(fail)


def test_a_signal_does_not_end_the_wait_for_the_decision() -> None:
    handled = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    def decide() -> str:
        # A signal that arrives just before the main thread blocks does not wake it, so the signal is sent again.
        while not handled.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return "decided"

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        calls = BoundedCalls(Clock(TIMEOUT_S))
        assert calls.ask(decide) == "decided"
        assert isinstance(calls.interruption, KeyboardInterrupt)
    finally:
        signal.signal(signal.SIGUSR1, before)
