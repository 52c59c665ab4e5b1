"""Guards transformers' continuous batching and TRL's trainer with it: the cache sleeps and gives its memory back, answers
are the same after a sleep, and a training has the losses of the same run that keeps everything, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from gpu_programs import subprocess_run
from gpu_support import REPOSITORY

pytestmark = [pytest.mark.outer, pytest.mark.timeout(600)]

ENGINE = REPOSITORY / "examples" / "transformers_engine.py"
MANAGED = REPOSITORY / "examples" / "trl_grpo.py"
KEPT = REPOSITORY / "tests" / "gpu" / "programs" / "trl_grpo_kept.py"
SIZE = re.compile(r"(\d+\.\d\d) GiB \(expected (\d+\.\d\d)\)")
ROW = re.compile(r" *(\d+) +(\S+) +(\S+) +(\S+) +(\d+) +(\d+)")
STEPS, KV_MIB = 3, 128
#: The state of the optimizer: two numbers of 32 bits for each of 7.6 million parameters.
OPTIMIZER_MIB = 58
#: Device memory that the driver may need at one time and not at another.
SLACK_MIB = 16


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")


both_modes = pytest.mark.parametrize(
    "preload", [pytest.param(False, id="torch"), pytest.param(True, id="preload", marks=pytest.mark.slow)]
)


class Row(NamedTuple):
    step: str
    loss: str
    gradient: str
    reward: str
    generating: int
    training: int


@needs("transformers")
@both_modes
def test_the_engine_answers_the_same_after_a_sleep(preload: bool) -> None:
    done = subprocess_run([str(ENGINE)], preload=preload, timeout=280).check()
    print(done.output)
    checks = [line for line in done.output.splitlines() if line.startswith("  ok: ")]
    assert len(checks) == 6
    sizes = [(float(actual), float(expected)) for line in checks for actual, expected in SIZE.findall(line)]
    assert len(sizes) == 2
    assert all(abs(actual - expected) <= SLACK_MIB / 1024 for actual, expected in sizes)


def run(program: Path, preload: bool) -> list[Row]:
    command = [str(program), "--steps", str(STEPS), "--kv-mib", str(KV_MIB)]
    # TRL refuses to train in one process where several devices are visible.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    done = subprocess_run(command, {"CUDA_VISIBLE_DEVICES": first}, preload, timeout=280).check()
    print(done.output)
    found = [match.groups() for line in done.output.splitlines() if (match := ROW.fullmatch(line))]
    rows = [Row(*values[:4], *map(int, values[4:])) for values in found]
    assert [row.step for row in rows] == [str(step) for step in range(1, STEPS + 1)]
    return rows


@pytest.fixture(scope="module")
def kept() -> list[Row]:
    return run(KEPT, preload=False)


@needs("trl")
@both_modes
def test_a_training_is_that_of_the_run_that_keeps_everything(kept: list[Row], preload: bool) -> None:
    managed = run(MANAGED, preload)
    assert [row[:4] for row in managed] == [row[:4] for row in kept]
    assert len({row.gradient for row in managed}) == STEPS
    for own, other in list(zip(managed, kept, strict=True))[1:]:  # the optimizer has no state in the first step
        assert own.generating <= other.generating - OPTIMIZER_MIB + SLACK_MIB
        assert own.training <= other.training - KV_MIB + SLACK_MIB
