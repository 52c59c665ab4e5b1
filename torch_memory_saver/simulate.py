"""Functions that run programs, including PyTorch's CUDA build, on the simulated GPU without a GPU or CUDA packages.

The dynamic linker does the work. The simulated GPU is preloaded, so its functions come before all others of the same name.
A folder of stub libraries replaces the CUDA libraries that PyTorch is linked with. Child processes inherit the environment.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import secrets
import select
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_memory_saver import _startup
from torch_memory_saver._folders import PRIVATE_FOLDER
from torch_memory_saver._interface import __version__
from torch_memory_saver._replace import replace_process
from torch_memory_saver._services import preload
from torch_memory_saver._simulate.elf import read_library
from torch_memory_saver._simulate.stubs import cached_folder, make_folder
from torch_memory_saver._simulate.torch_build import find_torch, read_wanted
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError, TorchUnavailableError

__all__ = [
    "environment",
    "environment_without_torch",
    "run_command",
    "simulator_path",
]

#: Maximum number of simulated devices, equal to TMS_SIM_MAX_DEVICES of the simulator.
MAX_DEVICES = 8

_LIBRARY_NAME = "_simulated_cuda.so"
_OWN_VARIABLES = "TMS_SIMULATED_"
#: The path of a machine's shared memory without the machine's name, as in csrc/simulator/devices/budget.c.
_SHARED_MEMORY = "/dev/shm/tms_simulated_"
_PROVIDED_PREFIXES = ("cu", "__cuda", "nccl")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?", re.ASCII)
#: The granularity of physical memory.
_LEAST_MEMORY = 2 << 20
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MAX_BYTES = (1 << 63) - 1
#: Random bytes in the name of a machine.
_NAME_BYTES = 4

#: Commands that mean the running interpreter, because the stubs are made for its PyTorch.
_PYTHON = ("python", "python3")


def simulator_path() -> Path:
    """Return the path of the simulated GPU's library, whether or not the file exists."""
    return Path(os.path.abspath(__file__)).parent / _LIBRARY_NAME


def parse_bytes(text: str) -> int:
    """Return the number of bytes that a text such as ``8GiB``, ``1.5 GiB`` or ``1048576`` means.

    Raises:
        InvalidArgumentError: The text is not a positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2]]) if match is not None else 0
    if not 0 < size <= _MAX_BYTES:
        raise InvalidArgumentError(f"{text!r} is not a size: write a number with B, KiB, MiB, GiB or TiB, such as 8GiB")
    return size


def environment(
    *,
    devices: int = 1,
    memory: int | str = "8GiB",
    bandwidth: int | str | None = None,
    preload_hook: bool = False,
    report: bool = False,
    trace: str | os.PathLike[str] | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment for a process that runs on the simulated GPU.

    PyTorch's CPU implementations execute its operators, on the bytes of the simulated devices.

    Processes that inherit the environment share the devices' memory, as on a real machine. Each call describes a new
    machine, unless its `base` is such an environment: then it describes the same machine.

    The first call for an installed PyTorch compiles stub libraries, which takes seconds. Later calls find them in the cache.

    Args:
        devices: The number of devices, 0 to 8.
        memory: Bytes of each device, at least 2 MiB, as a number or a text such as "8GiB".
        bandwidth: Bytes per second of copies in flight, in the same form. None: as fast as the host copies.
        preload_hook: Whether the hook library is preloaded as well (hook mode "preload").
        report: Whether each process prints at its end what it still holds on the devices.
        trace: A file to which every call of the driver, the runtime and NCCL is appended. A missing folder is created.
        base: The environment to start from, by default this process's. Its entries of LD_PRELOAD and LD_LIBRARY_PATH are
            kept. Its TMS_SIMULATED_* variables are kept unless an argument sets them. Its CUDA_VISIBLE_DEVICES chooses among
            the simulated devices.

    Raises:
        InvalidArgumentError: An argument is out of range, or the trace cannot be written.
        InvalidStateError: A library of this package is missing, the stub libraries cannot be written, or there is no C
            compiler.
        TorchUnavailableError: The installed PyTorch is not built for CUDA, or its release is not supported.
    """
    _check_devices(devices)
    simulator = simulator_path()
    result = dict(os.environ if base is None else base)
    preloaded = re.split("[ :]", result.get("LD_PRELOAD", ""))
    libraries = [simulator]
    # The hook library must come before the simulated runtime, even if it is preloaded already, as under `run --preload`.
    if preload_hook or str(preload.library_path()) in preloaded:
        libraries.insert(0, preload.library_path())
    _check_libraries(libraries)
    folder, shadowing = _stubs(simulator)
    result["LD_PRELOAD"] = _join("LD_PRELOAD", [*libraries, *shadowing], preloaded)
    kept = re.split("[;:]", result.get("LD_LIBRARY_PATH", ""))
    result["LD_LIBRARY_PATH"] = _join("LD_LIBRARY_PATH", [folder], kept)
    result["TMS_CUDA_DRIVER"] = str(simulator)
    result[_OWN_VARIABLES + "DEVICES"] = str(devices)
    result[_OWN_VARIABLES + "VISIBLE"] = "1"
    result[_OWN_VARIABLES + "MEMORY"] = str(memory_of_a_device(memory))
    # Python imports sitecustomize from this folder when it starts.
    others = result.get("PYTHONPATH", "").split(os.pathsep)
    result["PYTHONPATH"] = _join("PYTHONPATH", [Path(_startup.FOLDER)], others)
    # Processes that inherit this name are on one machine: they share the memory of each device.
    result.setdefault(_startup.SIMULATED, f"{os.getpid()}-{secrets.token_hex(_NAME_BYTES)}")
    if bandwidth is not None:
        result[_OWN_VARIABLES + "BANDWIDTH"] = str(_size(bandwidth))
    if report:
        result[_OWN_VARIABLES + "REPORT"] = "1"
    if trace is not None:
        result[_OWN_VARIABLES + "TRACE"] = _writable(trace)
    return result


