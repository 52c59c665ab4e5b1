"""Tests of the preload library, each in fresh processes: small C programs, compiled here, that use the simulated GPU as
their CUDA runtime and driver, and programs that have nothing to do with CUDA."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

PRELOAD_NAME = "torch_memory_saver_hook_mode_preload.abi3.so"
SIMULATOR_NAME = "_simulated_cuda.so"
#: The names under which programs look for the runtime.
RUNTIME_NAME = "libcudart.so.13"
JEMALLOC_NAME = "libjemalloc.so.2"

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).resolve().parent / "programs"
HEADERS = REPOSITORY / "csrc"

#: No program here takes longer, on a busy machine and under a sanitizer. Reached only by one that hangs.
TIMEOUT_SECONDS = 120

#: The emulator of another processor, if any (make aarch64). CC then names a compiler for that processor, and SITE a folder
#: with the package's libraries for it.
EMULATOR = os.environ.get("EMULATOR", "")

COMPILE_FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}"]
#: The number of the interface, as setup.interface() computes it.
COMPILE_FLAGS.append(f"-DTMS_INTERFACE={zlib.crc32((REPOSITORY / 'torch_memory_saver' / '_core.pyi').read_bytes())}u")
#: Options of the caller's: the flag of a sanitizer, if the libraries under test have it.
COMPILE_FLAGS += shlex.split(os.environ.get("CFLAGS", ""))


@dataclass(frozen=True)
class Libraries:
    """The folder of the libraries under test."""

    preload: Path
    simulator: Path
    #: Holds the simulated GPU under the name of the CUDA runtime, for linking and for LD_LIBRARY_PATH.
    runtime_folder: Path


class Compile(Protocol):
    def __call__(self, name: str, *flags: str, output: str | None = None, or_skip: str = "") -> Path:
        """Compiles programs/<name>.c, once a session for each `output`, and returns the path of the result. A failure fails
        the test, or with `or_skip` skips it for that reason."""


class Run(Protocol):
    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        preload: Sequence[str | Path] | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command with the preload library, or with the libraries named, and `env` on top of a clean environment."""


def package_folders() -> list[Path]:
    """Possible folders of the package, the best first: the one that is imported, then the one of the source tree."""
    if EMULATOR:
        return [Path(os.environ["SITE"]) / "torch_memory_saver"]
    folders = [REPOSITORY / "torch_memory_saver"]
    specification = importlib.util.find_spec("torch_memory_saver")
    if specification is not None and specification.origin is not None:
        folders.insert(0, Path(specification.origin).resolve().parent)
    return folders


@pytest.fixture(scope="session")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="session")
def libraries(runtime_folder: Path) -> Libraries:
    for package in package_folders():
        preload, simulator = package.parent / PRELOAD_NAME, package / SIMULATOR_NAME
        if preload.is_file() and simulator.is_file():
            break
    else:
        pytest.fail(f"{PRELOAD_NAME} and {SIMULATOR_NAME} are not built: run 'pip install .', or 'make test'", pytrace=False)
    link = runtime_folder / RUNTIME_NAME
    if not link.is_symlink():
        link.symlink_to(simulator)
    return Libraries(preload, simulator, runtime_folder)


@pytest.fixture(scope="session")
def cuda_header() -> str:
    """The option that finds cuda.h."""
    command = [sys.executable, "-c", "import setup; print(setup.find_cuda_include())"]
    return "-I" + subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def compiler() -> str:
    if EMULATOR:
        return os.environ["CC"]
    for name in ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path:
            return path
    pytest.skip("needs a C compiler")


