"""Runs random operations for a long time: python tools/soak.py [--seconds N] [--seed S] [--operations N] ...

It runs one episode after another. Each has a World and a seed of its own. If an episode fails, its seed is printed, and
`--seed` with `--operations` repeats the episode. Everything is compared after every `--check-every`-th operation and at the
end of an episode. The last line says how many operations ran in how many seconds.

`make soak` starts it. The driver is the simulated GPU of the installed package, unless the environment names another.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
EPISODE = 2000
PAYLOAD_BYTES = 8 << 20
REPORT_SECONDS = 60


def prepare(directory: Path) -> None:
    """Sets the environment variables that the core reads once. Must run before the core is imported."""
    import importlib.util

    found = importlib.util.find_spec("torch_memory_saver")
    assert found is not None and found.origin is not None, "torch_memory_saver is not installed"
    os.environ.setdefault("TMS_CUDA_DRIVER", str(Path(found.origin).with_name("_simulated_cuda.so")))
    os.environ.setdefault("TMS_SIMULATED_DEVICES", "3")
    os.environ.setdefault("TMS_SIMULATED_MEMORY", "64MiB")
    os.environ.setdefault("TMS_LOG_LEVEL", "silent")
    os.environ["TMS_LOCK_DIR"] = str(directory / "locks")
    os.environ["TMS_DISK_BACKUP_CHUNK_MB"] = "1"
    os.environ["TMS_HOST_POOL_LIMIT_MB"] = "8"
    os.environ["TMS_DISK_BACKUP_DIR"] = str(directory / "default")


class Episode:
    """One World, from its start to its end."""

    def __init__(self, seed: int, directory: Path, machine: object, payload: bytes, check_every: int) -> None:
        from model_choice import RandomChoice
        from model_failures import FAILING
        from model_operations import OPERATIONS
        from model_threads import THREADED
        from model_world import World

        self.seed = seed
        self.choose = RandomChoice(seed)
        self.world = World(machine, directory, payload=payload)  # type: ignore[arg-type]
        self.world.looks = seed % 2 == 0
        self.check_every = check_every
        everything = OPERATIONS | FAILING | THREADED
        self.operations, self.weights = list(everything), list(everything.values())

    def run(self, operations: int) -> int:
        """Runs that many operations. Returns their number."""
        done = 0
        while done < operations:
            operation = self.choose.weighted(self.operations, self.weights)
            self.world.operations += 1
            if not operation(self.world, self.choose):
                continue
            done += 1
            if done % self.check_every == 0:
                self.world.check()
        self.world.check()
        self.world.end()
        return done


def explain(episode: Episode, arguments: argparse.Namespace) -> None:
    traceback.print_exc()
    print(f"the last {len(episode.world.steps)} steps:")
    for step in episode.world.steps:
        print("  ", step)
    command = f"--seed {episode.seed} --operations {arguments.episode} --check-every 1"
    print(f"FAILED with seed {episode.seed}; to repeat it: python {sys.argv[0]} {command}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600, help="how long to run (default 3600)")
    parser.add_argument("--seed", type=int, help="seed of the first episode; the seeds of the others count up from it")
    parser.add_argument("--operations", type=int, help="run one episode of this many operations, however long it takes")
    parser.add_argument("--episode", type=int, default=EPISODE, help=f"operations in each episode (default {EPISODE})")
    parser.add_argument("--check-every", type=int, default=8, help="operations between full comparisons (default 8)")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    faulthandler.enable()
    # A shell ignores SIGINT for its background processes. A pause that is to be interrupted would then wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tms-soak-") as name:
        directory = Path(name)
        prepare(directory)
        sys.path[:0] = [str(TESTS / "model"), str(TESTS / "shared")]
        from model_machine import Machine

        logging.disable(logging.CRITICAL)
        machine = Machine()
        payload = random.Random(0).randbytes(PAYLOAD_BYTES)
        print(f"seed {seed}", flush=True)
        return run(arguments, seed, directory, machine, payload)


def run(arguments: argparse.Namespace, seed: int, directory: Path, machine: object, payload: bytes) -> int:
    from model_world import World

    began = reported = time.monotonic()
    operations = episodes = 0
    while True:
        episode = Episode(seed + episodes, directory, machine, payload, arguments.check_every)
        try:
            operations += episode.run(arguments.operations or arguments.episode)
        except Exception:
            explain(episode, arguments)
            return 1
        episodes += 1
        elapsed = time.monotonic() - began
        if arguments.operations or elapsed >= arguments.seconds:
            break
        if time.monotonic() - reported >= REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{operations} operations, {elapsed:.0f} seconds", flush=True)
    print(
        f"{operations} operations in {episodes} episodes and {elapsed:.0f} seconds ({operations / elapsed:.0f} a second), "
        f"{machine.fired()} injected failures, {World.unchanged >> 20} MiB unchanged in pauses; "  # type: ignore[attr-defined]
        "no byte wrong",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
