"""Guards `run` around programs of PyTorch that never import the package: their memory is managed and recorded, also in an
environment of `run --print-env`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gpu_programs import subprocess_run
from gpu_support import MIB

from torch_memory_saver.observe.events import EventLog, load_events

pytestmark = pytest.mark.outer

SIZE = 64 * MIB
#: Allocates, frees and gives back. It never names the package.
PROGRAM = f"""
import torch
tensor = torch.ones({SIZE // 4}, device="cuda")
assert float(tensor[-1]) == 1.0
del tensor
torch.cuda.empty_cache()
print(len(torch.cuda.memory._snapshot()["device_traces"][0]))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def totals(log: EventLog) -> tuple[int, int]:
    """The bytes of the allocations and of the frees."""
    return tuple(sum(e.bytes for e in log.events if e.kind == kind) for kind in ("allocate", "free"))  # type: ignore[return-value]


def test_a_program_that_never_imports_the_package(tmp_path: Path, script: str) -> None:
    run = ["-m", "torch_memory_saver", "run", "--manage", "--record", "events,history", "--directory", str(tmp_path)]
    done = subprocess_run([*run, "--", sys.executable, script]).check()
    assert int(done.output) >= 1  # PyTorch recorded its allocation
    (path,) = (tmp_path / "events").iterdir()
    log = load_events(path)
    allocated, freed = totals(log)
    assert allocated == freed >= SIZE
    assert {event.tag for event in log.events if event.kind == "allocate"} == {"default"}


def test_without_managing_nothing_is_recorded_and_nothing_breaks(tmp_path: Path, script: str) -> None:
    run = ["-m", "torch_memory_saver", "run", "--preload", "--record", "events", "--directory", str(tmp_path)]
    done = subprocess_run([*run, "--", sys.executable, script]).check()
    assert int(done.output) == 0  # no history
    assert list(tmp_path.glob("events/*")) == []


def test_the_replacement_until_cuda_is_initialised_is_listed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch_memory_saver\n"
        "print(*(patch.name for patch in torch_memory_saver.patches()))\n"
        "torch.cuda.init()\n"
        "print(*(patch.name for patch in torch_memory_saver.patches()))\n"
    )
    run = ["-m", "torch_memory_saver", "run", "--record", "events", "--directory", str(tmp_path)]
    done = subprocess_run([*run, "--", sys.executable, str(program)]).check()
    assert done.output == "torch.cuda._lazy_init\n\n"


def test_torchrun_gives_the_variables_to_its_workers(tmp_path: Path, script: str) -> None:
    folder = tmp_path / "it's a folder"
    prefix = subprocess_run(
        [
            "-m",
            "torch_memory_saver",
            "run",
            "--manage",
            "--record",
            "events",
            "--directory",
            str(folder),
            "--print-env",
            "torchrun",
        ]
    ).check()
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {script}"
    shell = "import os, sys; os.execv('/bin/sh', ['sh', '-c', sys.argv[1]])"
    subprocess_run(["-c", shell, f"{prefix.output.rstrip()} {launcher}"]).check()
    files = sorted(folder.glob("events/*"))
    assert [path.name.split("-")[0] for path in files] == ["rank0", "rank1"]
    for path in files:
        allocated, freed = totals(load_events(path))
        assert allocated == freed >= SIZE
