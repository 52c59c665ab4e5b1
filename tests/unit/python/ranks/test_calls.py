"""Guards ranks.pause and ranks.resume on the simulated GPU, with this process as rank 0 and a second rank that only votes:
what is undone, with which contents, and what each error says."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from core_regions import core_region
from fake_torch import FakeTorch
from ranks_store import EndedClock, MemoryStore
from threads import InsideRegion

from torch_memory_saver import _core, ranks
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._services import GroupOfRanks
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.errors import (
    BackupIOError,
    CaptureInProgressError,
    InvalidArgumentError,
    InvalidStateError,
    OutOfMemoryError,
    RanksError,
)
from torch_memory_saver.ranks import vote
from torch_memory_saver.ranks.vote import Ballot, Clock, Position
from torch_memory_saver.saver import TorchMemorySaver

SIZE = 8 << 20
PATTERN = bytes(range(256)) * (SIZE // 256)
REASON = "OutOfMemoryError: device 1 has too little\n- a second line"
NONE, HOST, DISK = _core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_DISK
#: Long enough that no test reaches it: the clock of the tests ends each wait for rank 7 at once.
TIMEOUT_S = 60.0
PREFIX = "torch_memory_saver/ranks"

_numbers = itertools.count()


class World:
    """A group of two ranks: this process, and rank 7."""

    def __init__(self, simulator: Any) -> None:
        self.simulator = simulator
        self.store = MemoryStore()
        self.calls = 0
        self._handles: list[Any] = []
        self._addresses: list[int] = []

    def allocate(self, tag: str, backup: int = HOST) -> int:
        """An allocation with contents."""
        with core_region(tag, backup, True):
            address = _core.allocate(SIZE, 0)
        self.simulator.write(address, PATTERN)
        self._addresses.append(address)
        return address

    def agrees(self, *decisions: str) -> None:
        """Rank 7 votes for the next call, before this rank makes it."""
        self.calls += 1
        while f"{PREFIX}/{self.calls}/agreement" in self.store.values:
            self.calls += 1
        for decision in decisions or ("agreement", "outcome"):
            self.store.add(f"{PREFIX}/{self.calls}/{decision}/votes", 1)

    def other(self) -> Ballot:
        """The call that rank 7 makes next."""
        return Ballot(self.store, 7, (0, 7), "ranks.pause", ["other"], EndedClock(TIMEOUT_S), Position())

    def fails_after(self, register: Callable[..., Any], action: Callable[[], object] = lambda: None) -> None:
        """Rank 7 fails after this rank has paused (or resumed, as `register` says). Then the action happens."""
        self.agrees("agreement")

        def fail(call: object) -> None:
            while self._handles:  # the opposite call has no such callback
                self._handles.pop().remove()
            ballot = self.other()
            ballot.number = self.calls
            ballot.conclude(REASON)
            action()

        self._handles.append(register(None, "after", fail))

    def keep(self, handle: Any) -> None:
        self._handles.append(handle)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for address in self._addresses:
            _core.free(address)


@pytest.fixture
def world(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(simulator)

    def group_of_ranks(operation: str, group: object) -> GroupOfRanks:
        return GroupOfRanks(made.store, 0, (0, 7), "group 3")

    monkeypatch.setattr(ranks, "group_of_ranks", group_of_ranks)
    monkeypatch.setattr(ranks, "Clock", EndedClock)
    monkeypatch.setattr(vote, "_MIN_ANSWER_S", TIMEOUT_S)  # the store is there, also with a shorter timeout
    yield made
    made.close()


@pytest.fixture
def tag() -> str:
    return f"tag {next(_numbers)}"


def states(*addresses: int) -> list[str]:
    rows = (_core.find(address) for address in addresses)
    return [_core.STATE_NAMES[row.state] for row in rows if row is not None]


def pause_fails(*arguments: Any, **options: Any) -> RanksError:
    with pytest.raises(RanksError) as caught:
        ranks.pause(*arguments, timeout=TIMEOUT_S, **options)
    assert caught.value.operation == "ranks.pause"
    return caught.value


def resume_fails(*arguments: Any, timeout: float = TIMEOUT_S) -> RanksError:
    with pytest.raises(RanksError) as caught:
        ranks.resume(*arguments, timeout=timeout)
    assert caught.value.operation == "ranks.resume"
    return caught.value


def test_both_ranks_go_on(world: World, tag: str) -> None:
    address = world.allocate(tag)
    world.agrees()
    report = ranks.pause(tag)
    assert (report.allocations, report.bytes, report.copied_bytes) == (1, SIZE, SIZE)
    assert states(address) == ["paused"]
    world.agrees()
    assert ranks.resume([tag]).bytes == SIZE
    assert states(address) == ["active"]
    assert world.simulator.read(address, SIZE) == PATTERN


def test_a_pause_is_undone_with_contents(world: World, tag: str) -> None:
    address = world.allocate(tag)
    world.fails_after(saver.on_pause)
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert world.simulator.read(address, SIZE) == PATTERN
    assert error.failures == {7: REASON}
    assert error.not_undone == ()
    assert str(error) == (
        "ranks.pause failed on rank 7: it reported OutOfMemoryError: device 1 has too little\n"
        f"- This rank, 0, has undone its part: '{tag}'\n"
        f"- This was call 1 of the process group 'group 3': rank 0 made this call, ranks.pause of '{tag}', and agreed to "
        "it; rank 7 made no call of this group."
    )


def test_a_resume_is_undone_with_contents(world: World, tag: str) -> None:
    tags = [f"{tag} host", f"{tag} disk", f"{tag} once", f"{tag} lost"]
    addresses = [world.allocate(each, backup) for each, backup in zip(tags, (HOST, DISK, NONE, HOST), strict=True)]
    for each, backup in zip(tags, (None, None, "host", "discard"), strict=True):
        saver.pause(each, backup=backup)  # type: ignore[arg-type]
    counters = _core.counters()
    before = (counters["host_backup_bytes"], counters["disk_backup_bytes"])
    assert before == (2 * SIZE, SIZE)
    world.fails_after(saver.on_resume)
    error = resume_fails(tags)
    assert (states(*addresses), error.not_undone) == (["paused"] * 4, ())
    counters = _core.counters()
    assert (counters["host_backup_bytes"], counters["disk_backup_bytes"]) == before
    saver.resume(tags)
    assert [world.simulator.read(address, SIZE) == PATTERN for address in addresses] == [True, True, True, False]


def test_what_was_in_the_state_before_stays_there(world: World, tag: str) -> None:
    first, second = world.allocate(f"{tag} 1"), world.allocate(f"{tag} 2")
    saver.pause(f"{tag} 1")
    world.fails_after(saver.on_pause)
    error = pause_fails()
    assert states(first, second) == ["paused", "active"]
    assert f"has undone its part: '{tag} 2'" in str(error)
    world.fails_after(saver.on_resume)
    resume_fails()
    assert states(first, second) == ["paused", "active"]
    saver.resume()
    assert world.simulator.read(first, SIZE) == world.simulator.read(second, SIZE) == PATTERN


@pytest.mark.parametrize("paused_before", [True, False])
def test_a_tag_of_which_the_call_moved_a_part_is_named(world: World, tag: str, paused_before: bool) -> None:
    """The opposite call would move the other part as well, which the program may be using."""
    first = world.allocate(tag)
    saver.pause(tag)
    second = world.allocate(tag)
    world.fails_after(saver.on_pause if paused_before else saver.on_resume)
    error = pause_fails(tag) if paused_before else resume_fails(tag)
    state = "paused" if paused_before else "active"
    assert states(first, second) == [state, state]
    stays = "paused" if paused_before else "resident"
    problem = f"the tag '{tag}' stays {stays}, because this call has not moved all of its memory"
    assert error.not_undone == (problem,)
    assert f"\n- This rank, 0, could not undo everything: {problem}.\n" in str(error)


def test_contents_without_a_backup_are_named(world: World, tag: str) -> None:
    address = world.allocate(tag, NONE)
    world.fails_after(saver.on_pause)
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert error.not_undone == (f"the tag '{tag}' is resident without the contents that have no backup",)
    world.simulator.write(address, PATTERN)
    world.fails_after(saver.on_pause)
    assert pause_fails(tag, backup="host").not_undone == ()
    assert world.simulator.read(address, SIZE) == PATTERN


def test_discarded_contents_are_named(world: World, tag: str) -> None:
    first, second = world.allocate(f"{tag} 1"), world.allocate(f"{tag} 2")
    saver.pause(f"{tag} 1")
    world.fails_after(saver.on_pause)
    error = pause_fails([f"{tag} 1", f"{tag} 2"], backup="discard")
    assert states(first, second) == ["paused", "active"]
    assert error.not_undone == (
        f"the tag '{tag} 2' is resident without the contents that have no backup",
        f"backups of the tag '{tag} 1', which was paused before, are discarded",
    )


def test_a_resume_that_finds_no_memory_is_named(world: World, tag: str) -> None:
    address = world.allocate(tag)
    free = world.simulator.device_memory - world.simulator.usage().physical_bytes
    world.fails_after(saver.on_pause, lambda: world.simulator.take_memory(free + SIZE))
    error = pause_fails(tag)
    assert states(address) == ["paused"]
    (problem,) = error.not_undone
    assert problem.startswith(f"the tag '{tag}' stays paused: OutOfMemoryError: resume: device 0 needs 8.0 MiB")
    world.simulator.take_memory(-free - SIZE)
    saver.resume(tag)
    assert world.simulator.read(address, SIZE) == PATTERN


def test_a_pause_that_fails_is_named(world: World, tag: str) -> None:
    address = world.allocate(tag)
    saver.pause(tag)

    def refuse(call: object) -> None:
        raise BackupIOError("no")

    world.fails_after(saver.on_resume, lambda: world.keep(saver.on_pause(None, "before", refuse)))
    assert resume_fails(tag).not_undone == (f"the tag '{tag}' stays resident: BackupIOError: no",)
    assert states(address) == ["active"]


def test_this_rank_is_short_of_memory(world: World, tag: str) -> None:
    address = world.allocate(tag)
    saver.pause(tag)
    free = world.simulator.device_memory - world.simulator.usage().physical_bytes
    world.simulator.take_memory(free)
    world.agrees()
    error = resume_fails(tag, timeout=0.01)
    assert states(address) == ["paused"]
    assert isinstance(error.__cause__, OutOfMemoryError)
    assert error.failures == {0: f"OutOfMemoryError: {error.__cause__}"}
    assert str(error).startswith(
        "ranks.resume failed on rank 0: OutOfMemoryError: resume: device 0 needs 8.0 MiB and has 0 "
    )
    assert "\n- Nothing was changed on this rank, 0.\n" in str(error)


def test_what_a_failed_call_of_this_rank_has_moved_is_undone(world: World, tag: str) -> None:
    address = world.allocate(tag)

    def fail(call: object) -> None:
        raise ZeroDivisionError("of an after-callback")

    world.keep(saver.on_pause(None, "after", fail))
    world.agrees()
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert error.failures == {0: "ZeroDivisionError: of an after-callback"}
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_both_ranks_fail(world: World, tag: str) -> None:
    world.allocate(tag)

    def fail() -> None:
        raise ZeroDivisionError("of an after-callback")

    world.fails_after(saver.on_pause, fail)
    error = pause_fails(tag)
    assert error.failures == {7: REASON}
    assert "\n- This rank, 0, has failed as well: ZeroDivisionError: of an after-callback" in str(error)


def test_nothing_is_paused_before_all_ranks_have_agreed(world: World, tag: str) -> None:
    address = world.allocate(tag, NONE)
    world.simulator.clear_counts()
    error = pause_fails(tag)
    assert (states(address), world.simulator.calls("cuMemUnmap")) == (["active"], 0)
    assert world.simulator.read(address, SIZE) == PATTERN
    assert error.failures == {7: "the rank did not make the call within the timeout of 60 seconds"}
    assert str(error) == (
        "ranks.pause failed on rank 7: the rank did not make the call within the timeout of 60 seconds\n"
        "- Nothing was changed on this rank, 0.\n"
        f"- This was call 1 of the process group 'group 3': rank 0 made this call, ranks.pause of '{tag}', and agreed to "
        "it; rank 7 made no call of this group."
    )


def test_nothing_is_resumed_before_all_ranks_have_agreed(world: World, tag: str) -> None:
    address = world.allocate(tag)
    saver.pause(tag)
    world.simulator.clear_counts()
    error = resume_fails(tag)
    assert (states(address), world.simulator.calls("cuMemCreate")) == (["paused"], 0)
    assert error.failures == {7: "the rank did not make the call within the timeout of 60 seconds"}
    saver.resume(tag)


def test_a_rank_that_does_not_do_its_part_is_named(world: World, tag: str) -> None:
    address = world.allocate(tag)
    world.agrees("agreement")
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert error.failures == {7: "the rank did not make the call within the timeout of 60 seconds"}
    assert f"has undone its part: '{tag}'" in str(error)


def test_a_rank_that_waits_for_a_refused_call_changes_nothing(world: World, tag: str) -> None:
    """Rank 7 refuses before this rank makes the call."""
    address = world.allocate(tag, NONE)
    refusing = world.other()
    assert refusing.join() is None
    world.store.set(f"{PREFIX}/ranks/7", f'[1, "ranks.pause", ["other"], "agreement", "{REASON.splitlines()[0]}"]')
    world.store.add(f"{PREFIX}/1/agreement/refusals", 1)
    world.store.add(f"{PREFIX}/1/agreement/votes", 1)
    world.simulator.clear_counts()
    error = pause_fails(tag)
    assert (states(address), world.simulator.calls("cuMemUnmap")) == (["active"], 0)
    assert error.failures == {7: REASON.splitlines()[0]}
    assert "rank 7 made this call, ranks.pause of 'other', and refused it." in str(error)


def test_the_next_call_works_after_a_failed_one(world: World, tag: str) -> None:
    address = world.allocate(tag)
    pause_fails(tag)
    world.fails_after(saver.on_pause)
    pause_fails(tag)
    world.agrees()
    assert ranks.pause(tag).bytes == SIZE
    assert states(address) == ["paused"]
    world.agrees()
    ranks.resume(tag)


def test_a_thread_in_a_region_is_found_before_the_ranks_agree(
    world: World, tag: str, store: PoolStore, fake_torch: FakeTorch
) -> None:
    address = world.allocate(tag, NONE)
    world.agrees()
    with InsideRegion(TorchMemorySaver(), tag, fake_torch), pytest.raises(RanksError) as caught:
        ranks.pause(tag, timeout=0.01)
    assert isinstance(caught.value.__cause__, InvalidStateError)
    assert f"is still inside region(tag='{tag}')" in caught.value.failures[0]
    assert "and refused it" in str(caught.value)
    assert states(address) == ["active"]
    assert world.simulator.read(address, SIZE) == PATTERN


def test_a_capture_is_found_before_the_ranks_agree(world: World, tag: str) -> None:
    address = world.allocate(tag, NONE)
    identity = _core.capture_begin(None, NONE)
    try:
        world.agrees()
        error = pause_fails(tag)
        assert isinstance(error.__cause__, CaptureInProgressError)
        world.agrees()
        assert isinstance(resume_fails(tag).__cause__, CaptureInProgressError)
    finally:
        _core.capture_end(identity)
    assert states(address) == ["active"]
    assert world.simulator.read(address, SIZE) == PATTERN


def test_a_call_from_a_callback_is_refused(world: World, tag: str) -> None:
    address = world.allocate(tag)
    errors: list[BaseException] = []

    def call_again(call: object) -> None:
        try:
            ranks.resume(tag, timeout=TIMEOUT_S)
        except InvalidStateError as error:
            errors.append(error)

    world.keep(saver.on_pause(tag, "after", call_again))
    world.agrees()
    ranks.pause(tag, timeout=TIMEOUT_S)
    assert [str(error).partition(":")[0] for error in errors] == ["ranks.resume"]
    world.agrees()
    ranks.resume(tag)
    assert states(address) == ["active"]


def test_an_interrupt_before_the_ranks_have_agreed_changes_nothing(
    world: World, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives while this rank waits for rank 7."""
    address = world.allocate(tag, NONE)
    handled = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    class InterruptedClock(Clock):
        def sleep(self) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            super().sleep()

    monkeypatch.setattr(ranks, "Clock", InterruptedClock)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            ranks.pause(tag, timeout=TIMEOUT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(caught.value.__cause__, RanksError)
    assert caught.value.__cause__.failures == {0: "the call was interrupted by KeyboardInterrupt"}
    assert states(address) == ["active"]
    assert world.simulator.read(address, SIZE) == PATTERN
    monkeypatch.setattr(ranks, "Clock", EndedClock)
    world.agrees()
    ranks.pause(tag)
    saver.resume(tag)


@pytest.mark.parametrize("signals", [1, 3])
def test_signals_do_not_end_the_undoing(world: World, tag: str, signals: int) -> None:
    """The other ranks have undone their parts, so this rank goes on, and raises the exception at the end."""
    tags = [f"{tag} {number}" for number in range(3)]
    addresses = [world.allocate(each) for each in tags]
    interrupts = iter([KeyboardInterrupt(number) for number in range(signals)])

    def interrupt(call: object) -> None:
        for exception in interrupts:
            raise exception

    world.fails_after(saver.on_pause, lambda: world.keep(saver.on_resume(None, "before", interrupt)))
    with pytest.raises(KeyboardInterrupt) as caught:
        ranks.pause(tags, timeout=TIMEOUT_S)
    assert caught.value.args == (0,)
    assert states(*addresses) == ["active"] * 3
    error = caught.value.__cause__
    assert isinstance(error, RanksError) and error.not_undone == ()
    assert f"has undone its part: {', '.join(map(repr, tags))}" in str(error)


def test_an_interrupted_call_is_undone_on_all_ranks(world: World, tag: str) -> None:
    address = world.allocate(tag)

    def interrupt(call: object) -> None:
        raise KeyboardInterrupt

    world.keep(saver.on_pause(None, "after", interrupt))
    world.agrees()
    with pytest.raises(KeyboardInterrupt) as caught:
        ranks.pause(tag, timeout=TIMEOUT_S)
    assert isinstance(caught.value.__cause__, RanksError)
    assert caught.value.__cause__.failures == {0: "KeyboardInterrupt: "}
    assert states(address) == ["active"]


def test_a_rank_that_loses_the_store_undoes_its_part(world: World, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = world.allocate(tag)

    def fail(key: str, amount: int) -> int:
        raise ConnectionError("Connection reset by peer")

    handle = saver.on_pause(None, "after", lambda call: monkeypatch.setattr(world.store, "add", fail))
    world.keep(handle)
    world.agrees()
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert (error.failures, error.not_undone) == ({}, ())
    assert "Other ranks may have completed the call." in str(error)
    assert "the store of the process group is lost (ConnectionError: Connection reset by peer)" in str(error)
    assert f"has undone its part: '{tag}'" in str(error)
    handle.remove()
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert "Nothing was changed on this rank" in str(error)


def test_wrong_arguments_are_refused_before_the_call_counts(world: World, tag: str) -> None:
    for timeout in (0, -1, float("inf"), float("nan"), "10", True):
        with pytest.raises(InvalidArgumentError, match="timeout must"):
            ranks.pause(tag, timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgumentError, match=r"not None: pause\(\) and resume\(\) do not wait with None, but ranks.pause"
    ):
        ranks.pause(tag, timeout=None)  # type: ignore[arg-type]
    for tags in (1, ["a", ""]):
        with pytest.raises(InvalidArgumentError, match="tag must"):
            ranks.pause(tags)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="tag must"):
            ranks.resume(tags)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="backup must"):
        ranks.pause(tag, backup="cloud")  # type: ignore[arg-type]
    assert world.store.values == {}


def test_there_must_be_a_process_group() -> None:
    with pytest.raises(InvalidStateError, match=r"ranks.resume needs the process group of torch\.distributed"):
        ranks.resume("kv_cache")
