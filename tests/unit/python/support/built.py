"""The libraries of the package under test, and the requirements of their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_memory_saver import _core

REPOSITORY = Path(__file__).resolve().parents[4]
PACKAGE = Path(_core.__file__).parent
LIBRARIES = {
    "core": PACKAGE / "_core.abi3.so",
    "preload": PACKAGE.parent / "torch_memory_saver_hook_mode_preload.abi3.so",
    "simulator": PACKAGE / "_simulated_cuda.so",
}
needs_source_tree = pytest.mark.skipif(not (REPOSITORY / "setup.py").is_file(), reason="needs the source tree")
