"""Guards that PyTorch and NCCL behave on the simulated GPU as they were recorded to on a real one. tests/conformance/pytorch
holds the behaviours, and the records of real GPUs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "tests" / "conformance" / "pytorch"
RECORDS = sorted(SUITE.glob("recorded_*.json"))
TIMEOUT_S = 600
#: PyTorch itself ends the process: an exception leaves a destructor.
DIE = {"captures.another_capture"}

sys.path.insert(0, str(SUITE.parent))
import compare  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TMS_SIMULATED_KERNELS") != "cpu",
        reason="needs PyTorch's operators on the simulated GPU (--kernels cpu)",
    ),
    pytest.mark.skipif(torch.cuda.device_count() != 2, reason="the records are of two devices"),
]


@functools.cache
def record() -> dict[str, Any]:
    """The behaviour of the simulated GPU."""
    command = [sys.executable, str(ROOT / "tools" / "record_gpu.py"), "--suite", "pytorch"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    recorded: dict[str, Any] = json.loads(done.stdout)
    return recorded


def test_every_behaviour_can_be_observed() -> None:
    seen = record()["behaviours"]
    assert {name for name, each in seen.items() if "died" in each} == DIE
    assert [name for name, each in seen.items() if "failed" in each] == []
    assert len(seen) > len(DIE)


NO_RECORD = pytest.param(None, id="none", marks=pytest.mark.skip("no record: run 'make conformance' on two GPUs"))


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in RECORDS] or [NO_RECORD])
def test_like_the_recorded_gpu(path: Path) -> None:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    result = compare.compare(recorded, record(), compare.read_known(SUITE))
    lines = [str(difference) for difference in result.unexpected]
    lines += [f"known_differences.json lists what does not differ any more: {entry}" for entry in result.outdated]
    assert not lines, "\n".join(["", *lines])
