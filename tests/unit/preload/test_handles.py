"""Guards the functions that PyTorch's allocator gets in place of the driver's virtual memory management."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Compile = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: The library that has PyTorch's allocator, and one of PyTorch's others.
ALLOCATOR, OTHER = "libc10_cuda.so", "libtorch_cuda.so"

SCENARIOS = [
    "by_version",
    "by_name",
    "another_library_uses_the_table",
    "another_library_looks_up",
    "mixed_range",
    "handles_of_both_kinds",
    "fabric_handles",
    "too_little_memory",
    "a_forked_child",
    "a_map_waits_without_the_gil",
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_memory_that_pytorch_maps_itself(
    compile_program: Compile,
    cuda_program: Callable[..., Path],
    run: Run,
    libraries: Any,
    cuda_header: str,
    scenario: str,
) -> None:
    runtime = (f"-L{libraries.runtime_folder}", "-l:libcudart.so.13")
    flags = (cuda_header, "-shared", "-fPIC", *runtime)
    environment = {
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
        "ALLOCATOR": str(compile_program("handles_library", *flags, output=ALLOCATOR)),
        "OTHER": str(compile_program("handles_library", *flags, output=OTHER)),
    }
    done = run([compile_program("handles", cuda_header, "-rdynamic", *runtime), scenario], env=environment)
    if scenario == "handles_of_both_kinds":  # one line says why the properties of paused memory are not known
        assert "paused" in done.stderr
    else:
        assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
