"""Guards the decisions of ranks in any order of their steps: all obey the same decisions, even if ranks are killed or late.
Their next call finds all of them in step."""

from __future__ import annotations

import _thread
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from types import FrameType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interruptions import every_interruption
from ranks_store import EndedClock, MemoryStore, SteppedClock, SteppedRank

from torch_memory_saver.errors import InvalidStateError
from torch_memory_saver.ranks import vote
from torch_memory_saver.ranks.vote import Ballot, BoundedCalls, Clock, Decision, OnlyCall, Position, StoreLost

RANKS = (3, 5, 8)  # of a group that is a part of the world
CALLS = 3
OPERATION = "ranks.pause"
#: Long enough that no test reaches it.
TIMEOUT_S = 1000.0
#: Long enough as well, and short enough that a failure of a test ends.
LIMIT_S = 60.0
PREFIX = "torch_memory_saver/ranks"

#: A rank, and the next thing that happens to it.
MOVES = st.tuples(st.integers(0, len(RANKS) - 1), st.sampled_from(["step"] * 12 + ["time out", "kill"]))
#: The ranks, the numbers of their calls, and what fails in them.
FAILURES = st.sets(st.tuples(st.sampled_from(RANKS), st.integers(1, CALLS), st.sampled_from(["checks", "part"])), max_size=2)


class Run:
    """The calls of all ranks, and what each rank has learnt. After its calls each rank makes a last one, when all have ended
    theirs.

    Attributes:
        decisions: For each decision of each call, by its number, the failures that each rank has read.
        agreed: For each call, by its number, the ranks that were going to agree.
        begun: For each call, the ranks that have begun their parts.
        done: For each call, the ranks whose parts have not failed.
        last: For each rank, the failures of its last call.
    """

    def __init__(self, failures: set[tuple[int, int, str]]) -> None:
        self.store = MemoryStore()
        self.failures = failures
        self.decisions: dict[tuple[int, str], dict[int, dict[int, str]]] = defaultdict(dict)
        self.agreed: dict[int, set[int]] = defaultdict(set)
        self.begun: dict[int, set[int]] = defaultdict(set)
        self.done: dict[int, set[int]] = defaultdict(set)
        self.last: dict[int, dict[int, str]] = {}
        self.disturbed = bool(failures)
        self.killed = False
        self.ranks = [SteppedRank(self.store, lambda steps, rank=rank: self._program(steps, rank)) for rank in RANKS]

    def _program(self, steps: SteppedRank, rank: int) -> None:
        position = Position()
        for call in range(1, CALLS + 1):
            self._call(steps, rank, position, call)
        steps.meet()
        self.last[rank] = self._call(steps, rank, position, CALLS + 1)

    def _call(self, steps: SteppedRank, rank: int, position: Position, call: int) -> dict[int, str]:
        clock = SteppedClock(steps, TIMEOUT_S)
        ballot = Ballot(steps, rank, RANKS, OPERATION, None, clock, position)
        reason = ballot.join()
        if reason is None and (rank, call, "checks") in self.failures:
            reason = f"cannot make call {call}"
        if reason is None:
            self.agreed[ballot.number].add(rank)
        decision = ballot.agree(reason)
        self.decisions[decision.number, "agreement"][rank] = decision.failures
        if decision.failures:
            return decision.failures
        self.begun[decision.number].add(rank)
        failed = (rank, call, "part") in self.failures
        if not failed:
            self.done[decision.number].add(rank)
        clock.restart()
        decision = ballot.conclude(f"failed in call {call}" if failed else None)
        self.decisions[decision.number, "outcome"][rank] = decision.failures
        return decision.failures

    def move(self, index: int, what: str) -> None:
        rank = self.ranks[index]
        if rank.ended or rank.meets or (what == "step" and rank.waits):
            return
        if what == "kill":
            self.disturbed = self.killed = True
            rank.kill()
        elif what == "step" or rank.waits:
            self.disturbed |= rank.waits
            rank.step()

    def finish(self) -> None:
        """Lets all ranks go on. Ranks that wait reach their timeouts when nothing else happens."""
        while going := [rank for rank in self.ranks if not rank.ended]:
            going = [rank for rank in going if not rank.meets] or going
            for rank in [rank for rank in going if not rank.waits] or going[:1]:
                self.disturbed |= rank.waits
                rank.step()


