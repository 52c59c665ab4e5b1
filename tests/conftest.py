"""Shared by all Python tests: the choice of the driver, and the control functions of the simulated GPU.

Without ``--gpu`` the package under test loads the simulated GPU in place of the CUDA driver. The native core keeps the
devices that it found at its first use, so all tests of one process see the same machine: two devices with 512 MiB each. A
test that needs another one starts a process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "shared"))

import skip_reasons
from core_regions import leave_all_regions
from garbage import set_survivors_aside
from settling import wait_for_host_memory

if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # A test may take any time on a machine that others use.
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")

PACKAGE = "torch_memory_saver"
DRIVER_VARIABLE = "TMS_CUDA_DRIVER"

MIB = 1 << 20
#: Of the simulated machine.
DEVICES = 2
DEVICE_MEMORY = 512 * MIB

#: About the build, not about the package's behaviour; they are kept. Every other TMS_ variable of the caller's is removed.
BUILD_VARIABLES = {"TMS_WERROR", "TMS_PINNED_VERSION", "TMS_SYMBOLS"}

#: The number of processes, however many cores there are.
MAX_PROCESSES = 8

#: How many failures the tests with the marker ``faults`` have injected.
INJECTED = pytest.StashKey[int]()


def installed_package() -> Path:
    """The folder of the package that `import torch_memory_saver` would import, found without importing it."""
    specification = importlib.util.find_spec(PACKAGE)
    if specification is None or specification.origin is None:
        raise pytest.UsageError(f"{PACKAGE} is not installed: run 'pip install .', or 'make test'")
    return Path(specification.origin).parent


def simulator_path() -> Path:
    path = installed_package() / "_simulated_cuda.so"
    if not path.is_file():
        raise pytest.UsageError(
            f"{path} does not exist: the tests found a {PACKAGE} whose libraries are not built; run 'pip install .', or "
            "'make test'"
        )
    return path


def leave_source_tree(root: Path) -> None:
    """Change the working directory if the package under test is not the one in `root`.

    ``python -c`` and ``python -m`` look in the working directory first, so programs that tests start there would import the
    package of the source tree, whose libraries need not be built.
    """
    if installed_package().parent != root:
        os.chdir(Path(__file__).parent)


def started_by_simulate() -> bool:
    """Whether ``python -m torch_memory_saver simulate`` started this process: then the machine is the requested one."""
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return str(installed_package() / "_simulated_cuda.so") in preloaded and "TMS_SIMULATED_DEVICES" in os.environ


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run tests/gpu, on the CUDA driver that the environment gives")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Choose a process more than there are cores, because tests wait for programs and for the disk.

    With -n there are as many as it says. With --gpu there is one without it: most tests look at the free memory.
    """
    # A process of pytest-xdist comes here too, with -n taken away, and so does a pytest that a test starts.
    if "PYTEST_XDIST_WORKER" in os.environ or hasattr(config, "workerinput") or config.getoption("--gpu"):
        return
    if getattr(config.option, "numprocesses", "pytest-xdist is not installed") is None:
        config.option.numprocesses = min(len(os.sched_getaffinity(0)) + 1, MAX_PROCESSES)
        config.option.dist = "worksteal"  # a file stays together, with its fixtures, until others are idle


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background programs with Ctrl-C ignored, and Python leaves it so: tests of Ctrl-C, and the programs that
    # they start, would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if skip_reasons.VARIABLE in os.environ:
        config.pluginmanager.register(skip_reasons)
    if started_by_simulate():
        return
    gpu = config.getoption("--gpu")
    for name in [name for name in os.environ if name.startswith("TMS_") and name not in BUILD_VARIABLES]:
        # The tests in tests/gpu start pytest a second time with a variable that marks it. The device is the caller's choice:
        # the real one, or the simulated one under `python -m torch_memory_saver simulate`.
        if not name.startswith("TMS_GPU_") and not (gpu and (name == DRIVER_VARIABLE or name.startswith("TMS_SIMULATED_"))):
            del os.environ[name]
    if gpu:
        return
    os.environ[DRIVER_VARIABLE] = str(simulator_path())
    os.environ["TMS_SIMULATED_DEVICES"] = str(DEVICES)
    os.environ["TMS_SIMULATED_MEMORY"] = f"{DEVICE_MEMORY // MIB}MiB"


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.getoption("--gpu"):
        driver = os.environ.get(DRIVER_VARIABLE, "the system's")
        return [f"{PACKAGE}: {installed_package()}; CUDA driver: {driver}"]
    driver = f"simulated, {DEVICES} devices of {DEVICE_MEMORY // MIB} MiB"
    return [
        f"{PACKAGE}: {installed_package()}; CUDA driver: {driver}",
        "without tests/gpu and tests/torch, which need PyTorch: make torch-test, make gpu-test",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu"):
        return
    skip = pytest.mark.skip(reason="needs a real GPU: run pytest with --gpu")
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("multigpu"):
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    leave_source_tree(session.config.rootpath)  # the paths of the command line have been read by now
    # The fixture `simulator` collects garbage after each test.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(INJECTED, 0) and not session.config.getoption("numprocesses", None):
        # At the exit of this process, which has run tests, the native log writes how often it has left out a message.
        atexit.register(os.write, 2, b"\nIf warnings follow, they are about failures that the tests injected on purpose.\n")
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:  # in a process of pytest-xdist
        output["injected"] = session.config.stash.get(INJECTED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    injected = getattr(node, "workeroutput", {}).get("injected", 0)
    node.config.stash[INJECTED] = node.config.stash.get(INJECTED, 0) + injected


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in skip_reasons.counted(report.longrepr[-1] for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)
    if config.stash.get(INJECTED, 0):
        terminalreporter.write_line(f"{config.stash[INJECTED]} failures were injected on purpose, and handled")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether tests with the marker ``faults`` inject everything, because they were requested."""
    return "faults" in request.config.getoption("markexpr")


@pytest.fixture
def count_injected(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Adds to the number in the summary."""

    def count(more: int) -> None:
        request.config.stash[INJECTED] = request.config.stash.get(INJECTED, 0) + more

    return count


class Usage(ctypes.Structure):
    """tms_sim_usage_t: what is allocated now."""

    _fields_ = [
        ("physical_bytes", ctypes.c_uint64),
        ("handles", ctypes.c_uint64),
        ("mappings", ctypes.c_uint64),
        ("reservations", ctypes.c_uint64),
        ("host_bytes", ctypes.c_uint64),
        ("streams", ctypes.c_uint64),
        ("runtime_allocations", ctypes.c_uint64),
    ]

    physical_bytes: int
    handles: int
    mappings: int
    reservations: int
    host_bytes: int
    streams: int
    runtime_allocations: int

    def __repr__(self) -> str:
        return "Usage(" + ", ".join(f"{name}={getattr(self, name)}" for name, *_ in self._fields_) + ")"


class Simulator:
    """The control functions of the simulated GPU (csrc/simulator/simulator.h). The fixture undoes a test's changes.

    Device addresses are host addresses, so `read` and `write` access memory directly; they must not be used on paused
    memory.
    """

    granularity = 2 * MIB
    poison = 0xA5
    devices = DEVICES
    device_memory = DEVICE_MEMORY

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self._declare("set_bandwidth", None, ctypes.c_uint64)
        self._declare("fail_after", ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
        self._declare("failures_fired", ctypes.c_uint64)
        self._declare("calls", ctypes.c_uint64, ctypes.c_char_p)
        self._declare("clear_counts", None)
        self._declare("trace", None, ctypes.c_int)
        self._declare("read_trace", ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
        self._declare("usage", None, ctypes.c_int, ctypes.POINTER(Usage))
        self._declare("take_memory", ctypes.c_int, ctypes.c_int, ctypes.c_int64)
        self._declare(
            "launch_add", ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int
        )
        self._declare("open_gate", None, ctypes.c_int)
        self._declare("wait_until_synchronizing", None)
        self._rules: set[str] = set()
        self._taken = dict.fromkeys(range(DEVICES), 0)
        self._next_gate = 1
        self._closed_gates: set[int] = set()

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self.library, f"tms_sim_{name}")
        function.restype = result
        function.argtypes = arguments

    # Failures.

    def fail_after(self, call: str, succeed: int, fail: int, code: int) -> None:
        """Lets `call` ("*": every driver call) succeed `succeed` more times, then fail `fail` times with CUresult `code`."""
        assert self.library.tms_sim_fail_after(call.encode(), succeed, fail, code) == 0, f"no such call: {call}"
        self._rules.add(call)

    def stop_failing(self) -> None:
        for call in self._rules:
            self.library.tms_sim_fail_after(call.encode(), 0, 0, 0)
        self._rules.clear()

    def failures_fired(self) -> int:
        """How many calls failed by a rule since the process started."""
        return int(self.library.tms_sim_failures_fired())

    # What was called.

    def calls(self, call: str = "*") -> int:
        """The number of calls of a function since the test began, or since clear_counts; "*" counts all."""
        return int(self.library.tms_sim_calls(call.encode()))

    def clear_counts(self) -> None:
        self.library.tms_sim_clear_counts()

    def start_trace(self) -> None:
        """Records the names of calls from now on."""
        self.library.tms_sim_clear_counts()
        self.library.tms_sim_trace(1)

    def trace(self) -> list[str]:
        """The names of the calls since start_trace, in order."""
        length = self.library.tms_sim_read_trace(None, 0)
        text = ctypes.create_string_buffer(length + 1)
        self.library.tms_sim_read_trace(text, length + 1)
        return text.value.decode().split("\n") if text.value else []

    # Memory.

    def usage(self, device: int = 0) -> Usage:
        usage = Usage()
        self.library.tms_sim_usage(device, ctypes.byref(usage))
        return usage

    def take_memory(self, size: int, device: int = 0) -> None:
        """`size` bytes of a device are taken by another user from now on; a negative size releases them."""
        assert self.library.tms_sim_take_memory(device, size) == 0, f"device {device} does not have {size} bytes free"
        self._taken[device] += size

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    # Work in flight.

    def new_gate(self) -> int:
        """A gate that is closed. The fixture opens it if the test does not."""
        gate = self._next_gate
        self._next_gate += 1
        self._closed_gates.add(gate)
        return gate

    def open_gate(self, gate: int) -> None:
        self.library.tms_sim_open_gate(gate)
        self._closed_gates.discard(gate)

    def launch_add(self, address: int, size: int, value: int, *, gate: int = 0, stream: int | None = None) -> None:
        """Enqueues work that adds `value` to each byte, on the current context's legacy stream unless one is given, not
        before the gate opens."""
        result = self.library.tms_sim_launch_add(stream, address, size, value, gate)
        assert result == 0, f"launch failed with CUresult {result}"

    def wait_until_synchronizing(self) -> None:
        """Returns when some thread waits for the device. Releases the GIL."""
        self.library.tms_sim_wait_until_synchronizing()

    def set_bandwidth(self, bytes_per_second: int) -> None:
        self.library.tms_sim_set_bandwidth(bytes_per_second)

    def hold_copies(self) -> None:
        """Copies that begin from here on end no sooner than the next `set_bandwidth`."""
        self.set_bandwidth(1)

    def restore(self) -> None:
        """Undoes all changes made through this object."""
        self.stop_failing()
        for gate in sorted(self._closed_gates):
            self.open_gate(gate)
        for device, size in self._taken.items():
            if size:
                self.take_memory(-size, device)
        self.library.tms_sim_trace(0)
        self.set_bandwidth(0)


def _release_managed(core: Any) -> None:
    """Resets the native core of this process and this thread almost to its state before the first use."""
    while core.counters()["visible_captures"]:
        core.capture_end()
    leave_all_regions(core)
    core.set_memory_margin(0)
    core.set_retain_backup(False)
    core.set_guard(False)
    core.set_host_policy(core.HOST_RELEASE)
    for row in core.segments():
        core.free(row.address)
    # Retries what the driver failed to release while a test injected failures.
    core.resume((), None)
    wait_for_host_memory(core)
    core.release_host_memory()
    wait_for_host_memory(core)


@pytest.fixture(scope="session")
def _simulator_library(request: pytest.FixtureRequest) -> Simulator:
    if request.config.getoption("--gpu"):
        pytest.skip("needs the simulated GPU, and --gpu was given")
    return Simulator(simulator_path())


@pytest.fixture
def simulator(_simulator_library: Simulator) -> Iterator[Simulator]:
    """The simulated GPU, with counts at zero. Afterwards nothing managed may be left on it: the fixture frees what the test
    left and fails if the core then still holds physical memory or addresses."""
    core: Any = importlib.import_module(f"{PACKAGE}._core")
    machine = _simulator_library
    machine.clear_counts()
    yield machine
    machine.restore()
    gc.collect()  # objects that still refer to a backup
    set_survivors_aside()
    _release_managed(core)
    for device in range(machine.devices):
        usage = machine.usage(device)
        assert (usage.handles, usage.mappings, usage.reservations) == (0, 0, 0), f"leaked on device {device}: {usage}"
