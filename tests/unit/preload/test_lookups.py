"""Guards that libraries which look up the driver's functions themselves are counted, and that no other look-up changes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Compile = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

DRIVER = "libcuda.so.1"

#: A driver gives its own functions, not those that the linker finds first.
OF_A_DRIVER = ("-shared", "-fPIC", "-Wl,-Bsymbolic-functions")
#: For tests of what only the ledger library does.
of_the_ledger = pytest.mark.parametrize("libraries", ["ledger"], indirect=True)


@pytest.fixture
def driver_folder(libraries: Any, tmp_path: Path) -> Path:
    """The simulated GPU under the driver's name only: nothing is linked with it."""
    (tmp_path / DRIVER).symlink_to(libraries.simulator)
    return tmp_path


@pytest.fixture
def lookups(compile_program: Compile, cuda_header: str, driver_folder: Path) -> dict[str, str]:
    """The environment of the program lookups."""
    names = ("first", "second")
    flags = (cuda_header, "-shared", "-fPIC")
    paths = {name.upper(): str(compile_program("lookups_library", *flags, output=f"lib{name}_lookups.so")) for name in names}
    stub = compile_program("lookups_driver", *OF_A_DRIVER, output="libstub.so")
    return {**paths, "STUB": str(stub), "LD_LIBRARY_PATH": str(driver_folder)}


SCENARIOS = [
    "local_libraries",
    "global_libraries",
    "physical_memory",
    "by_symbol",
    "after_dlclose",
    "managed_memory_is_not_counted",
    "a_function_of_another_library",
    "many_threads",
    "a_thread_that_a_constructor_waits_for",
    "a_forked_child",
]


@of_the_ledger
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_libraries_that_find_the_driver(
    compile_program: Compile, run: Run, libraries: Any, lookups: dict[str, str], cuda_header: str, scenario: str
) -> None:
    done = run([compile_program("lookups", cuda_header), scenario], env=lookups)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@of_the_ledger
def test_a_driver_that_the_variable_names(
    compile_program: Compile, run: Run, libraries: Any, lookups: dict[str, str], cuda_header: str
) -> None:
    """The simulated GPU is loaded by one of its names, and is the driver by another."""
    preload = [libraries.preload, libraries.simulator]
    done = run([compile_program("lookups", cuda_header), "local_libraries"], preload=preload, env=lookups)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_switched_off(compile_program: Compile, run: Run, libraries: Any, lookups: dict[str, str], cuda_header: str) -> None:
    """Without the variable, and without the library."""
    env = {**lookups, "TMS_LEDGER": "0" if libraries.ledger else "1"}
    done = run([compile_program("lookups", cuda_header), "switched_off"], env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@of_the_ledger
@pytest.mark.parametrize("scenario", ["every_version_that_is_known", "per_thread_streams", "both_functions_that_look_up"])
def test_versions_of_functions(compile_program: Compile, run: Run, libraries: Any, scenario: str) -> None:
    driver = compile_program("lookups_driver", *OF_A_DRIVER, output=f"lookups_driver/{DRIVER}")
    done = run([compile_program("lookups_versions"), scenario], env={"LD_LIBRARY_PATH": str(driver.parent)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.fixture
def next_program(compile_program: Compile) -> tuple[Path, dict[str, str]]:
    flags = ("-shared", "-fPIC")
    linked = compile_program("next_library", *flags, output="libnext_linked.so")
    local = compile_program("next_library", *flags, output="libnext_local.so")
    program = compile_program("next_main", f"-L{linked.parent}", f"-Wl,-rpath,{linked.parent}", "-lnext_linked")
    return program, {"LOCAL": str(local)}


@pytest.mark.parametrize("scenario", ["scopes", "names_of_the_driver_elsewhere"])
def test_other_lookups_are_as_without_us(run: Run, next_program: tuple[Path, dict[str, str]], scenario: str) -> None:
    program, env = next_program
    done = run([program, scenario], env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_a_library_that_wraps_malloc(
    compile_program: Compile, run: Run, libraries: Any, next_program: tuple[Path, dict[str, str]], ours_first: bool
) -> None:
    """It asks for the next malloc before its constructor has run, or in it."""
    wrapper = compile_program("next_malloc", "-shared", "-fPIC", output="libnext_malloc.so")
    preload = [libraries.preload, wrapper] if ours_first else [wrapper, libraries.preload]
    done = run([next_program[0], "next_malloc"], preload=preload, env=next_program[1])
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@of_the_ledger
@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_jemalloc(
    compile_program: Compile,
    run: Run,
    libraries: Any,
    lookups: dict[str, str],
    cuda_header: str,
    jemalloc: Path,
    ours_first: bool,
) -> None:
    preload = [libraries.preload, jemalloc] if ours_first else [jemalloc, libraries.preload]
    done = run([compile_program("lookups", cuda_header), "many_threads"], preload=preload, env=lookups)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@of_the_ledger
@pytest.mark.parametrize("scenario", ["local_libraries", "many_threads"])
def test_a_program_built_with_asan(
    compile_program: Compile, run: Run, libraries: Any, lookups: dict[str, str], cuda_header: str, scenario: str
) -> None:
    """ASan looks up the functions that it wraps before it has started."""
    program = compile_program(
        "lookups", cuda_header, "-fsanitize=address", output="lookups_asan", or_skip="needs the runtime of ASan"
    )
    options = {"ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0"}
    done = run([program, scenario], env={**lookups, **options})
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
