"""Guards the context in the ledger where NVML hides it: a child process measures it, if the caller asks for that."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ledger_sources import MIB, FakeNvml, sizes

from torch_memory_saver import TorchMemorySaver, _core, errors
from torch_memory_saver.observe._ledger import sources as taking
from torch_memory_saver.observe._ledger.sources import measure_context_bytes
from torch_memory_saver.observe._nvml import DeviceProcess


@pytest.mark.usefixtures("fake_torch", "memory")
def test_the_context_is_measured_in_a_child(
    saver: TorchMemorySaver, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[int, str]] = []

    def measure(device: int, uuid: str) -> int:
        measured.append((device, uuid))
        return 30 * MIB

    monkeypatch.setattr(taking, "measure_context_bytes", measure)
    ledger = saver.ledger(measure_context=True)[0]
    assert (sizes(ledger)["context"], sizes(ledger)["processes"]) == (30 * MIB, 70 * MIB)
    nvml.says = [DeviceProcess(os.getpid(), 10 * MIB)]
    assert sizes(saver.ledger(measure_context=True)[0])["context"] == 10 * MIB
    assert measured == [(0, "GPU-0")]


def test_what_a_child_process_takes(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_context_bytes(0, "") == 0  # a simulated context takes no memory
    assert measure_context_bytes(0, _core.device_info(1).uuid) == 0
    free = iter((700 * MIB, 650 * MIB, 640 * MIB, 650 * MIB))
    monkeypatch.setattr(_core, "device_memory", lambda device: _core.DeviceMemory((next(free), 1024 * MIB)))
    assert measure_context_bytes(0, "") == 50 * MIB
    assert measure_context_bytes(0, "") == 0  # another process has freed memory meanwhile


def test_the_child_does_nothing_else(simulator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With TMS_DEBUG and the like the program's sitecustomize imports this package. And if the driver fails, the child
    ends."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert measure_context_bytes(0, "") == 0
    assert not (tmp_path / "imported").exists()
    children: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        children.append(real(*arguments, **options))
        return children[-1]

    def fail(_device: int) -> _core.DeviceMemory:
        if children:
            raise errors.DriverError("the device is lost", operation="ledger")
        return _core.DeviceMemory((700 * MIB, 1024 * MIB))

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(_core, "device_memory", fail)
    with pytest.raises(errors.DriverError, match="the device is lost"):
        measure_context_bytes(0, "")
    assert [child.returncode for child in children] == [0]


def test_a_child_process_that_makes_no_context(simulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_CUDA_DRIVER", "/nonexistent/libcuda.so.1")
    with pytest.raises(errors.DriverError, match=r"context of device 1 could not .*: OSError: /nonexistent/libcuda"):
        measure_context_bytes(1, "")
