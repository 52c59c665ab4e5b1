"""Fixtures of the tests of the ledger: what its sources say."""

from __future__ import annotations

import pytest
from ledger_sources import MIB, FakeNvml

from torch_memory_saver import _core
from torch_memory_saver.observe._ledger import sources as taking


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The NVML that a ledger asks. Without a driver, until the test says otherwise."""
    nvml = FakeNvml()
    monkeypatch.setattr(taking, "_nvml", lambda: nvml)
    monkeypatch.setattr(_core, "device_info", lambda device: _core.DeviceInfo((f"GPU-{device}", 1024 * MIB)))
    return nvml


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The used bytes of each device, as the driver tells a ledger, of 1024 MiB."""
    used = {0: 100 * MIB, 1: 7 * MIB}
    monkeypatch.setattr(_core, "device_memory", lambda device: _core.DeviceMemory((1024 * MIB - used[device], 1024 * MIB)))
    return used
