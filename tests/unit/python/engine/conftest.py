"""Fixtures of the tests of the saver."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_memory_saver._engine import engine
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
    monkeypatch.setattr(engine, "resumed_blocks", ResumedBlocks())
    saver.guard = True
    yield
    saver.guard = False
