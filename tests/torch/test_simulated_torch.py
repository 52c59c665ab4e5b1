"""That PyTorch's CUDA build works on the simulated GPU at all, and that the package is in the mode that was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import torch_memory_saver
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    saver.resume()
    torch_memory_saver.empty_cache()
    assert all(tag.resident_bytes == 0 for tag in torch_memory_saver.stats().tags.values())


def test_the_machine_is_as_it_was_asked_for() -> None:
    assert torch.cuda.device_count() == int(os.environ["TMS_SIMULATED_DEVICES"])
    for device in range(torch.cuda.device_count()):
        assert torch.cuda.mem_get_info(device)[1] == int(os.environ["TMS_SIMULATED_MEMORY"])


def test_the_hook_mode_is_the_one_that_was_asked_for() -> None:
    preloaded = "torch_memory_saver_hook_mode_preload" in os.environ["LD_PRELOAD"]
    with saver.region(tag="mode"):
        pass
    assert saver.hook_mode == ("preload" if preloaded else "torch")


def test_bytes_come_back_as_they_went() -> None:
    there = torch.arange(MIB, dtype=torch.int64)
    assert torch.equal(there.cuda().cpu(), there)


def test_a_tensor_survives_a_pause() -> None:
    values = torch.arange(MIB, dtype=torch.int32)
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = values.to("cuda")
    address = tensor.data_ptr()
    free = torch.cuda.mem_get_info()[0]
    saver.pause("weights")
    assert torch.cuda.mem_get_info()[0] >= free + 4 * MIB
    saver.resume("weights")
    assert tensor.data_ptr() == address
    assert torch.equal(tensor.cpu(), values)
    del tensor


def test_child_processes_are_simulated_too() -> None:
    text = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == os.environ["TMS_SIMULATED_DEVICES"]
    assert "Simulated GPU" in done.stdout
