"""A trainer and an inference engine as two processes on one GPU, in turn, by four strategies.

The trainer knows nothing of torch_memory_saver. Its weights (15.4 GB, those of a 7B model) go to the engine over CUDA
IPC, a bucket at a time. The engine's weights, KV cache and CUDA graph are managed, each under a tag. A sharding
manager, as verl has one, stands between: entering it brings the engine up with the trainer's new weights, leaving it
makes room for training. The engine answers by replaying a decode graph that it captured once, and each answer is
checked against the trainer's own.

  v0 keep everything     both keep all they have: no switch, and a peak that is the sum of everything
  v1 restart the engine  it exits before training and is started again, with its graph captured anew
  v2 wake in one stage   pause everything, resume everything, then take the weights
  v3 wake in stages      resume the weights, take them, let the trainer's go, and only then resume the KV cache

The table shows the peak of device memory (cudaMemGetInfo), the seconds of the switch there and back, and those of the
synchronisation. The last part finds a KV cache with which v2 runs out of memory, and shows that the same engine, still
asleep and whole, completes by v3.

    python examples/rl_colocate.py
    python examples/rl_colocate.py --weights-gb 1 --kv-gib 4 --width 4096 --skip-search
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from _common import GIB, MIB, check, device_bytes
from _rl_processes import GRAPH, KV_CACHE, WEIGHTS, Engine, Remote, RemoteError, Setup, Trainer


class ShardingManager:
    """Inside `with manager as engine:` the engine answers with the trainer's weights; outside there is room for training."""

    name = "v0 keep everything"

    def __init__(self, setup: Setup, trainer: Remote, engine: Remote | None = None) -> None:
        self.setup = setup
        self.trainer = trainer
        self.reset()
        self.overhead = 0
        if engine is not None:
            self.engine = engine
            return
        self.trainer("offload")
        before = self.trainer("used")
        self.engine = Remote(Engine, setup)
        # Its context, its libraries' memory and its graph.
        self.overhead = self.trainer("used") - before - setup.weight_bytes - setup.kv_bytes

    def reset(self) -> None:
        self.peak = 0
        self.seconds = {"switch": 0.0, "synchronise": 0.0}

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start

    def look(self) -> None:
        self.peak = max(self.peak, self.trainer("used"))

    def synchronise(self) -> None:
        """The trainer's weights into the engine's, over CUDA IPC, a bucket at a time."""
        with self.clock("synchronise"):
            self.engine("open_bucket", self.trainer("open_bucket"))
            self.look()
            for layers in self.setup.buckets():
                self.trainer("fill_bucket", layers)
                self.engine("take_bucket", layers)
            self.engine("close_bucket")
            self.trainer("close_bucket")

    def __enter__(self) -> Remote:
        self.synchronise()
        self.look()
        return self.engine

    def __exit__(self, *exception: object) -> None:
        """Nothing is given back."""

    def close(self) -> None:
        self.engine.stop()


class RestartEngine(ShardingManager):
    name = "v1 restart the engine"

    def __enter__(self) -> Remote:
        with self.clock("switch"):
            self.engine = Remote(Engine, self.setup)
        self.look()
        self.synchronise()
        self.trainer("offload")
        self.look()
        return self.engine

    def __exit__(self, *exception: object) -> None:
        with self.clock("switch"):
            self.engine.stop()
        self.trainer("load")

    def close(self) -> None:
        """The engine has gone already."""


class WakeInOneStage(ShardingManager):
    name = "v2 wake in one stage"

    def __enter__(self) -> Remote:
        with self.clock("switch"):
            self.engine("wake")
        self.look()
        self.synchronise()
        self.trainer("offload")
        return self.engine

    def __exit__(self, *exception: object) -> None:
        with self.clock("switch"):
            self.engine("sleep")
        self.trainer("load")


class WakeInStages(WakeInOneStage):
    name = "v3 wake in stages"

    def __enter__(self) -> Remote:
        with self.clock("switch"):
            self.engine("wake", WEIGHTS, GRAPH)
        self.look()
        self.synchronise()
        self.trainer("offload")
        with self.clock("switch"):
            self.engine("wake", KV_CACHE)
        self.look()
        return self.engine


STRATEGIES: tuple[type[ShardingManager], ...] = (ShardingManager, RestartEngine, WakeInOneStage, WakeInStages)


def agree(trained: tuple[torch.Tensor, int], answered: tuple[torch.Tensor, int], what: str) -> None:
    check(trained[1] == answered[1], f"{what}: the engine has the trainer's weights, bit for bit")
    check(torch.equal(trained[0], answered[0]), f"{what}: the replayed graph answers with them, exactly")


def train(trainer: Remote) -> tuple[int, tuple[torch.Tensor, int]]:
    """A training step: its peak of device memory, and what the engine will have to answer."""
    trainer("load")
    return trainer("train"), trainer("answer")


