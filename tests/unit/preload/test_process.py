"""Guards fork, exec, threads and the end of processes; other preloaded libraries; runtimes outside the global scope."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Any: pytest shares no module with conftest.py, where the types of the fixtures are.
Compile = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Scenario = Callable[..., "subprocess.CompletedProcess[str]"]

EVERYTHING = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}


@pytest.mark.parametrize("scenario", ["fork_before_use", "fork_and_exec", "threads", "free_after_deinitialisation"])
def test_scenario_without_log_output(run_scenario: Scenario, scenario: str) -> None:
    run_scenario("process", scenario)


def test_a_forked_child_frees_its_parents_memory_without_harm(run_scenario: Scenario) -> None:
    done = run_scenario("process", "fork_after_use", silent=False)
    # The child's pause, whose error has the reason.
    assert len(done.stderr.splitlines()) == 1
    assert " error: pause: " in done.stderr and "fork" in done.stderr


def test_threads_that_allocate_while_the_process_exits(run_scenario: Scenario) -> None:
    for _ in range(5):
        run_scenario("process", "threads_during_exit", env={"TMS_SIMULATED_DEVICES": "1"})


@pytest.mark.parametrize("scenario", ["managed", "ordinary", "captures"])
def test_runtime_that_was_opened_for_one_library_only(
    compile_program: Compile, run: Run, libraries: Any, scenario: str
) -> None:
    library = compile_program(
        "local_library",
        "-shared",
        "-fPIC",
        f"-L{libraries.runtime_folder}",
        "-l:libcudart.so.13",
        output="liblocal_library.so",
    )
    done = run([compile_program("local_main"), library, scenario])
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_runtime_with_a_hashed_name(compile_program: Compile, run: Run, libraries: Any, tmp_path: Path) -> None:
    """As Python packages rename it."""
    folder = tmp_path / "vendored"
    folder.mkdir()
    name = "libcudart-d0da41ae.so.11.0"
    (folder / name).symlink_to(libraries.simulator)
    library = compile_program(
        "local_library", "-shared", "-fPIC", f"-L{folder}", f"-l:{name}", output="libhashed_library.so"
    )
    done = run([compile_program("local_main"), library, "ordinary"], env={"LD_LIBRARY_PATH": str(folder)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(("enable", "expected"), [("1", "managed 1 0\n"), ("0", "managed 0 1\n")])
def test_runtime_that_is_preloaded_after_us(
    compile_program: Compile, run: Run, libraries: Any, stub_runtime: Path, enable: str, expected: str
) -> None:
    """The program is linked with a runtime, too, which must not be the one that answers."""
    done = run(
        [compile_program("first_call", str(stub_runtime))],
        preload=[libraries.preload, libraries.simulator],
        env={"LD_LIBRARY_PATH": str(stub_runtime.parent), "TMS_INIT_ENABLE": enable},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_library_that_is_taken_for_the_runtime_does_not_call_itself(
    compile_program: Compile, run: Run, libraries: Any, tmp_path: Path
) -> None:
    disguise = tmp_path / "libcudart.so.13"
    disguise.symlink_to(libraries.preload)
    done = run([compile_program("without_runtime")], preload=[disguise], env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_two_copies_of_the_library(cuda_program: Callable[[str], Path], run: Run, libraries: Any, tmp_path: Path) -> None:
    """Two packages that each preload their own copy: the first one manages, the second one forwards."""
    copy = tmp_path / libraries.preload.name
    copy.write_bytes(libraries.preload.read_bytes())
    for scenario in ("toggled_region", "free_in_every_state"):
        done = run([cuda_program("memory"), scenario], preload=[libraries.preload, copy])
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_without_any_runtime_there_is_a_clear_error_once(compile_program: Compile, run: Run, tmp_path: Path) -> None:
    done = run([compile_program("without_runtime")], env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert len(done.stderr.splitlines()) == 1
    assert " error: cudaMalloc failed: no loaded CUDA runtime" in done.stderr


def test_without_any_runtime_no_capture_begins(compile_program: Compile, run: Run, tmp_path: Path) -> None:
    done = run([compile_program("without_runtime"), "captures"], env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert len(done.stderr.splitlines()) == 1
    assert " error: cudaStreamBeginCapture failed: no loaded CUDA runtime" in done.stderr


def test_without_a_state_every_function_says_why(run_scenario: Scenario) -> None:
    run_scenario("without_state", "functions")


def test_without_a_state_the_hooks_only_call_the_runtime(run_scenario: Scenario) -> None:
    run_scenario("without_state", "hooks")


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("scenario", ["ordinary", "managed"])
def test_beside_another_preloaded_library(
    compile_program: Compile,
    cuda_program: Callable[[str], Path],
    run: Run,
    libraries: Any,
    scenario: str,
    ours_first: bool,
) -> None:
    neighbour = compile_program("neighbour", "-shared", "-fPIC", output="libneighbour.so")
    order = [libraries.preload, neighbour] if ours_first else [neighbour, libraries.preload]
    done = run([cuda_program("beside_neighbour"), scenario], preload=order)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_allocations_inside_an_allocation_are_not_the_programs(
    compile_program: Compile, cuda_program: Callable[[str], Path], run: Run, libraries: Any
) -> None:
    neighbour = compile_program("neighbour", "-shared", "-fPIC", output="libneighbour.so")
    done = run([cuda_program("beside_neighbour"), "nested"], preload=[libraries.preload, neighbour])
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("scenario", ["everything_managed", "threads"])
def test_beside_jemalloc(
    cuda_program: Callable[[str], Path], run: Run, libraries: Any, jemalloc: Path, scenario: str, ours_first: bool
) -> None:
    """It replaces malloc, and looks up functions before its constructor has run."""
    order = [libraries.preload, jemalloc] if ours_first else [jemalloc, libraries.preload]
    done = run([cuda_program("process"), scenario], preload=order, env=EVERYTHING)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("flags", [[], ["-fsanitize=address"]], ids=["ordinary", "instrumented"])
@pytest.mark.parametrize("scenario", ["everything_managed", "threads"])
def test_behind_the_runtime_of_asan(
    compile_program: Compile, run: Run, libraries: Any, asan_runtime: Path, scenario: str, flags: list[str]
) -> None:
    """ASan's runtime has to be the first library. It also stands before functions that the library calls, such as mmap."""
    linked = (f"-L{libraries.runtime_folder}", "-l:libcudart.so.13")
    program = compile_program("process", *flags, *linked, output=f"process_asan{len(flags)}")
    options = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"}
    done = run([program, scenario], preload=[asan_runtime, libraries.preload], env=EVERYTHING | options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
