"""What tests/fault_injection does to the core, through PyTorch: every driver call that a scenario makes fails once, and with
``-m faults`` again twice.

After each: everything is either paused or not, the bytes are right, the same again succeeds, and nothing is left on the
simulated GPU. tests/fault_injection checks how each call may fail; this file checks that PyTorch's pools survive it.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_memory_saver
from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.simulate import simulator_path

pytestmark = pytest.mark.faults

MIB = 1 << 20
OUT_OF_MEMORY, OPERATING_SYSTEM = 2, 304
SAYS_OUT_OF_MEMORY = {"cuMemCreate", "cuMemAddressReserve", "cuStreamCreate", "cuDevicePrimaryCtxRetain"}
#: What PyTorch calls itself; where the first fails, it ends the process (an exception in a destructor).
NOT_FAILED = {
    "cuDevicePrimaryCtxGetState",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuPointerGetAttribute",
}
REFUSALS = {"cuMemUnmap", "cuMemRelease"}
SETTLE_SECONDS = 60
STREAM_THREAD = "gpu stream"
LEFT = ("handles", "mappings", "reservations", "physical_bytes", "host_bytes", "streams")


class Usage(ctypes.Structure):
    """tms_sim_usage_t."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("physical_bytes", "handles", "mappings", "reservations", "host_bytes", "streams", "runtime_allocations")
    ]


class Driver:
    def __init__(self) -> None:
        self.library: Any = ctypes.CDLL(str(simulator_path()))
        self.library.tms_sim_failures_fired.restype = ctypes.c_uint64
        self.library.tms_sim_read_trace.restype = ctypes.c_size_t
        self.library.tms_sim_read_trace.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self.library.tms_sim_fail_after.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
        self.library.tms_sim_take_memory.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.library.tms_sim_usage.argtypes = [ctypes.c_int, ctypes.POINTER(Usage)]

    def record(self) -> None:
        self.library.tms_sim_clear_counts()
        self.library.tms_sim_trace(1)

    def recorded(self) -> Counter[str]:
        self.library.tms_sim_trace(0)
        length = self.library.tms_sim_read_trace(None, 0)
        text = ctypes.create_string_buffer(length + 1)
        self.library.tms_sim_read_trace(text, length + 1)
        names = text.value.decode().split()
        return Counter(
            name for name in names if name.startswith("cu") and not name.startswith("cuda") and name not in NOT_FAILED
        )

    def fail(self, name: str, succeed: int, times: int, code: int) -> None:
        assert self.library.tms_sim_fail_after(name.encode(), succeed, times, code) == 0

    def fired(self) -> int:
        return int(self.library.tms_sim_failures_fired())

    def take(self, size: int) -> None:
        assert self.library.tms_sim_take_memory(0, size) == 0

    def left(self) -> dict[str, int]:
        usage = Usage()
        self.library.tms_sim_usage(0, ctypes.byref(usage))
        return {name: getattr(usage, name) for name in LEFT}


DRIVER = Driver()


@dataclass
class Case:
    """`act` is done with a call failing, `check` tests the result, `again` is done once the cause is gone."""

    act: Callable[[], None]
    check: Callable[[], None]
    again: Callable[[], None] | None = None
    keep: list[Any] = field(default_factory=list)


def filled(tag: str, value: int, size: int = 2 * MIB, backup: bool = True) -> torch.Tensor:
    with saver.region(tag=tag, enable_cpu_backup=backup):
        return torch.full((size,), value, dtype=torch.uint8, device="cuda")


def holds(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor.cpu() == value).all())


def states() -> set[int]:
    return {row.state for row in _core.segments()}


def allocation() -> Case:
    kept: list[torch.Tensor] = []

    def check() -> None:
        assert states() <= {_core.STATE_ACTIVE}
        assert all(holds(tensor, 3) for tensor in kept)

    return Case(lambda: kept.append(filled("new", 3)), check, keep=kept)


def pausing() -> Case:
    tensor = filled("weights", 5)
    other = filled("other", 7)

    def check() -> None:
        assert _core.STATE_PAUSING not in states()
        assert holds(other, 7)
        if _core.tag_info("weights").paused == 0:
            assert holds(tensor, 5)
        else:
            copy = saver.get_cpu_backup(tensor)
            damaged = _core.STATE_DAMAGED in states()
            assert damaged or (copy is not None and holds(copy, 5))

    def restore() -> None:
        saver.pause("weights")
        saver.resume()
        assert holds(tensor, 5)

    return Case(lambda: [saver.pause("weights")].clear(), check, restore, [tensor, other])


def resuming() -> Case:
    tensor, other = filled("weights", 9), filled("cache", 11, backup=False)
    saver.pause()

    def check() -> None:
        assert _core.STATE_RESUMING not in states()
        if not _core.tag_info("weights").paused:
            assert holds(tensor, 9)

    def again() -> None:
        saver.resume()
        assert states() == {_core.STATE_ACTIVE}
        assert holds(tensor, 9)

    return Case(lambda: [saver.resume()].clear(), check, again, [tensor, other])


def emptying() -> Case:
    """Frees, under the mutex of PyTorch's allocator."""
    tensor = filled("weights", 13)
    kept = [filled("gone", 15, 32 * MIB)]

    def act() -> None:
        kept.clear()
        torch_memory_saver.empty_cache()

    return Case(act, lambda: None if holds(tensor, 13) else pytest.fail("wrong bytes"), keep=[tensor])