@given(st.lists(MOVES, max_size=160), FAILURES)
def test_every_rank_obeys_the_same_decisions(moves: list[tuple[int, str]], failures: set[tuple[int, int, str]]) -> None:
    run = Run(failures)
    for index, what in moves:
        run.move(index, what)
    run.finish()
    for (number, name), learnt in run.decisions.items():
        decisions = list(learnt.values())
        assert all(each == decisions[0] for each in decisions), run.decisions
        assert set(decisions[0]) <= set(RANKS)
        if not decisions[0]:
            assert (run.agreed if name == "agreement" else run.done)[number] == set(RANKS)
    for number in run.begun:
        assert run.agreed[number] == set(RANKS), "a rank has begun its part before all have agreed"
    if not run.killed:
        assert run.last == {rank: {} for rank in RANKS}, "the ranks are out of step"
    if not run.disturbed:
        learnt = {number for number, _ in run.decisions}
        assert learnt == set(range(1, CALLS + 2))
        left = [key for key in run.store.values if f"/{CALLS}/" in key]
        assert not left, "keys of earlier calls stay in the store"


def run_until_ended(run: Run) -> None:
    run.finish()
    assert 5 not in run.last


def test_a_rank_that_is_killed_before_it_votes_is_named() -> None:
    run = Run(set())
    run.ranks[1].kill()
    run_until_ended(run)
    reason = "the rank did not make the call within the timeout of 1000 seconds"
    assert run.decisions[1, "agreement"] == {3: {5: reason}, 8: {5: reason}}
    assert not run.begun


def test_a_rank_that_is_killed_in_its_checks_is_named() -> None:
    run = Run(set())
    while f"{PREFIX}/ranks/5" not in run.store.values:
        run.ranks[1].step()
    run.ranks[1].kill()
    run_until_ended(run)
    reason = "the rank did not end its checks within the timeout of 1000 seconds"
    assert run.decisions[1, "agreement"] == {3: {5: reason}, 8: {5: reason}}
    assert not run.begun


def test_a_rank_that_is_killed_in_its_own_part_is_named() -> None:
    run = Run(set())
    while 5 not in run.begun[1]:
        for rank in run.ranks:
            if not rank.waits:
                rank.step()
    run.ranks[1].kill()
    run_until_ended(run)
    reason = "the rank did not end its part of the call within the timeout of 1000 seconds"
    assert run.decisions[1, "outcome"] == {3: {5: reason}, 8: {5: reason}}


@pytest.mark.parametrize("name", ["agreement", "outcome"])
def test_the_last_rank_is_killed_between_its_vote_and_the_decision(name: str) -> None:
    run = Run(set())
    if name == "outcome":
        while len(run.begun[1]) < len(RANKS):
            for rank in run.ranks:
                if not rank.waits:
                    rank.step()
    for index in (0, 2):
        while not run.ranks[index].waits:
            run.ranks[index].step()
    while run.store.values[f"{PREFIX}/1/{name}/votes"] != b"3":
        run.ranks[1].step()
    run.ranks[1].kill()
    run_until_ended(run)
    assert run.decisions[1, name] == {3: {}, 8: {}}


@pytest.mark.parametrize("name", ["agreement", "outcome"])
def test_a_rank_that_is_killed_between_its_vote_and_its_count_does_not_count(name: str) -> None:
    """The others miss no reason and no vote, and yet do not go on without the rank."""
    run = Run(set())
    while name == "outcome" and len(run.begun[1]) < len(RANKS):
        for rank in run.ranks:
            if not rank.waits:
                rank.step()
    while f'"{name}"' not in run.store.values.get(f"{PREFIX}/ranks/5", b"").decode():
        run.ranks[1].step()
    run.ranks[1].kill()
    run_until_ended(run)
    reason = "the rank did not learn the decision within the timeout of 1000 seconds"
    (decision, other) = run.decisions[1, name].values()
    assert decision == other
    assert list(decision.values()) == [reason]


def test_a_slow_rank_reads_the_outcome_after_the_last_one_has_left_the_call() -> None:
    run = Run(set())
    while len(run.begun[1]) < len(RANKS):
        for rank in run.ranks:
            if not rank.waits:
                rank.step()
    for index in (0, 2):
        while not run.ranks[index].waits:
            run.ranks[index].step()
    while f"{PREFIX}/2/operation" not in run.store.values:
        run.ranks[1].step()
    run.finish()
    assert run.decisions[1, "outcome"] == {3: {}, 5: {}, 8: {}}
    assert not run.disturbed


class Rank:
    """A rank of two whose wait ends at once, as if its timeout had passed."""

    def __init__(self, store: MemoryStore, rank: int, tags: list[str] | None = None) -> None:
        self._store, self._rank, self._tags = store, rank, tags
        self.position = Position()

    def call(self, operation: str = OPERATION, clock: Clock | None = None) -> Ballot:
        clock = clock or EndedClock(TIMEOUT_S)
        return Ballot(self._store, self._rank, (0, 1), operation, self._tags, clock, self.position)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def first(store: MemoryStore) -> Rank:
    return Rank(store, 0, ["w"])


