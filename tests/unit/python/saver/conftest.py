"""Fixtures of the tests of the saver."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_torch import FakeTorch
from recorded_hooks import Recorder

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
