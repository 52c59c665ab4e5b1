"""Guards the checkpoint of a parked, sharded trainer: two ranks save from the host copies, and fresh ones go on."""

from __future__ import annotations

from pathlib import Path

from rank_processes import run_ranks, skip_with_too_few_devices

pytestmark = skip_with_too_few_devices


def test_a_parked_trainer_of_two_ranks_saves_and_a_fresh_one_loads(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for scenario in ("save", "load"):
        meeting = tmp_path / scenario
        meeting.mkdir()
        for rank in run_ranks("checkpoint_rank.py", scenario, meeting, CHECKPOINT=str(folder)):
            rank.check()
    assert len(list(folder.glob("*.distcp"))) == 2
