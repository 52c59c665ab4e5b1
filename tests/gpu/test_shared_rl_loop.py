"""Guards backup="shared" in an RL loop: a trainer and two engines on one GPU keep one host copy of the weights of each step,
which the trainer writes and the engines only link. Each process is a replica: programs/replica.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gpu_programs import subprocess_run
from gpu_support import MIB
from replicas import OBJECTS, PRIVATE, Replica, holders, objects

STEPS = 3
#: The bytes of objects that a step changes: all but the embedding.
CHANGED = OBJECTS - 65 * MIB


@contextlib.contextmanager
def loop(folder: Path) -> Iterator[tuple[Replica, list[Replica]]]:
    """A trainer and two engines that have loaded one checkpoint, active."""
    with Replica(folder) as trainer, Replica(folder) as one, Replica(folder) as two:
        for process in (trainer, one, two):
            process.tell("load", 1)
        for process in (trainer, one, two):
            assert process.answer() == "ok"
        yield trainer, [one, two]


def synchronise(trainer: Replica, engines: list[Replica], file: Path) -> None:
    """Send the weights of the trainer to the engines."""
    trainer.do("send", file)
    for engine in engines:
        engine.do("receive", file)


def pause_in_turn(trainer: Replica, engines: list[Replica], folder: Path, changed: int) -> None:
    """Pause the trainer first, which writes the `changed` bytes. The engines copy nothing that is in objects. The objects
    that the new ones replace stay until the last engine, which holds them, has paused."""
    old = objects(folder) if folder.exists() else {}
    assert trainer.ask("pause") == [changed + PRIVATE, OBJECTS - changed]
    both = objects(folder)
    written = {name: size for name, size in both.items() if name not in old}
    assert sum(written.values()) == changed
    for engine in engines:
        assert objects(folder) == both == old | written
        assert engine.ask("pause") == [PRIVATE, OBJECTS]
    current = objects(folder)
    assert sum(current.values()) == OBJECTS and set(written) <= set(current)
    for process in (trainer, *engines):
        assert process.ask("numbers") == [OBJECTS, OBJECTS if process is trainer else 0, PRIVATE]


def resume_all(trainer: Replica, engines: list[Replica], digest: list[int]) -> None:
    """Resume everyone, and compare their weights with those of the trainer before the pause."""
    for process in (trainer, *engines):
        process.do("resume")
        assert process.ask("digest") == digest


def test_engines_link_what_the_trainer_has_written(folder: Path, tmp_path: Path) -> None:
    with loop(folder) as (trainer, engines):
        digests = [trainer.ask("digest")]
        pause_in_turn(trainer, engines, folder, OBJECTS)
        resume_all(trainer, engines, digests[-1])
        for step in range(STEPS):
            trainer.do("train", 2 + step)
            digests.append(trainer.ask("digest"))
            synchronise(trainer, engines, tmp_path / "weights")
            pause_in_turn(trainer, engines, folder, CHANGED)
            resume_all(trainer, engines, digests[-1])
        pause_in_turn(trainer, engines, folder, 0)
        resume_all(trainer, engines, digests[-1])
        assert len({crc for (crc,) in digests}) == 1 + STEPS
    assert objects(folder) == {} and holders(folder) == 0


def test_killed_engines_leave_no_object(folder: Path, tmp_path: Path) -> None:
    with loop(folder) as (trainer, (one, two)):
        pause_in_turn(trainer, [one, two], folder, OBJECTS)
        two.kill()
        for process in (trainer, one):
            process.do("resume")
        trainer.do("train", 2)
        digest = trainer.ask("digest")
        synchronise(trainer, [one], tmp_path / "weights")
        assert holders(folder) == 3
        pause_in_turn(trainer, [one], folder, CHANGED)  # removes what `two` has left
        assert holders(folder) == 2
        one.kill()
        resume_all(trainer, [], digest)
    left = objects(folder)
    assert sum(left.values()) == OBJECTS and holders(folder) == 1
    done = subprocess_run(["-m", "torch_memory_saver", "store", "--clean", "--dir", str(folder)]).check()
    assert f"removed 1 holder of a dead process, 0 unfinished objects and {len(left)} objects" in done.output
    assert objects(folder) == {} and holders(folder) == 0
