"""Guards tensors in regions by random operations against a plain Python model, every byte compared: see model_torch.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

from model_machine import Machine
from model_rules import Rules, add_rule, run
from model_torch import OPERATIONS
from torch_world import TorchWorld

from torch_memory_saver import errors
from torch_memory_saver import torch_memory_saver as saver

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "12"))
STEPS = int(os.environ.get("MODEL_STEPS", "40"))


class Model(Rules):
    machine: Machine

    def begin(self) -> TorchWorld:
        return TorchWorld(self.machine)


for each in OPERATIONS:
    add_rule(Model, each, each.__name__)


@pytest.fixture(autouse=True)
def a_device_in_use() -> Iterator[None]:
    torch.zeros(1, device="cuda")
    yield


def test_tensors_are_what_the_model_says() -> None:
    Model.machine = Machine()
    run(Model, EXAMPLES, STEPS)


def test_a_pause_that_fails_after_its_commit_point_leaves_no_paused_pool_routed() -> None:
    """Found by the random operations: inside a region of its own tag the next tensor was made in paused memory."""
    machine = Machine()
    with saver.region(tag="weights", enable_cpu_backup=True):
        first = torch.full((1000,), 3, dtype=torch.uint8, device="cuda")
        machine.fail("cuMemRelease", 0, 1, 304)
        with pytest.raises(errors.DriverError):
            saver.pause("weights")
        machine.fail("cuMemRelease", 0, 0, 0)
        second = torch.full((1000,), 4, dtype=torch.uint8, device="cuda")
        assert bool((second.cpu() == 4).all())
    saver.resume()
    assert bool((first.cpu() == 3).all())
    assert bool((second.cpu() == 4).all())
