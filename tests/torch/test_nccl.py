"""That torch.distributed's NCCL backend works between processes on simulated GPUs, and that its failures are noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).resolve().parent / "programs" / "nccl_rank.py"
RANKS = 2
#: torch's watchdog takes a minute from finding an error to ending the process.
TIMEOUT_S = 200

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two devices")


class Ended:
    """What became of a rank."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.output, self.errors = process.communicate(timeout=TIMEOUT_S)
        self.status = process.returncode

    def check(self) -> None:
        assert (self.status, self.output.splitlines()[-1:]) == (0, ["ok"]), self.errors


def run_ranks(scenario: str, folder: Path, **variables: str) -> list[Ended]:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), scenario, str(rank), str(folder / "rendezvous")],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        return [Ended(rank) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("eager", ["0", "1"], ids=["lazily", "eagerly"])
@pytest.mark.parametrize("scenario", ["collectives", "transfers", "asynchronous", "groups", "captured"])
def test_two_processes(scenario: str, eager: str, tmp_path: Path) -> None:
    """Communicators are made at their first use, or with the group: then groups are split off."""
    for rank in run_ranks(scenario, tmp_path, EAGER=eager):
        rank.check()


def test_communicators_that_do_not_block(tmp_path: Path) -> None:
    for rank in run_ranks("groups", tmp_path, EAGER="1", TORCH_NCCL_USE_COMM_NONBLOCKING="1"):
        rank.check()


def test_a_rank_that_was_killed_is_noticed(tmp_path: Path) -> None:
    waiting, killed = run_ranks("killed", tmp_path)
    assert killed.status == -signal.SIGKILL
    assert waiting.status not in (0, 1), waiting.errors
    assert "rank 0 waits for rank 1, which is gone: its process has ended" in waiting.errors


def test_work_that_waits_is_aborted(tmp_path: Path) -> None:
    for rank in run_ranks("aborted", tmp_path):
        rank.check()


def test_ranks_that_ask_for_different_things_are_told(tmp_path: Path) -> None:
    ranks = run_ranks("mismatched", tmp_path)
    assert all(rank.status not in (0, 1) for rank in ranks), [rank.errors for rank in ranks]
    assert any("rank 0 calls ncclAllReduce (count 10, float32" in rank.errors for rank in ranks)


def test_nothing_is_left_in_shared_memory() -> None:
    assert not [path for path in Path("/dev/shm").iterdir() if "nccl" in path.name]
