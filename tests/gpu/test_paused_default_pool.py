"""Guards what a process that manages everything (TMS_INIT_ENABLE) allocates while PyTorch's default pool is paused: it never
gets paused memory, and PyTorch is as before after the resume."""

from __future__ import annotations

import pytest
from gpu_programs import Program, run_programs
from gpu_support import release

pytestmark = pytest.mark.outer


@pytest.fixture(autouse=True)
def replaces_the_default_pool() -> None:
    if release() < (2, 11):
        pytest.skip(
            "PyTorch before 2.11 may place a graph that is captured meanwhile in the pool that replaces the default pool"
        )


ENVIRONMENT = (("TMS_INIT_ENABLE", "1"), ("TMS_INIT_ENABLE_CPU_BACKUP", "1"))


def run(scenario: str) -> None:
    (done,) = run_programs([Program("paused_default_pool.py", (scenario,), ENVIRONMENT, preload=True)])
    assert done.check().output == "ok\n"


@pytest.mark.parametrize(
    "scenario",
    [
        "blocks",
        "cycles",
        "undone",
        "refused",
        "regions",
        "other_thread_in_region",
        "captures",
        "emptied",
        "dropped_pools",
        "partial",
    ],
)
def test_scenario(scenario: str) -> None:
    run(scenario)


@pytest.mark.multigpu
def test_two_devices() -> None:
    run("devices")
