"""The pytest plugin: simulated GPUs, a limit of a test's memory, and a fixture with the saver.

``pytest --simulated-gpus N`` runs the tests on simulated GPUs, each test on devices that work. The marker ``device_memory``
limits the memory that a test allocates, and the fixture ``torch_memory_saver`` is the saver.

The dynamic linker loads the simulated GPU when a process starts. So the plugin starts pytest again: it replaces the program
of this process by one with the same command line and the environment of ``simulate``. The replacement happens before output
is captured and before a conftest.py is imported.

Every run of pytest imports this module if the package is installed. So the module lies beside the package, because importing
the package loads the native library. It imports nothing that pytest has not imported. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pytest

__all__ = [
    "fixture_torch_memory_saver",
    "pytest_addoption",
    "pytest_collectreport",
    "pytest_configure",
    "pytest_load_initial_conftests",
    "pytest_report_header",
    "pytest_runtest_call",
    "pytest_runtest_setup",
]

_DEFAULT_MEMORY = "8GiB"
_SIMULATOR = "_simulated_cuda.so"
_MARKER = "device_memory"
#: Allocations that a failure shows.
_MAX_SHOWN = 5
_ILLEGAL_ADDRESS = 700
_LOST = "The test has lost a simulated GPU."
_BACK = "The next test gets it back. A real GPU stays lost until the process ends."
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


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker ``device_memory``."""
    config.addinivalue_line(
        "markers",
        f'{_MARKER}(limit): fail the test if it allocates more than `limit`, such as "2 GiB", of a GPU at a time, through '
        "PyTorch (torch_memory_saver)",
    )


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Say how to run tests whose import of PyTorch lacks the CUDA libraries."""
    text = report.longreprtext if report.failed else ""
    if "import torch" in text and "cannot open shared object file" in text and _simulator() is None:
        report.sections.append(
            (
                "torch_memory_saver",
                "PyTorch's CUDA libraries are missing. Install them, or run the tests without a GPU and without these "
                "libraries: pytest --simulated-gpus 1",
            )
        )


@pytest.fixture(name="torch_memory_saver")
def fixture_torch_memory_saver() -> Generator[Any, None, None]:
    """Return the saver. After the test it resumes what is paused, and releases the memory of the test's tensors."""
    import gc
    import traceback

    from torch_memory_saver import torch_memory_saver

    yield torch_memory_saver
    torch_memory_saver.resume()
    for frame, _ in traceback.walk_tb(getattr(sys, "last_traceback", None)):  # of a test that has failed
        with contextlib.suppress(RuntimeError):  # it runs
            frame.clear()
            dict(frame.f_locals)  # empties the copy that pytest's report has made
    gc.collect()
    torch_memory_saver.empty_cache()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Give the test working devices, even if fixtures of an earlier test have lost some."""
    _recover()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail a test that exceeds its limit or loses a simulated device, which the next test gets back."""
    peak = _Peak.of(item)
    outcome = yield
    lost = _recover()
    problem = f"{_LOST[:-1]}: {lost}\n{_BACK}" if lost else peak.problem() if peak is not None else ""
    if problem and outcome.excinfo is None:
        outcome.force_exception(pytest.fail.Exception(problem, pytrace=False))
    elif lost:
        item.add_report_section("call", "torch_memory_saver", f"{_LOST} {_BACK}")


