"""Every example runs on the GPU, in small, and its own checks hold. Their output is shown by `pytest -rP`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_support import REPOSITORY, SIMULATED, subprocess_run, torch

pytestmark = [pytest.mark.outer, pytest.mark.timeout(300)]

EXAMPLES = REPOSITORY / "examples"
CALLS: dict[str, list[str]] = {
    "simple.py": ["--gib", "1"],
    "tags.py": ["--gib", "1"],
    "cpu_backup.py": ["--gib", "0.5"],
    "disk_backup.py": ["--gib", "0.5"],
    "cuda_graph.py": ["--gib", "0.5"],
    "preload.py": ["--gib", "0.5"],
    "simulated_training.py": [],
    "rl_colocate.py": ["--weights-gb", "0.5", "--kv-gib", "1", "--width", "2048", "--skip-search"],
}
#: With the defaults, on a simulated machine of its own, as the command `simulate` has it where nothing is said.
OWN_MACHINE = {
    "TMS_SIMULATED_SHARED": f"example-{os.getpid()}",
    "TMS_SIMULATED_MEMORY": "8GiB",
    "TMS_SIMULATED_DEVICES": "1",
}
SHARED_MEMORY = Path(f"/dev/shm/tms_simulated_example-{os.getpid()}")


def call(name: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of an example, and its additional environment."""
    return ([], OWN_MACHINE) if SIMULATED else (CALLS[name], {})


@pytest.mark.parametrize("name", CALLS)
def test_example(name: str) -> None:
    arguments, environment = call(name)
    try:
        done = subprocess_run([str(EXAMPLES / name), *arguments], environment, timeout=280).check()
    finally:  # the last process of a machine removes it by itself, unless it is killed
        if environment:
            SHARED_MEMORY.unlink(missing_ok=True)
    print(done.output)
    assert "  ok: " in done.output


def test_every_example_is_run() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("_")}
    assert files - {"torchrun.py"} == set(CALLS)


def test_torchrun_example() -> None:
    processes = min(torch.cuda.device_count(), 2)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess_run([*command, str(EXAMPLES / "torchrun.py"), "--gib", "0.5"], timeout=120).check()
    print(done.output)
