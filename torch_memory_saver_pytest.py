"""The pytest plugin: ``pytest --simulated-gpus N`` runs the tests on simulated GPUs.

The dynamic linker gives a process the simulated GPU at its start. So the plugin starts pytest again: the process becomes a
new one with the same command line and the environment of ``simulate``, before anything is captured and before a conftest.py
is imported.

Every run of pytest imports this module where the package is installed. So it lies beside the package, whose import loads the
native library, and imports nothing that pytest has not imported. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping

import pytest

__all__ = ["pytest_addoption", "pytest_load_initial_conftests", "pytest_report_header"]

_DEFAULT_MEMORY = "8GiB"
_SIMULATOR = "_simulated_cuda.so"
#: The process that has started pytest again. The new one has the same number.
_STARTED = "TORCH_MEMORY_SAVER_PYTEST"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_memory_saver", "PyTorch on simulated GPUs (torch_memory_saver)")
    group.addoption("--simulated-gpus", type=int, metavar="N", help="run on N simulated GPUs; needs PyTorch's CUDA build")
    group.addoption("--simulated-memory", metavar="SIZE", help=f"memory of each simulated GPU (default {_DEFAULT_MEMORY})")


# The plugin that captures output begins here, too. The first wrapper runs before that.
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, None, None]:
    """Starts pytest again on the simulated GPUs that the options ask for, unless it runs on them already.

    Raises:
        pytest.UsageError: It cannot.
    """
    options = early_config.known_args_namespace
    devices, memory = options.simulated_gpus, options.simulated_memory
    if devices is None and memory is not None:
        raise pytest.UsageError("--simulated-memory is the memory of simulated GPUs: say how many with --simulated-gpus")
    if devices is not None and not _runs_on(devices, memory, os.environ):
        _start_again(devices, memory)
    yield


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--simulated-gpus") is None:
        return None
    gib = int(os.environ["TMS_SIMULATED_MEMORY"]) / (1 << 30)
    return f"torch_memory_saver: simulated GPUs: {os.environ['TMS_SIMULATED_DEVICES']}, each with {gib:g} GiB"


def _runs_on(devices: int, memory: str | None, variables: Mapping[str, str]) -> bool:
    """Whether ``simulate`` made the environment, with as many devices, and as much memory if that is asked for."""
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
            "--simulated-gpus starts pytest again, and this process is another program that called pytest.main(): start it "
            f"with 'python -m torch_memory_saver simulate --devices {devices} --memory {memory or _DEFAULT_MEMORY} -- "
            "python ...'"
        )
    if os.environ.get(_STARTED) == str(os.getpid()):
        raise pytest.UsageError(
            "--simulated-gpus has started pytest again, and the simulated GPU is not loaded: something between them changes "
            "LD_PRELOAD or the variables TMS_SIMULATED_*"
        )
    from torch_memory_saver import simulate

    variables = _environment(devices, memory or _DEFAULT_MEMORY)
    variables[_STARTED] = str(os.getpid())
    # The whole command line: options of Python, and programs such as coverage that run pytest, are in it.
    raise SystemExit(simulate.run_command(["python", *sys.orig_argv[1:]], variables))


def _environment(devices: int, memory: str) -> dict[str, str]:
    from torch_memory_saver import simulate
    from torch_memory_saver.errors import TorchMemorySaverError

    try:
        if simulate.find_torch() is None:
            raise pytest.UsageError(
                f"--simulated-gpus needs PyTorch's CUDA build, and {sys.executable} has no PyTorch: pip install "
                "--no-deps torch (NVIDIA's packages are not needed)"
            )
        # Those of another machine, if this is one, are not for this.
        base = {name: value for name, value in os.environ.items() if not _is_of_a_machine(name)}
        return simulate.environment(devices=devices, memory=memory, base=base)
    except TorchMemorySaverError as error:
        raise pytest.UsageError(f"--simulated-gpus: {error}") from error


def _is_of_a_machine(name: str) -> bool:
    return name in ("TMS_SIMULATED_DEVICES", "TMS_SIMULATED_MEMORY", "TMS_SIMULATED_SHARED")


def _is_the_program() -> bool:
    """Whether this process was started to run pytest and ends with it: `pytest` or `python -m pytest`, and not a program
    that calls pytest.main(), nor a process of pytest-xdist."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name.endswith("console_main") and frame.f_globals.get("__name__") == "_pytest.config":
            return True
    return False