def environment_without_torch(
    *, devices: int = 1, memory: int | str = "8GiB", base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for a process that uses the CUDA runtime's functions on the simulated GPU, without PyTorch.

    The hook library is preloaded. Nothing is compiled. TMS_ variables of `base` are removed, except the simulator's.

    Raises:
        InvalidArgumentError: An argument is out of range.
        InvalidStateError: A library of this package is missing.
    """
    simulator = simulator_path()
    _check_devices(devices)
    _check_libraries([preload.library_path(), simulator])
    kept = os.environ if base is None else base
    result = {name: value for name, value in kept.items() if not name.startswith("TMS_") or name.startswith(_OWN_VARIABLES)}
    # The hook library comes first, so that its functions are found before those of the simulated runtime.
    others = re.split("[ :]", result.get("LD_PRELOAD", ""))
    result["LD_PRELOAD"] = _join("LD_PRELOAD", [preload.library_path(), simulator], others)
    result["TMS_CUDA_DRIVER"] = str(simulator)
    result[_OWN_VARIABLES + "DEVICES"] = str(devices)
    result[_OWN_VARIABLES + "MEMORY"] = str(_size(memory))
    return result


def run_command(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Replace this process by the program that `command` names, with `variables` as its environment.

    ``python`` means this interpreter. If `variables` describe a machine other than the one of this process, the memory that
    the machine's processes share is removed when the program ends, even if it is killed.

    Returns:
        The exit status that a shell would give. The function returns only if the program could not be started.
    """
    program = sys.executable if command[0] in _PYTHON else command[0]
    machine = variables.get(_startup.SIMULATED)
    if machine is not None and machine != os.environ.get(_startup.SIMULATED):
        _remove_afterwards(Path(_SHARED_MEMORY + machine))
    return replace_process([program, *command[1:]], variables, "simulate")


def _remove_afterwards(path: Path) -> None:
    """Start a process that removes `path` when this process has ended.

    This process becomes another program in the meantime. The last process of the machine removes the file itself, unless it
    is killed. On Linux before 5.3 the function does nothing more than that.
    """
    try:
        program = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return
    child = os.fork()
    if child != 0:
        os.close(program)
        os.waitpid(child, 0)
        return
    # The program's wait() would return a child, so the process is a grandchild. In a session of its own no signal from the
    # terminal reaches it. It closes all files, because another process may wait until they are closed.
    try:
        os.setsid()
        if os.fork() == 0:
            os.chdir("/")
            for file in map(int, os.listdir("/proc/self/fd")):
                if file != program:
                    with contextlib.suppress(OSError):  # the descriptor of /proc/self/fd itself is closed already
                        os.close(file)
            ended = select.poll()
            ended.register(program, select.POLLIN)
            ended.poll()
            path.unlink(missing_ok=True)
    finally:
        os._exit(0)


def _check_devices(devices: int) -> None:
    if not 0 <= devices <= MAX_DEVICES:
        raise InvalidArgumentError(f"the number of simulated devices must be 0 to {MAX_DEVICES}, not {devices}")


def _check_libraries(libraries: Sequence[Path]) -> None:
    for path in libraries:
        if not path.is_file():
            raise InvalidStateError(
                f"this installation is incomplete: there is no {path}; install torch_memory_saver again",
                operation="simulate",
            )


def _size(value: int | str) -> int:
    return parse_bytes(str(value))


def memory_of_a_device(memory: int | str) -> int:
    """Return the bytes of each simulated device.

    Raises:
        InvalidArgumentError: `memory` is not a size, or is too small.
    """
    size = _size(memory)
    if size < _LEAST_MEMORY:
        raise InvalidArgumentError(
            f"a simulated device has at least 2 MiB, not {size} bytes. A number without a unit means bytes"
        )
    return size


def _writable(trace: str | os.PathLike[str]) -> str:
    """Return the absolute path of the trace file, which the programs create. Its missing folders are created.

    Raises:
        InvalidArgumentError: The file cannot be written.
    """
    path = os.path.abspath(trace)
    try:
        os.makedirs(os.path.dirname(path), PRIVATE_FOLDER, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"the trace cannot be written to {path}: {error.strerror}") from error
    exists = os.path.exists(path)
    if os.path.isdir(path) or not os.access(path if exists else os.path.dirname(path), os.W_OK):
        reason = (
            "it is a folder" if os.path.isdir(path) else "no permission" if exists else "its folder cannot be written to"
        )
        raise InvalidArgumentError(f"the trace cannot be written to {path}: {reason}")
    return path


def check_imports(command: Sequence[str]) -> None:
    """Check that PyTorch is installed if the script imports it.

    The user then gets one message instead of a traceback.

    Raises:
        TorchUnavailableError: The script imports PyTorch, which is not installed, or is not supported.
    """
    scripts = [part for part in command[1:2] if command[0] in _PYTHON and part.endswith(".py")]
    if not scripts or find_torch() is not None:
        return
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        body = ast.parse(Path(scripts[0]).read_bytes()).body
        names = [alias.name for part in body if isinstance(part, ast.Import) for alias in part.names]
        names += [part.module or "" for part in body if isinstance(part, ast.ImportFrom) and part.level == 0]
        if "torch" in {name.partition(".")[0] for name in names}:
            raise TorchUnavailableError(
                f"{scripts[0]} imports torch, which is not installed for {sys.executable}: install PyTorch's CUDA build "
                "(pip install --no-deps torch==2.11.0, and pip install filelock typing-extensions sympy networkx jinja2 "
                "fsspec numpy; NVIDIA's packages are not needed), or use the Python that has it",
                operation="simulate",
            )


def _stubs(simulator: Path) -> tuple[Path, list[Path]]:
    """Return the folder of stub libraries, and the stubs that must be preloaded to come before real libraries.

    The folder is made if necessary.

    Raises:
        InvalidStateError: The folder cannot be made.
    """
    try:
        return _find_stubs(simulator)
    except OSError as error:
        raise InvalidStateError(
            f"the stub libraries cannot be made: {error.strerror}: {error.filename}; set XDG_CACHE_HOME to a folder that "
            "can be written to",
            operation="simulate",
            os_error=error.errno or 0,
        ) from error


def _find_stubs(simulator: Path) -> tuple[Path, list[Path]]:
    build = find_torch()
    provided = {symbol.name for symbol in read_library(simulator, _PROVIDED_PREFIXES).symbols if symbol.defined}
    folder = cached_folder(build, simulator, provided, __version__)
    make_folder(folder, lambda: [] if build is None else read_wanted(build, provided), simulator, provided)
    if build is None:
        return folder, []
    names = [path.name for path in folder.iterdir()]
    return folder, [folder / soname for soname in build.found_by_rpath(names)]


def _join(variable: str, first: Sequence[Path], kept: Sequence[str]) -> str:
    """Return the value of a variable that lists paths: `first`, and then the entries of `kept` that are not in it.

    Raises:
        InvalidStateError: A path contains a character that separates entries.
    """
    entries = [str(path) for path in first]
    for entry in entries:
        if re.search("[ :;]", entry):
            raise InvalidStateError(
                f"{variable} cannot name {entry!r}, because the path contains a space, a colon or a semicolon: install the "
                "package in another folder, or set XDG_CACHE_HOME to one",
                operation="simulate",
            )
    entries += [entry for entry in kept if entry and entry not in entries]
    return ":".join(entries)
