"""Guards the ways in which RL frameworks hand a trainer's weights to an inference engine, with managed weights: serialised
handles (SGLang), a bucket that is filled again and again (verl), and copies inside disable() (slime), each step with a
trainer that is parked between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu_support import MIB, core, empty, fill_random, is_managed, saver, segment_of, torch
from importers import Importer, contents

LAYERS, STEPS, BUCKET_LAYERS = 6, 3, 2
LAYER_BYTES = 4 * MIB
#: The position of the device in the arguments of rebuild_cuda_tensor.
DEVICE = 6


@pytest.fixture(scope="module")
def engine() -> Iterator[Importer]:
    with Importer() as process:
        yield process


class Trainer:
    """Its weights are managed, with a backup, and change at each step."""

    def __init__(self) -> None:
        with saver.region(tag="trainer", enable_cpu_backup=True):
            self.weights = {f"layer{index}": empty(LAYER_BYTES) for index in range(LAYERS)}
        self.step(0)

    def step(self, number: int) -> None:
        for index, weight in enumerate(self.weights.values()):
            fill_random(weight, number * LAYERS + index)
        torch.cuda.synchronize()

    def expected(self) -> dict[str, str]:
        return {name: contents(weight) for name, weight in self.weights.items()}

    def park(self) -> None:
        """Another process may have the memory only while weights are synchronised."""
        report = saver.pause("trainer", if_shared="wait", timeout=60)
        assert report.possibly_shared_bytes == 0 and report.allocations > 0
        saver.resume("trainer")


def assert_loaded(engine: Importer, expected: dict[str, str]) -> None:
    for name, answer in expected.items():
        assert engine.read(f"engine.{name}") == answer, name
        engine.drop(f"engine.{name}")


def test_serialised_handles(engine: Importer) -> None:
    """All weights in one message, as update_weights_from_tensor sends them."""
    trainer = Trainer()
    for step in range(STEPS):
        trainer.step(step)
        expected = trainer.expected()
        engine.load("engine", list(trainer.weights.items()))
        assert_loaded(engine, expected)
        trainer.park()
        assert trainer.expected() == expected


def test_a_bucket_that_is_filled_again(engine: Importer) -> None:
    """The engine opens the bucket once a step, with a device number of its own choice, and reads each filling."""
    from torch.multiprocessing.reductions import reduce_tensor

    trainer = Trainer()
    with saver.region(tag="trainer"):
        bucket = empty(BUCKET_LAYERS * LAYER_BYTES)
    for step in range(STEPS):
        trainer.step(step)
        rebuild, arguments = reduce_tensor(bucket)
        moved: list[Any] = list(arguments)
        moved[DEVICE] = torch.cuda.current_device()
        engine.call("bucket", (rebuild, tuple(moved)))
        weights = list(trainer.weights.values())
        for first in range(0, LAYERS, BUCKET_LAYERS):
            bucket.copy_(torch.cat(weights[first : first + BUCKET_LAYERS]))
            torch.cuda.synchronize()
            assert engine.read("bucket") == contents(bucket)
        engine.drop("bucket")
        trainer.park()


def test_copies_inside_disable(engine: Importer) -> None:
    """The copies are ordinary memory."""
    trainer = Trainer()
    for step in range(STEPS):
        trainer.step(step)
        expected = trainer.expected()
        with saver.region(tag="trainer"), saver.disable():
            sent = [(name, weight.clone()) for name, weight in trainer.weights.items()]
        assert not any(is_managed(tensor) for _, tensor in sent)
        engine.load("engine", sent)
        del sent
        assert_loaded(engine, expected)
        trainer.park()
        assert all(segment_of(weight).state == core.STATE_ACTIVE for weight in trainer.weights.values())
