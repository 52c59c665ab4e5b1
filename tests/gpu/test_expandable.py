"""Guards TMS_INIT_ENABLE with PyTorch's expandable segments, whose memory PyTorch maps itself. Each scenario is a process of
its own, because the variables are read at the first allocation."""

from __future__ import annotations

import pytest
from gpu_programs import Program, run_programs
from gpu_support import release, torch

pytestmark = pytest.mark.outer

KEPT = ("TMS_INIT_ENABLE_CPU_BACKUP", "1")
SCENARIOS = (
    "contents",
    "live_bytes",
    "empty_cache",
    "other_threads",
    "disabled",
    "pieces_made_while_paused",
    "at_run_time",
    "backups",
    "graphs",
    "not_managed",
    "peers",
    "sent",
)


def run(scenario: str, *environment: tuple[str, str]) -> None:
    variables = (("TMS_INIT_ENABLE", "1"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), *environment)
    run_programs([Program("expandable_managed.py", (scenario,), variables, preload=True)])[0].check()


#: Scenarios that need a release of PyTorch, and what older ones lack.
SINCE = {
    "at_run_time": ((2, 9), "memory pools refuse expandable segments, so no region can be entered"),
    "pieces_made_while_paused": ((2, 11), "no other pool takes the place of a paused default pool"),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_expandable_segments_are_managed(scenario: str) -> None:
    needed, lack = SINCE.get(scenario, ((0, 0), ""))
    if release() < needed:
        pytest.skip(f"PyTorch {torch.__version__}: {lack}")
    run(scenario, KEPT)


@pytest.mark.parametrize("backend", ["mmap", "disk"])
def test_contents_in_other_backups(backend: str) -> None:
    variable = ("TMS_INIT_CPU_BACKUP_BACKEND", "mmap") if backend == "mmap" else ("TMS_INIT_ENABLE_DISK_BACKUP", "1")
    run("contents", *((KEPT,) if backend == "mmap" else ()), variable)


def test_a_preserved_tensor_in_several_pieces() -> None:
    run("preserved")
