"""Guards the counts of memory that is not managed: by the library that called, until it is freed by whomever."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Compile = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def two_libraries(compile_program: Compile, libraries: Any) -> dict[str, str]:
    runtime = (f"-L{libraries.runtime_folder}", "-l:libcudart.so.13")
    flags = ("-shared", "-fPIC", *runtime)
    return {
        name.upper(): str(compile_program("ledger_library", *flags, output=f"lib{name}.so")) for name in ("first", "second")
    }


@pytest.mark.parametrize(
    "scenario",
    [
        "by_library",
        "by_device",
        "after_dlclose",
        "what_fails_is_as_before",
        "managed_memory_is_not_counted",
        "a_reset_device",
        "the_drivers_memory",
        "physical_memory",
        "imported_memory_is_another_processes",
        "a_thread_that_a_constructor_waits_for",
        "many_threads",
    ],
)
def test_scenario(
    compile_program: Compile,
    run: Run,
    libraries: Any,
    two_libraries: dict[str, str],
    cuda_header: str,
    scenario: str,
) -> None:
    program = compile_program("ledger", cuda_header, f"-L{libraries.runtime_folder}", "-l:libcudart.so.13")
    done = run([program, scenario], env=two_libraries)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("scenario", ["in_stream_order", "pitched_memory"])
def test_functions_that_the_simulated_gpu_does_not_have(compile_program: Compile, run: Run, scenario: str) -> None:
    library = compile_program("ledger_runtime", "-shared", "-fPIC", output="libledger_runtime.so")
    program = compile_program("ledger_stub", f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-lledger_runtime")
    done = run([program, scenario])
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
