"""Starts the programs of tests/torch/programs that are one of several ranks, each on a simulated GPU of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.cuda import device_count
from warm_python import WarmProcess, torch_programs

RANKS = 2
TIMEOUT_S = 100
PROGRAMS = Path(__file__).resolve().parent / "programs"

skip_with_too_few_devices = pytest.mark.skipif(
    device_count() < RANKS, reason=f"needs {RANKS} devices: run simulate with --devices {RANKS}"
)

ENVIRONMENT = {
    # As torchrun sets it: threads that wait for each other by spinning take many times as long on few cores.
    "OMP_NUM_THREADS": "1",
    # torch's watchdog waits four times as long before it ends a process, for the collection of traces: by default a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}


class Ended:
    """The outcome of a rank."""

    def __init__(self, process: WarmProcess, timeout: float) -> None:
        self.output, self.errors = process.communicate(timeout=timeout)
        self.status = process.returncode

    def check(self) -> None:
        assert (self.status, self.output.splitlines()[-1:]) == (0, ["ok"]), self.errors


def run_ranks(program: str, scenarios: str, folder: Path, **variables: str) -> list[Ended]:
    arguments = [[scenarios, str(rank), str(folder / "rendezvous")] for rank in range(RANKS)]
    return run_together(program, arguments, **variables)


def run_together(program: str, arguments: list[list[str]], timeout: float = TIMEOUT_S, **variables: str) -> list[Ended]:
    """Runs a program once with each list of arguments, all at the same time."""
    environment = ENVIRONMENT | os.environ | variables
    ranks = [torch_programs.start([str(PROGRAMS / program), *each], environment, Path.cwd()) for each in arguments]
    try:
        return [Ended(rank, timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