def out_of_memory() -> Case:
    """PyTorch has to release its cache before there is room."""
    cached = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    del cached
    room = torch.cuda.mem_get_info()[0] - 64 * MIB
    DRIVER.take(room)
    kept: list[torch.Tensor] = []

    def act() -> None:
        kept.append(filled("large", 17, 256 * MIB, backup=False))

    def again() -> None:
        if not kept:
            act()
        DRIVER.take(-room)

    return Case(act, lambda: None, again, kept)


def capturing(token: Any = None) -> Case:
    """A graph whose pool is managed, and what it computes."""
    source = torch.full((1024,), 2, dtype=torch.int32, device="cuda")
    kept: list[Any] = []

    def act() -> None:
        graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph, pool=token, tag="graph", enable_cpu_backup=True):
            result = source + 5
        kept[:] = [graph, result]

    def check() -> None:
        for graph, result in [tuple(kept)] if kept else []:
            graph.replay()
            torch.cuda.synchronize()
            assert bool((result.cpu() == 7).all())

    def again() -> None:
        if not kept:
            act()
        saver.pause("graph")
        saver.resume("graph")
        check()

    return Case(act, check, again, kept)


def capturing_into_a_token() -> Case:
    """Preloaded, the pool is torch's own, which gets its memory from cudaMalloc."""
    return capturing(torch.cuda.graph_pool_handle())


def pausing_a_graph() -> Case:
    case = capturing()
    case.act()

    def again() -> None:
        saver.pause("graph")
        saver.resume("graph")
        case.check()

    def check() -> None:
        if not _core.tag_info("graph").paused:
            case.check()

    return Case(lambda: [saver.pause("graph")].clear(), check, again, case.keep)


CASES: dict[str, Callable[[], Case]] = {
    "allocation": allocation,
    "pause": pausing,
    "resume": resuming,
    "empty_cache": emptying,
    "out_of_memory": out_of_memory,
    "cuda_graph": capturing,
    "graph_token": capturing_into_a_token,
    "pause_graph": pausing_a_graph,
}


def threads_of_the_library() -> int:
    """Threads that block SIGINT: the library's do from their start, and no others do except the simulated GPU's, which have
    a name."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        count += fields["Name"] != STREAM_THREAD and int(fields["SigBlk"], 16) >> (signal.SIGINT - 1) & 1
    return count


def settle_background() -> None:
    """Waits for work on threads of the library, such as releasing host memory: its driver calls count, too."""
    give_up = time.monotonic() + SETTLE_SECONDS
    while threads_of_the_library():
        assert time.monotonic() < give_up, "a thread of the library does not end"
        time.sleep(0)


def finish(case: Case) -> None:
    """Everything that the case made is freed."""
    if case.again:
        case.again()
    else:
        case.act()
        case.check()
    case.keep.clear()


def settle() -> None:
    """Without the tensors, everything is released, and refused memory is retried."""
    gc.collect()
    saver.resume()
    torch.cuda.synchronize()
    torch_memory_saver.empty_cache()
    torch.cuda.empty_cache()
    _core.resume((), None)
    settle_background()


@pytest.fixture(autouse=True)
def a_clean_device() -> Iterator[None]:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    settle_background()
    yield
    gc.collect()
    torch_memory_saver.empty_cache()


def leaks(baseline: dict[str, int]) -> list[str]:
    left, counters = DRIVER.left(), _core.counters()
    problems = [f"{name} is {left[name]}, was {baseline[name]}" for name in LEFT if left[name] > baseline[name]]
    for name in ("allocations", "host_backup_bytes", "damaged", "quarantined_handles", "quarantined_ranges"):
        if counters[name]:
            problems.append(f"{name} is {counters[name]}")
    return problems


def inject(make: Callable[[], Case], name: str, number: int, times: int, baseline: dict[str, int]) -> tuple[int, list[str]]:
    case = make()
    before = DRIVER.fired()
    DRIVER.fail(name, number, times, OUT_OF_MEMORY if name in SAYS_OUT_OF_MEMORY else OPERATING_SYSTEM)
    error = None
    try:
        case.act()
    except (RuntimeError, MemoryError) as caught:
        error = caught
    finally:
        settle_background()
        DRIVER.fail(name, 0, 0, 0)
    fired = DRIVER.fired() - before
    problems = [] if fired else ["the failure did not fire"]
    if _core.STATE_DAMAGED in states() and name not in REFUSALS:
        problems.append(f"DAMAGED, although only {name} failed")
    try:
        case.check()
        del error
        finish(case)
    except Exception as caught:
        problems.append(f"{type(caught).__name__}: {caught}")
        case.keep.clear()
    del case
    settle()
    return fired, problems + leaks(baseline)


@pytest.mark.parametrize("name", CASES)
def test_every_driver_call_fails(name: str, full: bool, count_injected: Callable[[int], None]) -> None:
    make = CASES[name]
    for _ in range(2):  # the first creates what is created once
        case = make()
        DRIVER.record()
        case.act()
        settle_background()
        calls = DRIVER.recorded()
        case.check()
        finish(case)
        del case
        settle()
    baseline = DRIVER.left()
    assert not leaks(baseline)
    problems, injected = [], 0
    for function, count in sorted(calls.items()):
        for number in range(count):
            for times in (1, 2) if full else (1,):
                fired, found = inject(make, function, number, times, baseline)
                injected += fired
                problems += [f"{function}#{number} x{times}: {problem}" for problem in found]
    print(f"{name}: {sum(calls.values())} driver calls, {injected} injected failures")
    count_injected(injected)
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:40])
    assert injected >= sum(calls.values()) > 0