def run(strategy: type[ShardingManager], setup: Setup, trainer: Remote, steps: int) -> tuple[tuple[str, ...], int]:
    """Trains and rolls out in turn. Returns the row of the last step, and the device memory that an engine adds."""
    print(f"{strategy.name}:", flush=True)
    manager = strategy(setup, trainer)
    manager.__exit__()  # the first thing to come is a training step
    for _ in range(steps):
        manager.reset()
        manager.peak, trained = train(trainer)
        with manager as engine:
            agree(trained, engine("answer"), strategy.name)
        row = (manager.peak / GIB, manager.seconds["switch"], manager.seconds["synchronise"])
    manager.close()
    return (strategy.name, f"{row[0]:.1f}", f"{row[1]:.3f}", f"{row[2]:.3f}"), manager.overhead


def search(setup: Setup, trainer: Remote, overhead: int) -> None:
    """Finds a KV cache that one stage has no room for and stages have: between what is left beside two sets of weights, and
    beside one."""
    trainer("offload")
    room = trainer("capacity") - trainer("used") - overhead - setup.weight_bytes
    for quarters in (2, 1):
        kv_bytes = (room - setup.weight_bytes * quarters // 4) // setup.chunk_bytes * setup.chunk_bytes
        large = replace(setup, kv_bytes=kv_bytes)
        print(f"A KV cache of {kv_bytes / GIB:.1f} GiB:", flush=True)
        one_stage = WakeInOneStage(large, trainer)
        one_stage.__exit__()
        _, trained = train(trainer)
        asleep = one_stage.engine("paused_bytes")
        try:
            one_stage.__enter__()
        except RemoteError as error:
            check(error.kind == "OutOfMemoryError", f"{one_stage.name} runs out of memory ({error.kind})")
        else:
            print("  v2 had room enough")
            one_stage.close()
            continue
        check(one_stage.engine("paused_bytes") == asleep, "its engine is still asleep, and whole")
        stages = WakeInStages(large, trainer, one_stage.engine)
        with stages as engine:
            agree(trained, engine("answer"), stages.name)
        stages.close()
        return
    check(False, "a KV cache that tells the two apart was found")


def show(rows: list[tuple[str, ...]]) -> None:
    titles = ("strategy", "peak GiB", "switch s", "synchronise s")
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    print()
    for row in [titles, *rows]:
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells))
    print(flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights-gb", type=float, help="of the model, 10^9 bytes (default 15.4)")
    parser.add_argument("--kv-gib", type=float, help="of the KV cache for the table, GiB (default 40)")
    parser.add_argument("--training-gib", type=float, help="gradients and optimizer state, GiB (default: twice the weights)")
    parser.add_argument("--width", type=int, help="of the square matrices (default 8192)")
    parser.add_argument("--chunk-mib", type=int, help="of one allocation of the KV cache (default 512)")
    parser.add_argument("--bucket-mib", type=int, help="of the synchronisation (default 512)")
    parser.add_argument("--steps", type=int, default=2, help="per strategy; the last one is shown (default %(default)s)")
    parser.add_argument("--skip-search", action="store_true", help="leave out the part that fills the GPU")
    parser.epilog = "The defaults are for a GPU of 128 GiB or more; they are smaller where there is less."
    return fill_in(parser.parse_args())


def fill_in(arguments: argparse.Namespace) -> argparse.Namespace:
    """The defaults that suit the device. On a small one, which may be simulated, they take a small part of it."""
    part = min(1.0, device_bytes() / (128 * GIB))
    defaults = {
        "weights_gb": 15.4 * part**2,
        "kv_gib": 40 * part**2,
        "width": int(8192 * part),
        "chunk_mib": max(16, int(512 * part**2)),
        "bucket_mib": max(16, int(512 * part**2)),
    }
    for name, default in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    return arguments


def main() -> None:
    arguments = options()
    layer_bytes = arguments.width * arguments.width * 4
    layers = max(1, round(arguments.weights_gb * 1e9 / layer_bytes))
    training = 2 * layers * layer_bytes if arguments.training_gib is None else int(arguments.training_gib * GIB)
    setup = Setup(
        layers=layers,
        width=arguments.width,
        kv_bytes=int(arguments.kv_gib * GIB),
        bucket_layers=min(layers, max(1, arguments.bucket_mib * MIB // layer_bytes)),
        training_bytes=training,
        chunk_bytes=arguments.chunk_mib * MIB,
    )
    if not setup.slot_bytes <= setup.chunk_bytes <= setup.kv_bytes:
        raise SystemExit("--chunk-mib must have room for what a decode step writes, and not be more than the KV cache")
    print(
        f"Weights {setup.weight_bytes / 1e9:.1f} GB in {setup.layers} layers, KV cache {setup.kv_bytes / GIB:.1f} GiB, "
        f"training state {setup.training_bytes / GIB:.1f} GiB.",
        flush=True,
    )
    trainer = Remote(Trainer, setup)
    rows, overhead = [], 0
    for strategy in STRATEGIES:
        row, overhead = run(strategy, setup, trainer, arguments.steps)
        rows.append(row)
    show(rows)
    if not arguments.skip_search:
        search(setup, trainer, overhead)
    trainer.stop()


if __name__ == "__main__":
    main()