class _Peak:
    """The memory that a test with the marker allocates through PyTorch.

    PyTorch counts a paused tensor as allocated. The history of allocations is recorded unless the program records one.
    """

    def __init__(self, torch: Any, limit: int) -> None:
        from torch_memory_saver.observe import memory

        self._torch = torch
        self._limit = limit
        torch.cuda.init()
        self._devices = range(torch.cuda.device_count())
        self._history = None if torch._C._cuda_isHistoryEnabled() else memory.record_history(clear_history=True)
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        self._before = [torch.cuda.memory_allocated(device) for device in self._devices]

    @staticmethod
    def of(item: pytest.Item) -> _Peak | None:
        """Begin to measure a test. Return None for a test without the marker, and without a GPU."""
        marker = item.get_closest_marker(_MARKER)
        if marker is None:
            return None
        from torch_memory_saver import simulate
        from torch_memory_saver.errors import InvalidArgumentError

        if len(marker.args) != 1 or marker.kwargs:
            pytest.fail(f'{_MARKER} takes one size, as in @pytest.mark.{_MARKER}("2 GiB")', pytrace=False)
        try:
            limit = simulate.parse_bytes(str(marker.args[0]))
        except InvalidArgumentError as error:
            raise pytest.fail.Exception(f"@pytest.mark.{_MARKER}: {error}", pytrace=False) from None
        try:
            import torch
        except ImportError:  # the test finds out, and says so or is skipped
            return None
        return _Peak(torch, limit) if torch.cuda.is_available() else None

    def problem(self) -> str:
        """End the measurement. Return what is wrong, or ""."""
        from torch_memory_saver._text import binary_size, with_points
        from torch_memory_saver.observe import memory

        grown = [
            self._torch.cuda.max_memory_allocated(device) - before
            for device, before in zip(self._devices, self._before, strict=True)
        ]
        device = max(self._devices, key=grown.__getitem__)
        known = self._history is not None and "clear_history" not in self._history.unsupported
        over = grown[device] > self._limit
        largest = self._largest(device) if over and known else []
        if self._history is not None:
            memory.stop_history()
        if not over:
            return ""
        return with_points(
            f"the test has allocated up to {binary_size(grown[device])} of GPU {device}, more than its limit of "
            f"{binary_size(self._limit)} (@pytest.mark.{_MARKER})"
            + (". The largest allocations at that time:" * bool(largest)),
            *(f"{binary_size(event['size'])} at {self._place(event['frames'])}" for event in largest),
        )

    def _largest(self, device: int) -> list[Mapping[str, Any]]:
        """Return the largest allocations of the moment at which most was allocated, with the largest first."""
        events = self._torch.cuda.memory._snapshot()["device_traces"][device]
        live: dict[int, Mapping[str, Any]] = {}
        sums = list(accumulate(_replay(event, live) for event in events))
        live.clear()
        for event in events[: sums.index(max(sums)) + 1] if sums else ():
            _replay(event, live)
        return sorted(live.values(), key=lambda event: event["size"], reverse=True)[:_MAX_SHOWN]

    def _place(self, frames: Sequence[Mapping[str, Any]]) -> str:
        """Return the innermost line outside of PyTorch and of this package."""
        inside = tuple(
            os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in ("torch", "torch_memory_saver")
        )
        for frame in frames:
            if not frame["filename"].startswith((*inside, "<")):
                return f"{os.path.relpath(frame['filename'])}:{frame['line']} in {frame['name']}"
        return "an unknown line"


def _replay(event: Mapping[str, Any], live: dict[int, Mapping[str, Any]]) -> int:
    """Apply an event of PyTorch's history to the allocations, by address. Return the bytes by which they grow."""
    if event["action"] == "alloc":
        live[event["addr"]] = event
        return int(event["size"])
    if event["action"] == "free_requested" and event["addr"] in live:
        return -int(live.pop(event["addr"])["size"])
    return 0


def _simulator() -> Any:
    """Return the simulated GPU's library of this process, or None."""
    if _SIMULATOR not in os.environ.get("LD_PRELOAD", ""):
        return None
    import ctypes

    library = ctypes.CDLL(None)
    if not hasattr(library, "tms_sim_recover"):
        return None
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _recover() -> str:
    """Give lost simulated devices back. Return what has lost them, or ""."""
    library, torch = _simulator(), sys.modules.get("torch")
    if library is None or torch is None or not torch.cuda.is_initialized():
        return ""
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):
            # It raises for a lost device, about which the simulated GPU is asked next, and during a capture.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(device)
    access, code = library.cudaGetErrorString(_ILLEGAL_ADDRESS), library.tms_sim_recover()
    if code == 0:
        return ""
    reason: bytes = access if code == _ILLEGAL_ADDRESS else library.cudaGetErrorString(code)
    return reason.decode()


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
        return str(simulate.memory_of_a_device(memory))
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
    _bytes(memory)  # its error names its option
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
