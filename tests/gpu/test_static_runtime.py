"""Guards that a program with NVIDIA's static CUDA runtime is not managed and not affected by the preload library, and that
the doctor names it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_programs import preload_environment
from gpu_support import REPOSITORY, core, cuda_runtime
from static_program import STATIC_MAIN, check_static_program

LIBRARY = "libcudart_static.a"

pytestmark = [
    pytest.mark.outer,
    pytest.mark.real_gpu("the static CUDA runtime calls functions of the driver that the simulated GPU does not have"),
]


def find_static_runtime() -> Path | None:
    """The library beside the runtime that torch has loaded, or in the toolkit of nvcc."""
    folders = [Path(cuda_runtime()._name).parent]
    if (nvcc := shutil.which("nvcc")) is not None:
        folders += [Path(nvcc).resolve().parent.parent / name for name in ("lib64", "lib")]
    return next((folder / LIBRARY for folder in folders if (folder / LIBRARY).is_file()), None)


def test_a_static_runtime(tmp_path: Path) -> None:
    compiler, library = shutil.which("cc"), find_static_runtime()
    if compiler is None or library is None:
        pytest.skip(f"needs a C compiler named cc, and {LIBRARY} (pip install nvidia-cuda-runtime)")
    program = tmp_path / STATIC_MAIN.stem
    options = ["-std=gnu11", "-D_GNU_SOURCE", f"-I{REPOSITORY / 'csrc'}", f"-DTMS_INTERFACE={core.INTERFACE}u"]
    libraries = [str(library), "-ldl", "-lpthread", "-lrt"]
    subprocess.run([compiler, *options, str(STATIC_MAIN), *libraries, "-o", str(program)], check=True)
    check_static_program(program, preload_environment(os.environ))
