"""Four ways for a trainer and an engine to use one GPU in turn, with the memory and the time of each step.

A strategy stands between the two processes, as verl's sharding manager does. `to_rollout` brings the engine up with the
trainer's new weights, and `to_training` makes room for the trainer again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rl_processes import ACTIVATIONS, GRADIENTS, GRAPHS, KV_CACHE, OPTIMIZER, WEIGHTS, Engine, Remote, RemoteError
from rl_sizes import GB, Sizes

OTHER = "other"
#: The components of device memory, in the order of the table and of the bars. `other`: contexts, libraries and caches.
COMPONENTS = ("trainer's weights", "engine's weights", KV_CACHE, GRAPHS, ACTIVATIONS, GRADIENTS, OPTIMIZER, OTHER)
PHASES = ("train", "update", "synchronise", "generate")


def check(holds: bool, what: str) -> None:
    """End the program with status 1 unless `what` holds."""
    if not holds:
        raise SystemExit(f"FAILED: {what}")
    print(f"  ok: {what}", flush=True)


@dataclass
class Step:
    """A training step, the switch to the engine, its answer, and the switch back.

    Attributes:
        phases: Device bytes by phase and component.
        seconds: Seconds of each part of the switches.
        transfer: Seconds of opening, copying and closing the trainer's weights, if they are sent.
    """

    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    transfer: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max(sum(phase.values()) for phase in self.phases.values())

    @property
    def peak_with_cache(self) -> int:
        """The peak of the phases in which the KV cache has memory."""
        return max(sum(phase.values()) for phase in self.phases.values() if phase[KV_CACHE])

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


class Strategy:
    """The strategy in which both processes keep all their memory."""

    name = "keep everything"
    #: The parts of the switches, in order.
    to_rollout_parts: tuple[str, ...] = ("weights",)
    to_training_parts: tuple[str, ...] = ()

    def __init__(self, sizes: Sizes, trainer: Remote, folder: Path) -> None:
        self.sizes, self.trainer = sizes, trainer
        self.weights_file = str(folder / "weights.pt")
        self.engine: Remote | None = None
        self.record = Step()

    def start(self) -> None:
        """Get ready for a training step."""
        self.engine = Remote(Engine, self.sizes)

    def to_rollout(self) -> None:
        self.synchronise()

    def to_training(self) -> None:
        """Do nothing: no memory is released."""

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.stop()
            self.engine = None
        self.trainer("clean_up")
        self.trainer("resume")

    def awake(self) -> Remote:
        assert self.engine is not None
        return self.engine

    def synchronise(self) -> None:
        """Copy the trainer's live tensors into the engine's, over CUDA IPC."""
        self.look("synchronise")
        with self.record.clock("weights"):
            self.record.transfer = self.awake()("take_weights", self.trainer("send_weights"))

    def look(self, phase: str) -> None:
        """Record what device memory holds now."""
        trainer = self.trainer("components")
        engine = self.engine("components") if self.engine is not None else {}
        held = {
            "trainer's weights": trainer[WEIGHTS],
            "engine's weights": engine.get(WEIGHTS, 0),
            KV_CACHE: engine.get(KV_CACHE, 0),
            GRAPHS: engine.get(GRAPHS, 0),
            **{name: trainer[name] for name in (ACTIVATIONS, GRADIENTS, OPTIMIZER)},
        }
        used, _ = self.trainer("device_memory")
        self.record.phases[phase] = held | {OTHER: used - sum(held.values())}

    def step(self) -> Step:
        """Make a whole step. Checks that the engine has the trainer's weights, bit for bit, and answers with them."""
        self.record = Step()
        self.trainer("forward_and_backward")
        self.look("train")
        self.trainer("update")
        self.look("update")
        trained = self.trainer("answer")
        self.to_rollout()
        answered = self.awake()("answer")
        self.look("generate")
        self.to_training()
        check(trained[1] == answered[1] and torch.equal(trained[0], answered[0]), f"{self.name}: the engine answers exactly")
        check(self.trainer("optimizer_is_whole"), f"{self.name}: the optimizer state is what the updates made of it")
        return self.record


