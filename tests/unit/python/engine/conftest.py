"""Fixtures of the tests of the saver."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_memory_saver._engine import engine, preparation
from torch_memory_saver._torch.memory.live_blocks import ResumedBlocks
from torch_memory_saver.saver import TorchMemorySaver


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two threads."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def guard(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Guard mode, with no record of earlier resumes."""
    resumed_blocks = ResumedBlocks()
    for module in (engine, preparation):
        monkeypatch.setattr(module, "resumed_blocks", resumed_blocks)
    saver.guard = True
    yield
    saver.guard = False
