"""A fresh folder of the shared store in memory, which the variable names, for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_store import MadeStore


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on /dev/shm of this test alone."""
    folder = Path(tempfile.mkdtemp(prefix="torch_memory_saver-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def made(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeStore]:
    """A store without objects and holders."""
    with MadeStore(memory / "store") as store:
        monkeypatch.setenv("TMS_SHARED_DIR", str(store.path))
        yield store
