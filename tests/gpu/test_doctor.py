"""Guards the doctor on a machine with a GPU and PyTorch: it finds the GPUs of PyTorch, and the library that is preloaded."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from gpu_programs import subprocess_run
from gpu_support import torch

from torch_memory_saver._text import binary_size

pytestmark = pytest.mark.outer


@functools.cache
def rows(preload: bool) -> dict[str, dict[str, Any]]:
    """What the doctor's checks find, by their names. Those of the machine may fail."""
    done = subprocess_run(["-m", "torch_memory_saver", "doctor", "--json"], preload=preload)
    assert done.status in (0, 1) and done.error == ""
    return {row["name"]: row for row in json.loads(done.output)}


def test_the_gpus_are_those_of_pytorch() -> None:
    found = rows(False)
    for name in ("PyTorch", "libcudart", "driver", "CUDA versions", "GPUs", "virtual memory", "pause"):
        assert found[name]["status"] == "ok", found[name]
    assert str(torch.__version__) in found["PyTorch"]["found"]
    assert f"built for CUDA {torch.version.cuda}" in found["PyTorch"]["found"]
    lines = found["GPUs"]["details"]
    assert len(lines) == torch.cuda.device_count()
    for device, line in enumerate(lines):
        properties = torch.cuda.get_device_properties(device)
        assert line.startswith(f"GPU {device}: {properties.name}, {binary_size(properties.total_memory)}, ")
    assert "units of 2 MiB" in found["virtual memory"]["found"]


@pytest.mark.parametrize("preload", [False, True])
def test_the_hook_mode_is_that_of_the_process(preload: bool) -> None:
    found = rows(preload)
    assert found["hook mode"]["found"] == ("preload" if preload else "torch")
    assert found["LD_PRELOAD"]["status"] == "ok"
    assert ("of this package" in found["LD_PRELOAD"]["found"]) == preload