class RestartEngine(Strategy):
    """The strategy in which the engine ends before training, and restarts with weights from a file and new graphs."""

    name = "restart the engine"
    to_rollout_parts = ("save", "park", "start")
    to_training_parts = ("stop", "unpark")

    def start(self) -> None:
        """Do nothing: to_rollout starts the engine."""

    def to_rollout(self) -> None:
        self.look("synchronise")
        with self.record.clock("save"):
            self.trainer("save_weights", self.weights_file)
        with self.record.clock("park"):
            self.trainer("pause", WEIGHTS, OPTIMIZER, GRADIENTS)
        with self.record.clock("start"):
            self.engine = Remote(Engine, self.sizes, self.weights_file)

    def to_training(self) -> None:
        with self.record.clock("stop"):
            self.awake().stop()
            self.engine = None
        with self.record.clock("unpark"):
            self.trainer("resume")


class WakeWhole(Strategy):
    """The strategy in which the engine's memory is paused during training, and resumed all at once."""

    name = "wake whole"
    to_rollout_parts = ("park", "wake", "weights")
    to_training_parts = ("sleep", "unpark")

    def start(self) -> None:
        self.trainer("pause", WEIGHTS, OPTIMIZER, GRADIENTS)
        super().start()
        self.awake()("sleep")
        self.trainer("resume")

    def to_rollout(self) -> None:
        with self.record.clock("park"):
            self.trainer("pause", OPTIMIZER, GRADIENTS)
        with self.record.clock("wake"):
            self.awake()("resume")
        self.synchronise()
        with self.record.clock("park"):
            self.trainer("pause", WEIGHTS)

    def to_training(self) -> None:
        with self.record.clock("sleep"):
            self.awake()("sleep")
        with self.record.clock("unpark"):
            self.trainer("resume")


class WakeInStages(WakeWhole):
    """The strategy that resumes and updates the engine's weights, pauses the trainer's, and then resumes the KV cache."""

    name = "wake in stages"

    def to_rollout(self) -> None:
        with self.record.clock("park"):
            self.trainer("pause", OPTIMIZER, GRADIENTS)
        with self.record.clock("wake"):
            self.awake()("resume", WEIGHTS)
        self.synchronise()
        with self.record.clock("park"):
            self.trainer("pause", WEIGHTS)
        with self.record.clock("wake"):
            self.awake()("resume", KV_CACHE, GRAPHS)


STRATEGIES: tuple[type[Strategy], ...] = (Strategy, RestartEngine, WakeWhole, WakeInStages)


def run(strategy: type[Strategy], sizes: Sizes, trainer: Remote, folder: Path, steps: int) -> list[Step] | None:
    """Make steps. Returns None if the GPU has too little memory. Afterwards only the trainer is left, and it is resumed."""
    manager = strategy(sizes, trainer, folder)
    try:
        manager.start()
        made = []
        for number in range(1, steps + 1):
            print(f"  step {number} of {steps}", flush=True)
            made.append(manager.step())
        return made
    except RemoteError as error:
        if error.kind != "OutOfMemoryError":
            raise
        return None
    finally:
        manager.stop()


def largest_cache(strategy: type[Strategy], sizes: Sizes, guess: int, trainer: Remote, folder: Path, pace: int) -> int:
    """Search the largest KV cache with which a step succeeds. With `pace` bytes more a step has failed.

    Every size is tried by a whole step of the strategy, starting at `guess`. Returns 0 if no size succeeds.
    """

    def succeeds(kv_cache: int) -> bool:
        made = run(strategy, replace(sizes, kv_cache=kv_cache), trainer, folder, steps=1) is not None
        result = "enough memory" if made else "out of memory"
        print(f"  {strategy.name}, a KV cache of {kv_cache / GB:.2f} GB: {result}", flush=True)
        return made

    size = guess // pace * pace
    if succeeds(size):
        while succeeds(size + pace):
            size += pace
        return size
    while size > pace and not succeeds(size - pace):
        size -= pace
    return size - pace
