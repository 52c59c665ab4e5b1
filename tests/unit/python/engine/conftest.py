"""Fixtures of the tests of the saver."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_torch import FakeTorch
from ledger_sources import MIB, FakeNvml
from recorded_hooks import Recorder

from torch_memory_saver import _core
from torch_memory_saver._engine import engine
from torch_memory_saver._torch.live import ResumedBlocks
from torch_memory_saver.observe._ledger import sources as taking
from torch_memory_saver.saver import TorchMemorySaver


@pytest.fixture
def hooks(simulator: Any, saver: TorchMemorySaver, fake_torch: FakeTorch) -> Iterator[Recorder]:
    """Hooks that record how they are called. Removed at the end."""
    recorder = Recorder(saver)
    yield recorder
    recorder.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two threads."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


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


@pytest.fixture
def guard(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Guard mode, with no record of earlier resumes."""
    monkeypatch.setattr(engine, "resumed_blocks", ResumedBlocks())
    saver.guard = True
    yield
    saver.guard = False
