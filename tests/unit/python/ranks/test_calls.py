"""Guards pause_all and resume_all on the simulated GPU, with this process as rank 0 and a second rank that only votes: what
is undone, with which contents, and what each error says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_regions import core_region
from ranks_store import MemoryStore

from torch_memory_saver import _core, ranks
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.errors import (
    BackupIOError,
    InvalidArgumentError,
    InvalidStateError,
    OutOfMemoryError,
    RanksError,
)
from torch_memory_saver.ranks.vote import Ballot, Clock

SIZE = 8 << 20
PATTERN = bytes(range(256)) * (SIZE // 256)
REASON = "OutOfMemoryError: device 1 has too little\n- a second line"
NONE, HOST, DISK = _core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_DISK
#: Long enough that no test reaches it: the store of the tests ends each wait at once.
TIMEOUT_S = 60.0
#: Seconds in which a call that waits for memory for half of them must also get answers of the store.
SHORT_TIMEOUT_S = 2.0

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

    def agrees(self) -> None:
        """Rank 7 agrees to the next call, before this rank makes it."""
        self.calls += 1
        self.store.add(f"torch_memory_saver/ranks/{self.calls}/agreed", 1)

    def fails_after(self, register: Callable[..., Any], action: Callable[[], object] = lambda: None) -> None:
        """Rank 7 fails after this rank has paused (or resumed, as `register` says). Then the action happens."""

        def fail(call: object) -> None:
            while self._handles:  # the opposite call has no such callback
                self._handles.pop().remove()
            ballot = Ballot(self.store, 7, (0, 7), "irrelevant", Clock(TIMEOUT_S))
            ballot.begin()
            ballot.vote(REASON)
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

    def group_of_ranks(operation: str, group: object) -> tuple[MemoryStore, int, tuple[int, ...]]:
        return made.store, 0, (0, 7)

    monkeypatch.setattr(ranks, "group_of_ranks", group_of_ranks)
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
        ranks.pause_all(*arguments, timeout=TIMEOUT_S, **options)
    assert caught.value.operation == "pause_all"
    return caught.value


def resume_fails(*arguments: Any, timeout: float = TIMEOUT_S) -> RanksError:
    with pytest.raises(RanksError) as caught:
        ranks.resume_all(*arguments, timeout=timeout)
    assert caught.value.operation == "resume_all"
    return caught.value


def test_both_ranks_go_on(world: World, tag: str) -> None:
    address = world.allocate(tag)
    world.agrees()
    report = ranks.pause_all(tag)
    assert (report.allocations, report.bytes, report.copied_bytes) == (1, SIZE, SIZE)
    assert states(address) == ["paused"]
    world.agrees()
    assert ranks.resume_all([tag]).bytes == SIZE
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
        "pause_all failed on rank 7: OutOfMemoryError: device 1 has too little\n"
        f"- This rank, 0, has undone its part: '{tag}'"
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
    assert str(error).endswith(f"\n- This rank, 0, could not undo everything: {problem}.")


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
    error = resume_fails(tag, timeout=SHORT_TIMEOUT_S)
    assert states(address) == ["paused"]
    assert isinstance(error.__cause__, OutOfMemoryError)
    assert error.failures == {0: f"OutOfMemoryError: {error.__cause__}"}
    assert str(error).startswith("resume_all failed on rank 0: OutOfMemoryError: resume: device 0 needs 8.0 MiB and has 0 ")
    assert str(error).endswith("\n- Nothing was changed on this rank, 0.")


def test_what_a_failed_call_of_this_rank_has_moved_is_undone(world: World, tag: str) -> None:
    address = world.allocate(tag)

    def fail(call: object) -> None:
        raise ZeroDivisionError("of an after-callback")

    world.keep(saver.on_pause(None, "after", fail))
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


def test_a_rank_that_does_not_vote_is_named(world: World, tag: str) -> None:
    address = world.allocate(tag)
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert error.failures == {7: "the rank did not make the call within the timeout of 60 seconds"}


def test_a_rank_that_is_too_late_changes_nothing(world: World, tag: str) -> None:
    address = world.allocate(tag)
    ballot = Ballot(world.store, 7, (0, 7), "pause_all", Clock(TIMEOUT_S))
    ballot.begin()
    ballot.vote(None)
    world.simulator.clear_counts()
    error = pause_fails(tag)
    assert (states(address), world.simulator.calls("cuMemUnmap")) == (["active"], 0)
    assert error.failures == {0: "the rank did not make the call within the timeout of 60 seconds"}
    assert "Nothing was changed on this rank" in str(error)


def test_an_interrupted_call_is_undone_on_all_ranks(world: World, tag: str) -> None:
    address = world.allocate(tag)

    def interrupt(call: object) -> None:
        raise KeyboardInterrupt

    world.keep(saver.on_pause(None, "after", interrupt))
    with pytest.raises(KeyboardInterrupt) as caught:
        ranks.pause_all(tag, timeout=TIMEOUT_S)
    assert isinstance(caught.value.__cause__, RanksError)
    assert caught.value.__cause__.failures == {0: "KeyboardInterrupt: "}
    assert states(address) == ["active"]


def test_a_rank_that_loses_the_store_undoes_its_part(world: World, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = world.allocate(tag)

    def fail(key: str, amount: int) -> int:
        raise ConnectionError("Connection reset by peer")

    handle = saver.on_pause(None, "after", lambda call: monkeypatch.setattr(world.store, "add", fail))
    world.keep(handle)
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert (error.failures, error.not_undone) == ({}, ())
    assert "the store of the process group is lost (ConnectionError: Connection reset by peer)" in str(error)
    assert f"has undone its part: '{tag}'" in str(error)
    handle.remove()
    error = pause_fails(tag)
    assert states(address) == ["active"]
    assert "Nothing was changed on this rank" in str(error)


def test_wrong_arguments(world: World, tag: str) -> None:
    for timeout in (0, -1, None, float("inf"), float("nan"), "10", True):
        with pytest.raises(InvalidArgumentError, match="timeout must"):
            ranks.pause_all(tag, timeout=timeout)  # type: ignore[arg-type]
    for tags in (1, "", ["a", ""]):
        error = pause_fails(tags, backup="cloud")
        assert isinstance(error.__cause__, InvalidArgumentError)
    assert set(error.failures) == {0}


def test_there_must_be_a_process_group() -> None:
    with pytest.raises(InvalidStateError, match=r"resume_all needs the process group of torch\.distributed"):
        ranks.resume_all("kv_cache")
