"""A test that fails with a managed tensor and a recording, and a test that must find neither (test_suite.py)."""

from __future__ import annotations

from gpu_support import MIB, core, empty, saver, torch

from torch_memory_saver.observe import memory


def test_that_fails() -> None:
    memory.record_history(1000)
    with saver.region(tag="a"):
        tensor = empty(32 * MIB)
    assert tensor.numel() == 0


def test_after_it() -> None:
    assert not torch._C._cuda_isHistoryEnabled()
    assert core.counters()["allocations"] == 0
