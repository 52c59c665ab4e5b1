"""Guards what is taken from NVML, and that each of its failures is a sentence."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from torch_memory_saver.observe import _nvml
from torch_memory_saver.observe._nvml import DeviceProcess, Nvml, read_gpus

#: Functions of the driver's library.
LIBRARY = ("nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetCount_v2")


class FakeNvml:
    """The driver's library, with two GPUs. The calls named in `broken` fail."""

    NVMLError = _nvml._Library.NVMLError

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.lost: int | None = None  # this GPU
        self.migs: dict[int, int] = {}  # of the GPU with this number: how many MIG devices
        self.open = 0

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self._call("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._call("nvmlDeviceGetCount")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        self._call("nvmlDeviceGetMaxMigDeviceCount")
        return 3 if handle in self.migs else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:
        if index >= self.migs[handle]:
            raise self.NVMLError("Not Found")
        return 10 * (handle + 1) + index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=100, used=30 + handle, free=70 - handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._call("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=5, usedGpuMemory=_nvml._HIDDEN_BYTES if handle else 9)]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"MIG-{handle}" if handle >= 10 else f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "a GPU"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml()
    monkeypatch.setattr(_nvml, "_Library", lambda: nvml)
    return nvml


def test_gpus_and_their_processes(nvml: FakeNvml) -> None:
    found = read_gpus()
    assert found.missing == ""
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.total_bytes, gpu.used_bytes, gpu.free_bytes) for gpu in found.gpus] == [
        (0, "GPU-0", "a GPU", 100, 30, 70),
        (1, "GPU-1", "a GPU", 100, 31, 69),
    ]
    assert [gpu.processes for gpu in found.gpus] == [(DeviceProcess(5, 9),), (DeviceProcess(5, None),)]
    assert nvml.open == 0


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_failure_is_a_sentence(nvml: FakeNvml, call: str) -> None:
    nvml.broken = {call}
    found = read_gpus()
    assert found.gpus == ()
    assert found.missing.startswith("only processes with a page are shown, because NVML")
    assert "Not Supported" in found.missing
    assert nvml.open == 0


def test_what_one_gpu_does_not_say_is_unknown(nvml: FakeNvml) -> None:
    nvml.broken = {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"}
    found = read_gpus()
    assert [(gpu.total_bytes, gpu.used_bytes, gpu.processes) for gpu in found.gpus] == [(None, None, ())] * 2
    assert found.missing == (
        "NVML does not say how much memory is used on GPU 0, 1: Not Supported; "
        "NVML does not list the processes on GPU 0, 1: Not Supported"
    )


def test_a_gpu_that_is_lost_does_not_hide_the_others(nvml: FakeNvml) -> None:
    nvml.lost = 0
    found = read_gpus()
    assert [gpu.index for gpu in found.gpus] == [1]
    assert found.missing == "NVML fails on GPU 0: GPU is lost"
    assert nvml.open == 0


def test_the_mig_devices_of_a_divided_gpu(nvml: FakeNvml) -> None:
    nvml.migs = {1: 2}
    found = read_gpus()
    assert [(gpu.index, gpu.mig, gpu.uuid, gpu.used_bytes) for gpu in found.gpus] == [
        (0, None, "GPU-0", 30),
        (1, 0, "MIG-20", 50),
        (1, 1, "MIG-21", 51),
    ]
    assert found.missing == ""
    nvml.migs = {1: 0}  # divided, and no device made yet
    assert [(gpu.index, gpu.mig) for gpu in read_gpus().gpus] == [(0, None), (1, None)]


def test_an_old_driver_knows_no_mig(nvml: FakeNvml) -> None:
    nvml.broken = {"nvmlDeviceGetMaxMigDeviceCount"}
    assert [(gpu.index, gpu.mig) for gpu in read_gpus().gpus] == [(0, None), (1, None)]


def test_the_driver_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError("no such file")))
    assert read_gpus().missing.endswith("because the driver's library of NVML cannot be loaded: no such file")
    library = Mock(**{f"{name}.return_value": 0 for name in LIBRARY}, **{"nvmlErrorString.return_value": b"why"})
    monkeypatch.setattr("ctypes.CDLL", Mock(return_value=library))
    library.nvmlInit_v2.return_value = 9
    assert read_gpus().missing.endswith("because NVML cannot be used: nvmlInit_v2 failed with 9 (why)")
    assert not library.nvmlShutdown.called
    library.nvmlInit_v2.return_value = 0
    library.nvmlDeviceGetCount_v2.return_value = 15
    assert read_gpus().missing.endswith("because NVML fails: nvmlDeviceGetCount_v2 failed with 15 (why)")
    assert library.nvmlShutdown.call_count == 1


def test_the_array_of_processes_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library says how many there are, and one more begins before the next call."""
    lengths = []

    def processes(_handle: object, count: Any, rows: Any) -> int:
        lengths.append(len(rows))
        count._obj.value = 100 * len(lengths)
        if len(rows) < count._obj.value:
            return 7
        for number in range(count._obj.value):
            rows[number].pid, rows[number].usedGpuMemory = number, 5
        return 0

    library = Mock(**{f"{name}.return_value": 0 for name in LIBRARY})
    library.nvmlDeviceGetHandleByUUID.return_value = 0
    library.nvmlDeviceGetComputeRunningProcesses_v3 = processes
    monkeypatch.setattr("ctypes.CDLL", Mock(return_value=library))
    assert Nvml().processes("GPU-0") == [DeviceProcess(number, 5) for number in range(200)]
    assert lengths == [64, 200]
    assert ctypes.sizeof(_nvml._Process) == 24
