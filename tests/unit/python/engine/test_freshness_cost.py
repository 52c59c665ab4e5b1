"""Guards what check_fresh() costs: few copies, no kernel, no host memory that stays, and nothing where guard mode is off."""

from __future__ import annotations

from typing import Any

import pytest
from fake_torch import FakeTorch
from fresh_checks import LIVE, MIB, cycle, in_region

from torch_memory_saver import _core
from torch_memory_saver._engine import engine, freshness
from torch_memory_saver.saver import TorchMemorySaver

pytestmark = pytest.mark.usefixtures("guard")


def test_nothing_is_recorded_where_guard_mode_is_off(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_region(saver, fake_torch)
    noted: list[Any] = []
    monkeypatch.setattr(engine.resumed_blocks, "note", lambda *arguments: noted.append(arguments))
    saver.guard = False
    cycle(saver)
    assert noted == []
    saver.guard = True
    cycle(saver)
    assert len(noted) == 1


def test_the_record_costs_no_driver_call(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_region(saver, fake_torch)
    cycle(saver)

    def calls() -> list[str]:
        simulator.start_trace()
        cycle(saver)
        return list(simulator.trace())

    recorded = calls()
    monkeypatch.setattr(engine.resumed_blocks, "note", lambda *arguments: None)
    assert calls() == recorded


def test_a_check_copies_by_few_calls_and_runs_no_kernel(
    saver: TorchMemorySaver, fake_torch: FakeTorch, simulator: Any
) -> None:
    address = in_region(saver, fake_torch, size=16 * MIB)
    fake_torch.split(address, *[(64 << 10, LIVE)] * 256)
    cycle(saver)
    contents = simulator.read(address, 16 * MIB)
    simulator.start_trace()
    report = saver.check_fresh()
    made = simulator.trace()
    assert len(report.unwritten) == 256
    assert made.count("cuMemcpyBatchAsync") <= 256 * freshness.PARTS // 64
    assert made.count("cuMemcpyDtoHAsync") <= 1, "the last one, if it is alone"
    assert not [name for name in made if "Launch" in name or "Memset" in name or "HtoD" in name or "MemMap" in name]
    assert simulator.read(address, 16 * MIB) == contents


def test_host_memory_of_samples_is_released(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    in_region(saver, fake_torch)
    cycle(saver)
    saver.check_fresh(whole=True)
    assert _core.counters()["host_backup_bytes"] == 0
