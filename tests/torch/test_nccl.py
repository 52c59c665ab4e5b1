"""Guards torch.distributed's NCCL backend between processes on simulated GPUs, and the detection of its failures."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from rank_processes import Ended, run_ranks, skip_with_too_few_devices

pytestmark = skip_with_too_few_devices

WORKING = "collectives,transfers,asynchronous,groups,captured"


def run(scenarios: str, folder: Path, **variables: str) -> list[Ended]:
    return run_ranks("nccl_rank.py", scenarios, folder, **variables)


@pytest.mark.parametrize("eager", ["0", "1"], ids=["lazily", "eagerly"])
def test_two_processes(eager: str, tmp_path: Path) -> None:
    """Communicators are made at their first use, or with the group: then groups are split off."""
    for rank in run(WORKING, tmp_path, EAGER=eager):
        rank.check()


def test_communicators_that_do_not_block(tmp_path: Path) -> None:
    for rank in run("groups", tmp_path, EAGER="1", TORCH_NCCL_USE_COMM_NONBLOCKING="1"):
        rank.check()


def test_a_killed_rank_is_detected(tmp_path: Path) -> None:
    waiting, killed = run("killed", tmp_path)
    assert killed.status == -signal.SIGKILL
    assert waiting.status not in (0, 1), waiting.errors
    assert "rank 0 waits for rank 1, which is unavailable: its process has exited" in waiting.errors


def test_work_that_takes_too_long_ends_the_process(tmp_path: Path) -> None:
    waiting, late = run("late", tmp_path)
    assert late.status == 0, late.errors
    assert waiting.status not in (0, 1), waiting.errors
    assert "Watchdog caught collective operation timeout" in waiting.errors


def test_work_that_waits_is_aborted(tmp_path: Path) -> None:
    for rank in run("aborted", tmp_path):
        rank.check()


def test_ranks_with_different_requests_get_an_error(tmp_path: Path) -> None:
    ranks = run("mismatched", tmp_path)
    assert all(rank.status not in (0, 1) for rank in ranks), [rank.errors for rank in ranks]
    assert any("rank 0 calls ncclAllReduce (count 10, float32" in rank.errors for rank in ranks)


def test_nothing_is_left_in_shared_memory() -> None:
    assert not [path for path in Path("/dev/shm").iterdir() if "nccl" in path.name]