@pytest.fixture
def second(store: MemoryStore) -> Rank:
    return Rank(store, 1)


def vote_together(first: Ballot, second: Ballot) -> tuple[Decision, Decision]:
    """Both agree. The first one waits for the second."""
    both: list[Decision] = []
    thread = threading.Thread(target=lambda: both.append(first.agree(None)))
    thread.start()
    both.append(second.agree(None))
    thread.join()
    return both[0], both[1]


def go_on(first: Rank, second: Rank) -> None:
    """Asserts that the next call of both ranks works."""
    ballots = [rank.call(clock=Clock(LIMIT_S)) for rank in (first, second)]
    assert [ballot.join() for ballot in ballots] == [None, None]
    decisions = vote_together(*ballots)
    assert [decision.failures for decision in decisions] == [{}, {}], decisions


def test_the_call_after_a_missed_one_works(first: Rank, second: Rank) -> None:
    for _ in range(2):
        early = first.call()
        assert early.join() is None
        assert set(early.agree(None).failures) == {1}
    go_on(first, second)


def test_the_call_after_a_refused_one_works(first: Rank, second: Rank) -> None:
    refusing, other = first.call(), second.call()
    assert refusing.join() is other.join() is None
    decision = refusing.agree("no room")
    assert decision.failures == {0: "no room", 1: "the rank did not end its checks within the timeout of 1000 seconds"}
    assert other.agree(None) == decision
    go_on(first, second)


def test_a_rank_that_comes_after_a_refusal_learns_the_reason(first: Rank, second: Rank) -> None:
    refusing = first.call(clock=Clock(LIMIT_S))
    assert refusing.join() is None
    decisions: list[Decision] = []
    thread = threading.Thread(target=lambda: decisions.append(refusing.agree("no room")))
    thread.start()
    late = second.call(clock=Clock(LIMIT_S))
    assert late.join() is None
    decisions.append(late.agree(None))
    thread.join()
    assert [decision.failures for decision in decisions] == [{0: "no room"}] * 2


def test_ranks_that_make_different_calls_all_fail_and_are_in_step_again(first: Rank, second: Rank) -> None:
    pausing, resuming = first.call("ranks.pause", Clock(LIMIT_S)), second.call("ranks.resume", Clock(LIMIT_S))
    assert pausing.join() is None
    reason = resuming.join()
    assert reason == "this rank called ranks.resume while another rank called ranks.pause"
    decisions: list[Decision] = []
    thread = threading.Thread(target=lambda: decisions.append(pausing.agree(None)))
    thread.start()
    decisions.append(resuming.agree(reason))
    thread.join()
    assert [decision.failures for decision in decisions] == [{1: reason}] * 2
    go_on(first, second)


def test_a_late_rank_reads_the_decision_against_it(first: Rank, second: Rank) -> None:
    early, late = first.call(), second.call()
    assert early.join() is late.join() is None
    decision = early.agree(None)
    assert set(decision.failures) == {1}
    assert late.agree(None) == decision
    go_on(first, second)


