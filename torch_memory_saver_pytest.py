"""The pytest plugin: ``pytest --simulated-gpus N`` runs the tests on simulated GPUs.

The dynamic linker loads the simulated GPU when a process starts. So the plugin starts pytest again: it replaces the program
of this process by one with the same command line and the environment of ``simulate``. The replacement happens before output
is captured and before a conftest.py is imported.

Every run of pytest imports this module if the package is installed. So the module lies beside the package, because importing
the package loads the native library. It imports nothing that pytest has not imported. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping

import pytest

__all__ = ["pytest_addoption", "pytest_load_initial_conftests", "pytest_report_header"]

_DEFAULT_MEMORY = "8GiB"
_SIMULATOR = "_simulated_cuda.so"
#: Holds the id of the process that has started pytest again. The new program has the same process id.
_STARTED = "TORCH_MEMORY_SAVER_PYTEST"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--simulated-gpus`` and ``--simulated-memory``."""
    group = parser.getgroup("torch_memory_saver", "PyTorch on simulated GPUs (torch_memory_saver)")
    group.addoption("--simulated-gpus", type=int, metavar="N", help="run on N simulated GPUs; needs PyTorch's CUDA build")
    group.addoption("--simulated-memory", metavar="SIZE", help=f"memory of each simulated GPU (default {_DEFAULT_MEMORY})")


# The plugin that captures output starts in this hook, too. With tryfirst this wrapper runs before it.
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, None, None]:
    """Start pytest again on the simulated GPUs that the options ask for, unless it runs on them already.

    Raises:
        pytest.UsageError: The options do not fit together, or pytest cannot be started again.
    """
    options = early_config.known_args_namespace
    devices, memory = options.simulated_gpus, options.simulated_memory
    if devices is None and memory is not None:
        raise pytest.UsageError("--simulated-memory needs the number of simulated GPUs: set it with --simulated-gpus")
    if devices is not None and not _runs_on(devices, memory, os.environ):
        _start_again(devices, memory)
    yield


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the header line that describes the simulated GPUs, or None without ``--simulated-gpus``."""
    if config.getoption("--simulated-gpus") is None:
        return None
    gib = int(os.environ["TMS_SIMULATED_MEMORY"]) / (1 << 30)
    return f"torch_memory_saver: simulated GPUs: {os.environ['TMS_SIMULATED_DEVICES']}, each with {gib:g} GiB"


def _runs_on(devices: int, memory: str | None, variables: Mapping[str, str]) -> bool:
    """Return whether ``simulate`` made the environment `variables`, with that number of devices and that memory.

    The memory is not compared if `memory` is None.
    """
    preloaded = [os.path.basename(path) for path in variables.get("LD_PRELOAD", "").replace(":", " ").split()]
    if _SIMULATOR not in preloaded or variables.get("TMS_SIMULATED_DEVICES") != str(devices):
        return False
    return memory is None or variables.get("TMS_SIMULATED_MEMORY") == _bytes(memory)


def _bytes(memory: str) -> str:
    from torch_memory_saver import simulate
    from torch_memory_saver.errors import InvalidArgumentError

    try:
        return str(simulate.parse_bytes(memory))
    except InvalidArgumentError as error:
        raise pytest.UsageError(f"--simulated-memory: {error}") from error


def _start_again(devices: int, memory: str | None) -> None:
    if not _is_the_program():
        raise pytest.UsageError(
            "--simulated-gpus must start pytest again, which is not possible in a program that has called pytest.main(): "
            f"start the program with 'python -m torch_memory_saver simulate --devices {devices} --memory "
            f"{memory or _DEFAULT_MEMORY} -- python ...'"
        )
    if os.environ.get(_STARTED) == str(os.getpid()):
        raise pytest.UsageError(
            "--simulated-gpus has started pytest again, but the simulated GPU is not loaded: find and remove what changes "
            "LD_PRELOAD or TMS_SIMULATED_* in between"
        )
    from torch_memory_saver import simulate

    variables = _environment(devices, memory or _DEFAULT_MEMORY)
    variables[_STARTED] = str(os.getpid())
    # This is the whole command line, with the options of Python and programs such as coverage that run pytest.
    raise SystemExit(simulate.run_command(["python", *sys.orig_argv[1:]], variables))


def _environment(devices: int, memory: str) -> dict[str, str]:
    from torch_memory_saver import simulate
    from torch_memory_saver._simulate.torch_build import find_torch
    from torch_memory_saver.errors import TorchMemorySaverError

    try:
        if find_torch() is None:
            raise pytest.UsageError(
                f"--simulated-gpus needs PyTorch's CUDA build, and {sys.executable} has no PyTorch: pip install "
                "--no-deps torch (NVIDIA's packages are not needed)"
            )
        # The variables of another simulated machine must not apply to the new one.
        base = {name: value for name, value in os.environ.items() if not _is_of_a_machine(name)}
        return simulate.environment(devices=devices, memory=memory, base=base)
    except TorchMemorySaverError as error:
        raise pytest.UsageError(f"--simulated-gpus: {error}") from error


def _is_of_a_machine(name: str) -> bool:
    return name in ("TMS_SIMULATED_DEVICES", "TMS_SIMULATED_MEMORY", "TMS_SIMULATED_SHARED")


def _is_the_program() -> bool:
    """Return whether this process was started to run pytest and ends with it.

    The result is True with `pytest` and `python -m pytest`. It is False in a program that calls pytest.main() and in a
    worker of pytest-xdist.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name.endswith("console_main") and frame.f_globals.get("__name__") == "_pytest.config":
            return True
    return False
