"""A tool for NVTX: compiled from tests/unit/support/nvtx_recorder.c, and what it has recorded."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from torch_memory_saver import _core

__all__ = ["Ranges", "compile_recorder"]

_REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = _REPOSITORY / "tests/unit/support"


def _nvtx_include() -> str | None:
    """The folder with the headers of NVTX, as setup.py finds it."""
    specification = importlib.util.spec_from_file_location("setup_for_nvtx", _REPOSITORY / "setup.py")
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    found: str | None = script.find_nvtx_include()
    return found


def compile_recorder(folder: Path) -> Path:
    """The library for NVTX_INJECTION64_PATH. Skips the test where it cannot be made, or where no range is built in."""
    if not _core.NVTX:
        pytest.skip("this build of the library has no NVTX ranges: the headers of nvtx3 were not found")
    if not (_REPOSITORY / "setup.py").is_file():
        pytest.skip("needs the source tree")
    compiler, include = shutil.which("cc"), _nvtx_include()
    if compiler is None or include is None:
        pytest.skip("needs a C compiler named cc, and the headers of nvtx3 (pip install nvidia-nvtx)")
    library = folder / "recorder.so"
    options = [
        "-std=c11",
        "-D_GNU_SOURCE",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
    ]
    options += [*shlex.split(os.environ.get("CFLAGS", "")), f"-I{_SOURCES}", "-isystem", include]
    subprocess.run([compiler, *options, str(_SOURCES / "nvtx_recorder.c"), "-ldl", "-o", str(library)], check=True)
    return library


class Ranges:
    """The record of one process: for each thread, its ranges from the outermost on, as they end."""

    def __init__(self, path: Path) -> None:
        self.told: list[str] = []
        self.ranges: list[tuple[str, ...]] = []
        self.threads: dict[str, set[str]] = defaultdict(set)
        self.bytes: dict[tuple[str, ...], int] = defaultdict(int)
        opened: dict[str, list[str]] = defaultdict(list)
        for line in path.read_text().splitlines():
            thread, what, *rest = line.split(" ", 4)
            if what == "push":
                _category, size, message = rest
                opened[thread].append(message.removeprefix("*"))
                self.bytes[tuple(opened[thread])] += 0 if size == "-" else int(size)
            elif what == "pop":
                assert opened[thread], f"{line}: nothing is open"
                self.ranges.append(tuple(opened[thread]))
                self.threads[opened[thread][0]].add(thread)
                opened[thread].pop()
            else:
                self.told.append(" ".join((what, *rest)))
        assert [stack for stack in opened.values() if stack] == [], "all ranges have ended"
