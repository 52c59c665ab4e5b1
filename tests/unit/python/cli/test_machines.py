"""Guards the sizes of the demo on a GPU: they fit into what is free, and too little is one sentence."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock

import pytest

from torch_memory_saver._cli import machines
from torch_memory_saver.errors import InvalidStateError

MIB = 1 << 20


def machine(monkeypatch: pytest.MonkeyPatch, free: int) -> machines.GpuMachine:
    torch: Any = MagicMock()
    monkeypatch.setattr(machines, "_TorchBuffer", MagicMock())
    torch.cuda.get_device_name.return_value = "GPU of a test"
    torch.cuda.mem_get_info.return_value = (free, 80 << 30)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return machines.GpuMachine()


@pytest.mark.parametrize("free", [32 * MIB, 1000 * MIB, 79 << 30])
def test_the_sizes_fit(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    gpu = machine(monkeypatch, free)
    assert 0 < gpu.weights_bytes < gpu.cache_bytes < gpu.trainer_bytes
    assert gpu.weights_bytes + gpu.cache_bytes + gpu.trainer_bytes < free
    assert gpu.weights_bytes % (2 * MIB) == 0


def test_a_gpu_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidStateError, match=r"needs 32 MiB of free memory on the GPU: GPU of a test, and 31 MiB are free"
    ):
        machine(monkeypatch, 32 * MIB - 1)
