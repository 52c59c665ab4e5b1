"""Guards the core by random operations on managed memory against a plain Python model, every byte compared: by hypothesis,
which finds the fewest steps that reveal a bug, and for a few seconds by the driver of the long runs (`make soak`), with
fewer steps between comparisons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from model_actors import Level
from model_allocations import BACKUPS
from model_failures import FAILING, fault
from model_machine import Machine
from model_operations import OPERATIONS, allocate, allocate_on, load
from model_pausing import pause, resume
from model_rules import Rules, add_rule, run
from model_threads import THREADED
from model_world import World

import torch_memory_saver

SOAK = Path(__file__).resolve().parents[2] / "tools" / "soak.py"

#: Some 10 seconds together. More: TMS_ variables are the package's, so these have another prefix.
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "20"))
STEPS = int(os.environ.get("MODEL_STEPS", "60"))
SOAK_SECONDS = os.environ.get("MODEL_SOAK_SECONDS", "6")

PAYLOAD = bytes((7 * index + index // 256) % 256 for index in range(1 << 16)) * 128


class Model(Rules):
    """The operations of model_operations.py and its companions, in any order."""

    directory: Path
    machine: Machine
    world: World

    def begin(self) -> World:
        world = World(self.machine, self.directory, payload=PAYLOAD)
        # An allocation to begin with, so that the first pause selects something: hypothesis makes few steps.
        main = world.actors[0]
        weights, cache, _ = world.tags
        for tag, backup in zip((weights, weights, cache, cache), BACKUPS, strict=True):
            world.change_level(main, Level(tag, backup, True))
            allocate_on(world, main, 5000, backup % 2)
        return world

    def guarded(self, step: Callable[[], Any]) -> None:
        self.world.operations += 1
        super().guarded(step)


#: Rules are chosen evenly, so the most important ones are listed more than once.
for each in OPERATIONS | FAILING | THREADED:
    for number in range(3 if each in (allocate, load, pause, resume, fault) else 1):
        add_rule(Model, each, f"{each.__name__}_{number}")


def test_the_core_does_what_the_model_does(simulator: Any, tmp_path: Path) -> None:
    Model.directory, Model.machine = tmp_path, Machine()
    run(Model, EXAMPLES, STEPS)


@pytest.mark.slow
def test_the_driver_of_the_long_runs(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--gpu"):
        pytest.skip("needs the simulated GPU, and --gpu was given")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TMS_")}
    package = Path(torch_memory_saver.__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package.parent), environment.get("PYTHONPATH")]))
    command = [sys.executable, str(SOAK), "--seconds", SOAK_SECONDS, "--episode", "400", "--check-every", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "no byte wrong" in done.stdout
