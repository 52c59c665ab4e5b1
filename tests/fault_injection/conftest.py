"""Every test of this folder has the marker ``faults``. ``pytest -m faults`` injects more than plain ``pytest`` does."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

#: -fno-builtin: its own malloc must not be taken for the C library's. -Bsymbolic-functions: a Python that is not
#: position-independent and uses the address of malloc has another one than the libraries that call it.
COMPILE = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-fPIC", "-fvisibility=hidden", "-fno-builtin", "-shared"]
COMPILE += ["-Wl,-Bsymbolic-functions"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("faults")


@pytest.fixture(scope="session")
def interposer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that lets calls of the C library fail, compiled."""
    compiler = shutil.which(os.environ.get("CC", "cc").split()[0]) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("interposer") / "interposer.so"
    command = [compiler, *COMPILE, *map(str, sorted(HERE.glob("interposer*.c"))), "-o", str(path), "-ldl", "-pthread"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return path


@pytest.fixture
def shared() -> Iterator[Path]:
    """The folder of the shared store, which is not there yet, in memory."""
    parent = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield parent / "store"
    shutil.rmtree(parent)
