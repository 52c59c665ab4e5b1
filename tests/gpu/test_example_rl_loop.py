"""Guards the main example: it learns, computes the losses of the same program without torch_memory_saver, bit for bit, and
holds less memory while one of the two sleeps. In the rollout it parks only the small trainer."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from gpu_programs import subprocess_run
from gpu_support import REPOSITORY, SIMULATED

pytestmark = [pytest.mark.outer, pytest.mark.timeout(300)]

KEPT = REPOSITORY / "tests" / "gpu" / "programs" / "rl_loop_kept.py"
MANAGED = REPOSITORY / "examples" / "rl_loop.py"
ROW = re.compile(r" *\d+ +(\S+) +(\S+) +(\d+) +(\d+) +(\d+)")
KV_MIB = 128 if SIMULATED else 512
#: Device memory that the driver may need at one time and not at another.
SLACK_MIB = 0 if SIMULATED else 64
STEPS = 3


class Row(NamedTuple):
    reward: str
    loss: str
    update: int
    rollout: int
    train: int


def run(program: str, steps: int) -> list[Row]:
    done = subprocess_run([program, "--steps", str(steps), "--kv-mib", str(KV_MIB)], timeout=280).check()
    found = [match.groups() for line in done.output.splitlines() if (match := ROW.fullmatch(line))]
    assert len(found) == steps
    return [Row(reward, loss, *map(int, sizes)) for reward, loss, *sizes in found]


def test_losses_are_those_of_the_run_that_keeps_everything() -> None:
    managed, kept = run(str(MANAGED), STEPS), run(str(KEPT), STEPS)
    assert [(row.reward, row.loss) for row in managed] == [(row.reward, row.loss) for row in kept]
    assert len({row.loss for row in managed}) == STEPS
    for own, other in zip(managed, kept, strict=True):
        assert own.update <= other.update - KV_MIB + SLACK_MIB
        assert own.train <= other.train - KV_MIB + SLACK_MIB
        assert own.rollout <= other.rollout + SLACK_MIB


@pytest.mark.slow
def test_the_loop_learns() -> None:
    rewards = [float(row.reward) for row in run(str(MANAGED), 16)]
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4])
