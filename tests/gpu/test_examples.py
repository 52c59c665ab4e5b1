"""Every example runs on the GPU, in small, and its own checks hold. Their output is shown by `pytest -rP`."""

from __future__ import annotations

import pytest
from gpu_support import REPOSITORY, subprocess_run, torch

pytestmark = [pytest.mark.outer, pytest.mark.timeout(300)]

EXAMPLES = REPOSITORY / "examples"
CALLS: dict[str, list[str]] = {
    "simple.py": ["--gib", "1"],
    "tags.py": ["--gib", "1"],
    "cpu_backup.py": ["--gib", "0.5"],
    "disk_backup.py": ["--gib", "0.5"],
    "cuda_graph.py": ["--gib", "0.5"],
    "preload.py": ["--gib", "0.5"],
    "rl_colocate.py": ["--weights-gb", "0.5", "--kv-gib", "1", "--width", "2048", "--skip-search"],
}


NEEDS_KERNELS = pytest.mark.real_gpu("matrix products are not simulated")
#: Examples that multiply matrices.
WITH_PRODUCTS = {"cuda_graph.py", "preload.py", "rl_colocate.py"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS_KERNELS) if name in WITH_PRODUCTS else name for name in CALLS]
)
def test_example(name: str) -> None:
    done = subprocess_run([str(EXAMPLES / name), *CALLS[name]], timeout=280).check()
    print(done.output)


def test_every_example_is_run() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("_")}
    assert files - {"torchrun.py"} == set(CALLS)


@pytest.mark.real_gpu("NCCL")
def test_torchrun_example() -> None:
    processes = min(torch.cuda.device_count(), 2)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess_run([*command, str(EXAMPLES / "torchrun.py"), "--gib", "0.5"], timeout=120).check()
    print(done.output)
