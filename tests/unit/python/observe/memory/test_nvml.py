"""Guards this process's share by NVML: its own entry, and nothing where that is hidden."""

from __future__ import annotations

import logging
import os
from typing import Any
from unittest.mock import Mock

import pytest

from torch_memory_saver.observe import _nvml
from torch_memory_saver.observe._nvml import ProcessShare

MIB = 1 << 20


class FakeNvml:
    """The driver's library: one device, GPU-0, or a MIG device."""

    NVMLError = _nvml._Library.NVMLError

    def __init__(self) -> None:
        self.rows: list[tuple[int, int | None]] = []
        self.initialized = self.looked_up = 0
        self.fails_to_initialize = False
        self.uuid = "GPU-0"

    def nvmlInit(self) -> None:
        self.initialized += 1
        if self.fails_to_initialize:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.looked_up += 1
        if uuid != self.uuid:
            raise self.NVMLError("Not Found")
        return "the handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        assert handle == "the handle"
        return [_nvml._Process(pid, _nvml._HIDDEN_BYTES if size is None else size) for pid, size in self.rows]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml()
    monkeypatch.setattr(_nvml, "_Library", lambda: nvml)
    return nvml


def test_the_entry_of_this_process(nvml: FakeNvml) -> None:
    nvml.rows = [(1, 7 * MIB), (os.getpid(), 5 * MIB), (2, 9 * MIB)]
    share = ProcessShare()
    assert [share.bytes("GPU-0", 5 * MIB), share.bytes("GPU-0", 0)] == [5 * MIB] * 2
    assert (nvml.initialized, nvml.looked_up) == (1, 1)


def test_the_share_of_a_mig_device(nvml: FakeNvml) -> None:
    """CUDA writes its UUID with "GPU-"."""
    nvml.uuid, nvml.rows = "MIG-5d5b", [(os.getpid(), 5 * MIB)]
    assert ProcessShare().bytes("GPU-5d5b", 0) == 5 * MIB


@pytest.mark.parametrize(
    ("rows", "known"),
    [([], 0), ([(1, 7 * MIB)], 0), ([(os.getpid(), None)], 0), ([(os.getpid(), 5 * MIB)], 6 * MIB)],
    ids=["empty", "others", "no bytes", "of another process with this number"],
)
def test_a_hidden_share(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture, rows: list[tuple[int, int | None]], known: int
) -> None:
    nvml.rows = rows
    share = ProcessShare()
    with caplog.at_level(logging.INFO):
        assert [share.bytes("GPU-0", known), share.bytes("GPU-0", known)] == [None, None]
    (record,) = caplog.records
    assert (record.levelno, "--pid=host" in record.getMessage()) == (logging.INFO, True)


def test_a_failure_of_nvml(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    share = ProcessShare()
    with caplog.at_level(logging.INFO):
        assert share.bytes("GPU-1", 0) is None
        nvml.fails_to_initialize = True
        share = ProcessShare()
        assert [share.bytes("GPU-0", 0), share.bytes("GPU-0", 0)] == [None, None]
    assert ["Not Found" in caplog.text, "Driver Not Loaded" in caplog.text, nvml.initialized] == [True, True, 2]


def test_without_the_driver(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError("no such file")))
    with caplog.at_level(logging.INFO):
        assert ProcessShare().bytes("GPU-0", 0) is None
    assert "the driver's library of NVML cannot be loaded: no such file" in caplog.text
