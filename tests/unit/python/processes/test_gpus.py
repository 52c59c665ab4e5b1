"""Guards what is taken from NVML, and that each of its failures is a sentence."""

from __future__ import annotations

import builtins
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver._processes.gpus import GpuProcess, read_gpus


class FakeNvml:
    """The module pynvml, with two GPUs. The calls named in `broken` fail."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.broken: set[str] = set()
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
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=100, used=30 + handle, free=70 - handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._call("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=5, usedGpuMemory=None if handle else 9)]

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        return f"GPU-{handle}".encode() if handle else f"GPU-{handle}"  # bytes in older releases

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "a GPU"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    return nvml


def test_gpus_and_their_processes(nvml: FakeNvml) -> None:
    found = read_gpus()
    assert found.missing == ""
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.total_bytes, gpu.used_bytes, gpu.free_bytes) for gpu in found.gpus] == [
        (0, "GPU-0", "a GPU", 100, 30, 70),
        (1, "GPU-1", "a GPU", 100, 31, 69),
    ]
    assert [gpu.processes for gpu in found.gpus] == [(GpuProcess(5, 9),), (GpuProcess(5, None),)]
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
    assert found.missing == "NVML does not say how much memory is used on GPU 0, 1"


def test_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    real = builtins.__import__

    def fail(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    monkeypatch.setattr("importlib.import_module", fail)
    found = read_gpus()
    assert found.gpus == () and "pip install nvidia-ml-py" in found.missing