@pytest.fixture(scope="session")
def compile_program(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    folder = tmp_path_factory.mktemp("programs")

    def compile_one(name: str, *flags: str, output: str | None = None, or_skip: str = "") -> Path:
        result = folder / (output or name)
        if not result.exists():
            result.parent.mkdir(exist_ok=True)
            command = [compiler, *COMPILE_FLAGS, str(PROGRAMS / f"{name}.c"), "-o", str(result), *flags, "-ldl"]
            made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
            if made.returncode != 0 and or_skip:
                pytest.skip(or_skip)
            if made.returncode != 0:
                pytest.fail(f"{' '.join(command)}\n{made.stderr}", pytrace=False)
        return result

    return compile_one


@pytest.fixture(scope="session")
def cuda_program(compile_program: Compile, libraries: Libraries) -> Callable[[str], Path]:
    """Compiles a program that is linked with the CUDA runtime."""
    return lambda name: compile_program(name, f"-L{libraries.runtime_folder}", f"-l:{RUNTIME_NAME}")


@pytest.fixture(scope="session")
def stub_runtime(compile_program: Compile) -> Path:
    """A runtime without a GPU behind it, in a folder of its own; its symbols carry versions, as the real one's do."""
    return compile_program(
        "stub_runtime",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{RUNTIME_NAME}",
        f"-Wl,--version-script={PROGRAMS / 'stub_runtime.map'}",
        output=f"stub/{RUNTIME_NAME}",
    )


@pytest.fixture(scope="session")
def jemalloc() -> Path:
    """The library that replaces malloc in programs that preload it."""
    folders = [Path("/usr/lib"), Path("/usr/lib64"), *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/local/lib")]
    for folder in folders:
        if (folder / JEMALLOC_NAME).is_file():
            return folder / JEMALLOC_NAME
    pytest.skip(f"needs {JEMALLOC_NAME} (Debian's package libjemalloc2)")


@pytest.fixture(scope="session")
def asan_runtime(compiler: str) -> Path:
    """ASan's runtime as a shared library, which the programs that preload it need not be compiled for."""
    name = "libasan.so"
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if found == name or not Path(found).is_file():
        pytest.skip(f"needs {name}, which gcc brings")
    return Path(found).resolve()


def clean_environment(libraries: Libraries) -> dict[str, str]:
    """The caller's environment without the variables of the libraries, and with the simulated GPU as runtime and driver."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TMS_", "LD_", "CUDA_"))}
    variables["LC_ALL"] = "C"
    variables["LD_LIBRARY_PATH"] = str(libraries.runtime_folder)
    variables["TMS_CUDA_DRIVER"] = str(libraries.simulator)
    variables["TMS_SIMULATED_DEVICES"] = "2"
    variables["TMS_SIMULATED_MEMORY"] = "64MiB"
    return variables


@pytest.fixture
def environment(libraries: Libraries) -> dict[str, str]:
    """The initial environment of `run`, for tests that start a process themselves; LD_PRELOAD has the preload library."""
    return {**clean_environment(libraries), "LD_PRELOAD": str(libraries.preload)}


def emulated(command: Sequence[str], variables: dict[str, str]) -> list[str]:
    """The command that runs a program in the emulator. Variables of the dynamic linker move from `variables` to options,
    because the emulator is a program of this machine."""
    names = [name for name in variables if name.startswith("LD_")]
    options = [word for name in names for word in ("-E", f"{name}={variables.pop(name)}")]
    return [EMULATOR, *options, *command]


@pytest.fixture
def run(libraries: Libraries) -> Run:
    def run_one(
        command: Sequence[str | Path],
        *,
        preload: Sequence[str | Path] | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        variables = clean_environment(libraries)
        loaded = [libraries.preload] if preload is None else preload
        if loaded:
            variables["LD_PRELOAD"] = ":".join(str(path) for path in loaded)
        variables.update(env or {})
        words = [str(word) for word in command]
        return subprocess.run(
            emulated(words, variables) if EMULATOR else words,
            env=variables,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )

    return run_one


@pytest.fixture
def run_scenario(cuda_program: Callable[[str], Path], run: Run) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs one scenario of a program and asserts that every check in it succeeded.

    A test that expects lines in the log passes `silent=False` and checks them.
    """

    def run_one(
        program: str, scenario: str, *, silent: bool = True, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = run([cuda_program(program), scenario], env=env)
        assert done.returncode == 0, f"{scenario}: status {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.stdout.endswith("done\n")
        if silent:
            assert done.stderr == ""
        return done

    return run_one
