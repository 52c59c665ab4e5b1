"""Guards that training on two simulated GPUs, by DistributedDataParallel and FSDP2, gives the numbers of one process on the
CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks, skip_with_too_few_devices

pytestmark = skip_with_too_few_devices


@pytest.mark.parametrize(
    "scenarios",
    [
        "ddp,ddp_buckets,ddp_accumulates,ddp_unused,ddp_managed",
        "fsdp,fsdp_clips,fsdp_accumulates,fsdp_offloads,fsdp_state,fsdp_sleeps,fsdp_managed",
    ],
)
def test_training_on_two_gpus(scenarios: str, tmp_path: Path) -> None:
    for rank in run_ranks("training_rank.py", scenarios, tmp_path):
        rank.check()
        assert "not simulated" not in rank.errors
