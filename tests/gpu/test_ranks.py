"""Guards ranks.pause and ranks.resume between four processes: all go on; one is short of memory or of room for backups,
late, interrupted or killed; the process that has the store is killed or stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_programs import Program
from gpu_support import SIMULATED, STARTED_PRELOADED

TIMEOUT_S = 200
KILLED = str(-signal.SIGKILL)

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture
def machine() -> Iterator[tuple[tuple[str, str], ...]]:
    """On the simulated GPU, the variables of a machine of its own with a device for each rank."""
    if not SIMULATED:
        yield ()
        return
    name = f"ranks-{os.getpid()}"
    yield (
        ("TMS_SIMULATED_SHARED", name),
        ("TMS_SIMULATED_DEVICES", "4"),
        ("TMS_SIMULATED_MEMORY", "512MiB"),
    )
    Path(f"/dev/shm/tms_simulated_{name}").unlink(missing_ok=True)


def run(ranks: int, scenarios: tuple[str, ...], machine: tuple[tuple[str, str], ...], folder: Path) -> list[list[str]]:
    """Runs the scenarios on so many ranks. Returns for each rank its exit status, and the scenarios that it has passed. Rank
    0 has the store, and is killed when all others have ended."""
    arguments = [(str(rank), str(ranks), str(folder / "port"), *scenarios) for rank in range(ranks)]
    processes = [Program("all_ranks.py", each, machine, STARTED_PRELOADED).start() for each in arguments]
    passed: dict[int, list[str]] = {}
    errors = ""
    try:
        for rank in reversed(range(ranks)):
            if rank == 0:
                processes[0].kill()
            output, error = processes[rank].communicate(timeout=TIMEOUT_S)
            passed[rank] = [str(processes[rank].returncode), *output.splitlines()]
            errors += f"rank {rank}: {passed[rank]}\n{error}"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    print(errors)
    return [passed[rank] for rank in range(ranks)]


def test_four_ranks(machine: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    living = ("working", "short_of_memory", "late", "missed", "refused", "without_room", "interrupted")
    assert run(4, (*living, "killed_before", "killed_inside", "store_killed"), machine, tmp_path) == [
        [KILLED, *living, "killed_before", "killed_inside"],
        ["0", *living, "killed_before", "killed_inside", "store_killed"],
        [KILLED, *living],
        [KILLED, *living, "killed_before"],
    ]


def test_a_store_that_does_not_answer(machine: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    assert run(2, ("store_stopped",), machine, tmp_path) == [[KILLED], ["0", "store_stopped"]]
