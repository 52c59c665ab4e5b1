"""Guards backup="shared": processes with equal contents keep one host copy, a pause copies only what the machine does not
have, and what is damaged, deleted or left by a dead process is noticed. Each process is a replica: programs/replica.py."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_support import MIB
from replicas import OBJECTS, PRIVATE, Replica, holders, objects


@contextlib.contextmanager
def replicas(folder: Path, number: int, seed: int = 1) -> Iterator[list[Replica]]:
    """Replicas with equal weights at different places, active."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(Replica(folder)) for _ in range(number)]
        for index, replica in enumerate(found):
            replica.tell("load", seed, index * 3 * MIB)
        for replica in found:
            assert replica.answer() == "ok"
        yield found


def pause_together(found: list[Replica]) -> list[list[int]]:
    for replica in found:
        replica.tell("pause")
    return [replica.numbers_of(replica.answer(), "pause") for replica in found]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_replicas_keep_one_copy(number: int, folder: Path) -> None:
    with replicas(folder, number) as found:
        padding = [3 * MIB * index for index in range(number)]  # zeros of different lengths are different objects
        reports = pause_together(found)
        total = sum(objects(folder).values())
        assert total == OBJECTS + sum(padding)
        assert sum(copied for copied, _ in reports) == total + number * PRIVATE
        numbers = [replica.ask("numbers") for replica in found]
        assert [held for held, _, _ in numbers] == [OBJECTS + pad for pad in padding]
        assert sum(made for _, made, _ in numbers) == total
        assert holders(folder) == number
        for replica in found:
            replica.do("resume")
            replica.do("check")
        for index, (copied, unchanged) in enumerate(pause_together(found)):
            assert (copied, unchanged) == (PRIVATE, OBJECTS + padding[index])
        for replica in found:
            replica.do("resume")
            replica.do("check")
    assert objects(folder) == {} and holders(folder) == 0


@pytest.mark.parametrize("policy", ["release", "pool", "retain"])
def test_the_second_pause_copies_what_is_private(policy: str, folder: Path) -> None:
    with Replica(folder) as replica:
        replica.do("load", 1)
        assert replica.ask("pause") == [OBJECTS + PRIVATE, 0]
        replica.do("resume", policy)
        assert replica.ask("pause") == [PRIVATE, OBJECTS]
        replica.do("resume", policy)
        replica.do("check")


def test_changed_weights_replace_their_objects(folder: Path) -> None:
    with replicas(folder, 2) as (one, two):
        two.do("release")
        two.do("load", 1)
        pause_together([one, two])
        before = objects(folder)
        assert sum(before.values()) == OBJECTS
        for replica in (one, two):
            replica.do("resume")
        one.do("change", "up", 7)
        assert one.ask("pause") == [6 * MIB + PRIVATE, OBJECTS - 6 * MIB]
        assert sum(objects(folder).values()) == OBJECTS + 6 * MIB
        two.do("change", "up", 7)
        assert two.ask("pause") == [PRIVATE, OBJECTS]
        after = objects(folder)
        assert sum(after.values()) == OBJECTS and len(set(before) - set(after)) == 1
        for replica in (one, two):
            replica.do("resume")
            replica.do("check")


def test_a_damaged_object_is_found_and_everything_stays_paused(folder: Path) -> None:
    with Replica(folder) as replica:
        replica.do("load", 1)
        replica.ask("pause")
        name = next(name for name, size in objects(folder).items() if size == 6 * MIB)
        path = folder / "objects" / name
        os.chmod(path, 0o600)
        with open(path, "r+b") as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 1]))
            file.flush()
            for command in ("resume", "resume_later"):
                message = replica.refuses("BackupIOError", command)
                assert "resume: a backup could not be used: " in message
                assert f"{name}' of the shared store is damaged." in message
            file.seek(0)
            file.write(byte)
        replica.do("resume")
        replica.do("check")


def test_a_deleted_folder_loses_nothing(folder: Path) -> None:
    with Replica(folder) as replica:
        replica.do("load", 1)
        replica.ask("pause")
        shutil.rmtree(folder)
        replica.do("resume")
        replica.do("check")
        assert replica.ask("pause") == [OBJECTS + PRIVATE, 0]
        assert sum(objects(folder).values()) == OBJECTS
        replica.do("resume_later")
        replica.do("check")


def test_the_next_pause_removes_what_a_killed_process_has_left(folder: Path) -> None:
    with Replica(folder) as other, Replica(folder) as replica:
        other.do("load", 2)
        other.ask("pause")
        other.kill()
        assert holders(folder) == 1 and sum(objects(folder).values()) == OBJECTS
        replica.do("load", 1)
        replica.ask("pause")
        assert holders(folder) == 1 and sum(objects(folder).values()) == OBJECTS
        assert replica.ask("numbers")[:2] == [OBJECTS, OBJECTS]
        replica.do("resume")
        replica.do("check")


def test_freed_weights_leave_no_object(folder: Path) -> None:
    with Replica(folder) as replica:
        replica.do("load", 1)
        replica.ask("pause")
        replica.do("resume")
        replica.do("release")
        assert objects(folder) == {}
        assert replica.ask("numbers") == [0, 0, 0]


def test_a_backup_that_is_handed_out_is_a_copy(folder: Path) -> None:
    with Replica(folder) as replica:
        replica.do("load", 1)
        replica.ask("pause")
        for name in ("embedding", "odd", "norm"):
            replica.do("backup", name)
        replica.do("resume")
        replica.do("check")


def test_a_folder_that_is_not_in_memory_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with Replica(place) as replica:
        replica.do("load", 1)
        message = replica.refuses("BackupIOError", "pause")
        assert str(place) in message and "tmpfs" in message
        replica.do("check")
