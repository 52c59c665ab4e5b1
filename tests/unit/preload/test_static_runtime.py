"""Guards that a program which contains its CUDA runtime is not managed and not affected, and that the doctor names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from static_program import STATIC_MAIN, check_static_program

Compile = Callable[..., Path]


def test_a_static_runtime(compile_program: Compile, libraries: Any, environment: dict[str, str], tmp_path: Path) -> None:
    """On a real GPU with NVIDIA's own: tests/gpu/test_static_runtime.py."""
    # A copy: a link would have the name of the simulated GPU in the list of mapped files.
    driver = tmp_path / "libcuda.so.1"
    shutil.copy(libraries.simulator, driver)
    program = compile_program(STATIC_MAIN.stem, str(STATIC_MAIN.with_name("static_runtime.c")))
    check_static_program(program, environment | {"LD_LIBRARY_PATH": str(tmp_path), "TMS_CUDA_DRIVER": str(driver)})
