"""Guards that ranks.pause looks for room for the backups before the ranks agree: a rank that lacks it fails the call on all
ranks with nothing released. This process is rank 0, on the simulated GPU. The other ranks only vote."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks_store
from core_regions import core_region
from processes import Program
from ranks_store import MemoryStore

from torch_memory_saver import _core, ranks
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._services import GroupOfRanks
from torch_memory_saver.errors import BackupIOError, RanksError
from torch_memory_saver.ranks.vote import Ballot, Clock, Position

SIZE = 8 << 20
PATTERN = bytes(range(256)) * (SIZE // 256)
TAG = "room"
#: Long enough that no test reaches it.
TIMEOUT_S = 60.0
MEMBERS = (0, 7, 8)


class OtherRanks:
    """The ranks 7 and 8, which make the next call of this process together with it, each on a thread.

    Attributes:
        decisions: The failures in the decisions that each rank has learnt.
    """

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.decisions: dict[int, list[dict[int, str]]] = {}
        self._positions = {rank: Position() for rank in MEMBERS[1:]}

    def _call(self, rank: int) -> None:
        clock = Clock(TIMEOUT_S)
        ballot = Ballot(self.store, rank, MEMBERS, "ranks.pause", ["other"], clock, self._positions[rank])
        ballot.join()
        learnt = self.decisions[rank] = [ballot.agree(None).failures]
        if not learnt[0]:
            clock.restart()
            learnt.append(ballot.conclude(None).failures)

    def __enter__(self) -> None:
        self.decisions.clear()
        self._threads = [threading.Thread(target=self._call, args=(rank,)) for rank in self._positions]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *exception: object) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> OtherRanks:
    made = OtherRanks()
    monkeypatch.setattr(ranks, "group_of_ranks", lambda *_: GroupOfRanks(made.store, 0, MEMBERS, "group 3"))
    return made


@pytest.fixture
def address(simulator: Any) -> Iterator[int]:
    """An allocation with contents, whose region has no backup."""
    with core_region(TAG, _core.BACKUP_NONE, True):
        made = _core.allocate(SIZE, 0)
    simulator.write(made, PATTERN)
    yield made
    _core.free(made)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No larger file can be written inside, so that a backup of this size finds no room on the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def pause_fails() -> RanksError:
    with pytest.raises(RanksError) as caught:
        ranks.pause(TAG, timeout=TIMEOUT_S, backup="disk")
    return caught.value


def state(address: int) -> str:
    row = _core.find(address)
    assert row is not None
    return _core.STATE_NAMES[row.state]


def test_a_lack_of_room_on_the_disk_fails_the_call_before_any_rank_does_its_part(
    others: OtherRanks, address: int, simulator: Any
) -> None:
    failed = _core.counters()["failed_pauses_total"]
    simulator.clear_counts()
    with largest_file(SIZE - 1), others:
        error = pause_fails()
    assert isinstance(error.__cause__, BackupIOError)
    assert str(error).startswith("ranks.pause failed on rank 0: BackupIOError: check_pause: ")
    assert "8.0 MiB" in error.failures[0]
    assert "\n- Nothing was changed on this rank, 0.\n" in str(error)
    assert "rank 0 made this call, ranks.pause of 'room', and refused it" in str(error)
    assert others.decisions == {7: [error.failures], 8: [error.failures]}
    assert (state(address), simulator.calls("cuMemUnmap")) == ("active", 0)
    assert _core.counters()["failed_pauses_total"] == failed
    assert simulator.read(address, SIZE) == PATTERN
    with others:
        assert ranks.pause(TAG, timeout=TIMEOUT_S, backup="disk").copied_bytes == SIZE
    assert others.decisions == {7: [{}, {}], 8: [{}, {}]}
    saver.resume(TAG)
    assert simulator.read(address, SIZE) == PATTERN


def test_a_lack_of_host_memory_fails_the_call_before_any_rank_does_its_part(program: Program) -> None:
    text = f"""
sys.path.insert(0, {str(Path(ranks_store.__file__).parent)!r})
from ranks_store import MemoryStore
from torch_memory_saver import ranks
from torch_memory_saver._services import GroupOfRanks
from torch_memory_saver.errors import OutOfHostMemoryError, RanksError
store = MemoryStore()
ranks.group_of_ranks = lambda *_: GroupOfRanks(store, 0, (0, 7), "group 3")
with torch_memory_saver.region("a", backup="host"):
    address = cuda_malloc(200 * MIB)
fill(address, 200 * MIB, 5)
free = free_bytes()
for call in (1, 2):
    store.add(f"torch_memory_saver/ranks/{{call}}/agreement/votes", 1)
    try:
        ranks.pause()
    except RanksError as error:
        assert isinstance(error.__cause__, OutOfHostMemoryError)
        assert "check_pause: the host has too little memory: 200.0 MiB; 128.0 MiB may still be used" in error.failures[0]
        assert "TMS_HOST_MEMORY_LIMIT_MB" in error.failures[0]
        assert "rank 0 made this call, ranks.pause of every tag, and refused it" in str(error)
    else:
        raise AssertionError
assert _core.counters()["failed_pauses_total"] == 0
assert free_bytes() == free
assert read(address, 200 * MIB) == bytes([5]) * 200 * MIB
for decision in ("agreement", "outcome"):
    store.add(f"torch_memory_saver/ranks/3/{{decision}}/votes", 1)
assert ranks.pause(backup="discard").bytes == 200 * MIB
"""
    program(text, TMS_HOST_MEMORY_LIMIT_MB="128")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_callback_before_the_pause_may_make_room(others: OtherRanks, address: int, when: Any) -> None:
    """So the check is left to the pause. An after-callback comes too late for that."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def make_room(call: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    handle = saver.on_pause(TAG, when, make_room)
    try:
        with largest_file(SIZE - 1), others:
            if when == "before":
                ranks.pause(TAG, timeout=TIMEOUT_S, backup="disk")
            else:
                assert "and refused it" in str(pause_fails())
    finally:
        handle.remove()
    assert state(address) == {"before": "paused", "after": "active"}[when]
    saver.resume(TAG)