def test_a_rank_that_has_lost_the_store_does_not_vote_twice(
    first: Rank, second: Rank, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(keys: list[str]) -> bool:
        raise ConnectionError

    lost = first.call()
    assert lost.join() is None
    with monkeypatch.context() as patch:
        patch.setattr(store, "check", lose)
        with pytest.raises(ConnectionError):
            lost.agree(None)
    again = first.call()
    assert again.join() is None
    assert set(again.agree(None).failures) == {1}
    waiting = second.call()
    assert waiting.join() is None
    assert waiting.number == 1, "the call that the first rank has left is not decided"
    assert waiting.agree(None).failures == {}, "both have agreed to call 1"
    decision = waiting.conclude(None)
    assert set(decision.failures) == {0}
    assert decision.calls[0] == "rank 0 went on to call 2, ranks.pause of 'w'"
    go_on(first, second)


def test_an_interrupted_rank_decides_against_the_call_at_once(first: Rank, second: Rank, store: MemoryStore) -> None:
    class Sleepless(Clock):
        def sleep(self) -> None:
            raise AssertionError("the rank goes on waiting")

    raised = KeyboardInterrupt()
    waiting = Ballot(store, 0, (0, 1), OPERATION, None, Sleepless(LIMIT_S), first.position, lambda: raised)
    assert waiting.join() is None
    assert waiting.agree(None).failures == {0: "the call was interrupted by KeyboardInterrupt"}
    go_on(first, second)


def test_an_abandoned_call_is_decided_against_wherever_it_stands(first: Rank, second: Rank) -> None:
    assert first.call().abandon("left").failures == {0: "left"}
    joined = first.call()
    assert joined.join() is None
    assert joined.abandon("left").failures == {0: "left"}
    begun, other = first.call(clock=Clock(LIMIT_S)), second.call(clock=Clock(LIMIT_S))
    assert begun.join() is other.join() is None
    vote_together(begun, other)
    assert begun.abandon("left") == other.conclude(None)
    go_on(first, second)


def test_a_failure_names_the_call_of_each_rank(store: MemoryStore) -> None:
    ranks = tuple(range(7))
    tags = {0: None, 1: [f"tag {number}" for number in range(10)], 2: ["a", "b"], 3: ["a", "b"], 5: [], 6: ["c"]}

    def ballot(rank: int, position: Position | None = None, operation: str = OPERATION) -> Ballot:
        return Ballot(store, rank, ranks, operation, tags[rank], EndedClock(TIMEOUT_S), position or Position())

    earlier = Position()
    before = ballot(6, earlier, "ranks.resume")
    before.join()
    before.agree(None)
    ballots = [ballot(rank) for rank in (2, 3, 5, 0, 1)]
    for each in ballots:
        each.join()
    assert {each.number for each in ballots} == {2}
    ballots[0].agree("no room")
    names = ", ".join(repr(f"tag {number}") for number in range(8))
    assert ballots[4].agree(None).calls == (
        "rank 0 made this call, ranks.pause of every tag, and did not end the checks",
        f"rank 1 made this call, ranks.pause of {names} and 2 more, and did not end the checks",
        "rank 2 made this call, ranks.pause of 'a', 'b', and refused it",
        "rank 3 made this call, ranks.pause of 'a', 'b', and did not end the checks",
        "rank 4 made no call of this group",
        "rank 5 made this call, ranks.pause of no tag, and did not end the checks",
        "rank 6 did not make this call, after call 1, ranks.resume of 'c'",
    )
    ahead = ballot(6, earlier)
    ahead.join()
    late = ballot(0, Position())
    late.join()
    assert late.number == ahead.number == 3
    assert late.agree(None).calls[-1] == "rank 6 made this call, ranks.pause of 'c', and did not end the checks"


def test_ranks_with_the_same_call_are_named_together(store: MemoryStore) -> None:
    waiting = Ballot(store, 2, (0, 1, 2, 3, 5), OPERATION, None, EndedClock(TIMEOUT_S), Position())
    waiting.join()
    assert waiting.agree(None).calls == (
        "ranks 0-1, 3, 5 made no call of this group",
        "rank 2 made this call, ranks.pause of every tag, and agreed to it",
    )


def test_a_process_makes_one_call_of_a_group_at_a_time(store: MemoryStore) -> None:
    with OnlyCall(OPERATION, store) as position:
        with pytest.raises(InvalidStateError, match="already inside a call of the same process group"):
            OnlyCall("ranks.resume", store).__enter__()
        with OnlyCall(OPERATION, MemoryStore()) as other:
            assert other is not position
    with OnlyCall(OPERATION, store) as again:
        assert again is position


def test_every_interruption_of_a_call(store: MemoryStore) -> None:
    """The next call of the group is not refused."""

    def call() -> None:
        with OnlyCall(OPERATION, store):
            pass

    for _ in every_interruption(call):
        call()


def test_a_clock_ends_and_begins_again() -> None:
    clock = Clock(0.0)
    assert clock.has_ended
    clock.seconds = TIMEOUT_S
    clock.restart()
    assert not clock.has_ended


def test_a_store_has_a_second_for_an_answer_however_short_the_timeout_is() -> None:
    assert Clock(0.01).answer() == 1.0
    assert Clock(float(10**30)).answer() == threading.TIMEOUT_MAX / 2


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


def test_a_thread_that_cannot_start_is_a_lost_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no signal, after which the call would be made again."""
    starts: list[Callable[..., int]] = [refuse_to_start, _thread.start_new_thread]
    stand_in = SimpleNamespace(start_new_thread=lambda *arguments: starts.pop(0)(*arguments))
    monkeypatch.setattr(vote, "_thread", stand_in)
    calls = BoundedCalls(Clock(TIMEOUT_S))
    with pytest.raises(StoreLost, match="no thread can be started to call it: can't start new thread"):
        calls.ask(lambda: "decided")
    assert calls.interruption is None


def refuse_to_start(*arguments: object) -> int:
    raise RuntimeError("can't start new thread")


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
