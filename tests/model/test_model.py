"""Random operations on managed memory against a plain Python model, every byte compared: by hypothesis, which finds the
fewest steps that show a fault, and for a few seconds by the driver of the long runs (`make soak`), with fewer steps between
comparisons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))

from model_choice import DrawnChoice
from model_failures import FAILING, fault
from model_machine import Machine
from model_operations import OPERATIONS, Operation, allocate, allocate_on, pause, resume
from model_threads import THREADED
from model_world import BACKUPS, Level, World

import torch_memory_saver
from torch_memory_saver import _core

HERE = Path(__file__).parent

#: Some 20 seconds together. More: TMS_ variables are the package's, so these have another prefix.
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "80"))
STEPS = int(os.environ.get("MODEL_STEPS", "60"))
SOAK_SECONDS = os.environ.get("MODEL_SOAK_SECONDS", "6")

PAYLOAD = bytes((7 * index + index // 256) % 256 for index in range(1 << 16)) * 128


def as_rule(operation: Operation) -> Callable[..., None]:
    """One operation as a rule of the machine; its decisions are drawn."""

    def step(self: Model, data: Any) -> None:
        self.guarded(lambda: operation(self.world, DrawnChoice(data)))

    step.__name__ = operation.__name__
    return rule(data=strategies.data())(step)


class Model(RuleBasedStateMachine):
    """The operations of model_operations.py and model_threads.py, in any order."""

    directory: Path
    machine: Machine

    def __init__(self) -> None:
        super().__init__()
        self.failed = False
        self.world = World(self.machine, self.directory, payload=PAYLOAD)
        # Something to begin with, so that the first pause is about something: hypothesis makes few steps.
        main = self.world.actors[0]
        for tag, backup in zip(("weights", "weights", "kv_cache", "kv_cache"), BACKUPS, strict=True):
            main.bottom = Level(tag, backup, True)
            _core.region_set(tag, backup, True)
            allocate_on(self.world, main, 5000, backup % 2)

    def guarded(self, step: Callable[[], Any]) -> None:
        self.world.operations += 1
        try:
            step()
        except Exception:
            self.failed = True
            note("\n".join(self.world.steps))
            raise

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        self.guarded(self.world.check)

    def teardown(self) -> None:
        if self.failed:
            self.world.abandon()
        else:
            self.world.end()


#: Rules are chosen evenly, so what matters most is there more than once.
for each in OPERATIONS | FAILING | THREADED:
    for number in range(3 if each in (allocate, pause, resume, fault) else 1):
        setattr(Model, f"{each.__name__}_{number}", as_rule(each))


def test_the_core_does_what_the_model_does(simulator: Any, tmp_path: Path) -> None:
    Model.directory, Model.machine = tmp_path, Machine()
    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_driver_of_the_long_runs(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--gpu"):
        pytest.skip("needs the simulated GPU, and --gpu was given")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TMS_")}
    package = Path(torch_memory_saver.__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package.parent), environment.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "soak.py"), "--seconds", SOAK_SECONDS, "--episode", "400", "--check-every", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "no byte wrong" in done.stdout
