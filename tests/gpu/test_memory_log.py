"""Guards MemoryLog with PyTorch's own allocator and two processes on one GPU: the bytes of a pause, of the other process and
of this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_support import MIB, assert_close_to, empty, saver, torch
from second_process import SecondProcess

from torch_memory_saver.observe.memory import MemoryLog, MemoryRow, log_memory, plot_memory_log, read_memory_log

SIZE = 64 * MIB


def row_of(log: MemoryLog, label: str = "") -> MemoryRow:
    """A new row of device 0."""
    (row,) = [row for row in log.mark(label) if row.device == 0]
    return row


def difference(after: MemoryRow, before: MemoryRow, name: str) -> int:
    values = getattr(after, name), getattr(before, name)
    assert None not in values, f"{name} is unknown"
    return int(values[0] - values[1])


def test_a_pause_lowers_what_is_physical_and_not_torchs_counters() -> None:
    with saver.region("a", enable_cpu_backup=True):
        tensor = empty(SIZE)
    log = MemoryLog("engine")
    before = row_of(log)
    saver.pause("a")
    after = row_of(log)
    for name in ("allocated", "reserved", "peak_allocated", "peak_reserved"):
        assert difference(after, before, name) == 0, name
    assert difference(before, after, "physical") == SIZE
    assert (difference(before, after, "resident"), difference(after, before, "paused")) == (SIZE, SIZE)
    assert difference(after, before, "host_backup") >= SIZE
    assert_close_to(difference(before, after, "device_used"), SIZE, "device used")
    assert_close_to(difference(after, before, "device_free"), SIZE, "device free")
    saver.resume("a")
    assert difference(row_of(log), after, "physical") == SIZE
    del tensor


def test_torchs_counters_are_those_of_the_row() -> None:
    tensor = empty(SIZE)
    row = row_of(MemoryLog("engine", summary=True))
    assert row.allocated == torch.cuda.memory_allocated(0)
    assert row.reserved == torch.cuda.memory_reserved(0)
    assert row.peak_allocated == torch.cuda.max_memory_allocated(0)
    assert row.peak_reserved == torch.cuda.max_memory_reserved(0)
    assert (row.pid, row.paused) == (os.getpid(), 0)
    assert "PyTorch CUDA memory summary" in row.summary
    del tensor


@pytest.mark.usefixtures("shared_device")
def test_memory_of_another_process() -> None:
    """Its tensor of a known size shows in what the device uses, and in `other_processes` where NVML shows our share."""
    tensor = empty(SIZE)  # a context, before the other process
    log = MemoryLog("engine")
    with SecondProcess() as other:
        other.do("allocate", "weights", SIZE, "none")  # its context and its kernels as well
        before = row_of(log)
        other.do("allocate", "weights", 3 * SIZE, "none")
        more = row_of(log)
        assert_close_to(difference(more, before, "device_used"), 3 * SIZE, "device used")
        assert difference(more, before, "reserved") == difference(more, before, "physical") == 0
        if more.other_processes is not None:
            assert_close_to(difference(more, before, "other_processes"), 3 * SIZE, "other processes")
            assert more.process is not None and more.process >= (more.physical or 0)
        other.do("pause")
        paused = row_of(log)
        assert_close_to(difference(more, paused, "device_used"), 4 * SIZE, "device used")
        if paused.other_processes is not None:
            assert_close_to(difference(more, paused, "other_processes"), 4 * SIZE, "other processes")
    del tensor


@pytest.mark.usefixtures("shared_device")
def test_the_share_of_this_process() -> None:
    """Memory of its own is not of other processes."""
    log = MemoryLog("engine")
    kept = empty(2 * MIB)
    before = row_of(log)
    if before.process is None:
        pytest.skip("NVML does not show this process's share, as in a container")
    tensor = empty(SIZE)
    after = row_of(log)
    assert_close_to(difference(after, before, "process"), SIZE, "this process")
    assert_close_to(difference(after, before, "other_processes"), 0, "other processes")
    assert after.device_used is not None and after.process is not None
    assert after.other_processes == after.device_used - after.process
    del tensor, kept


@pytest.mark.parametrize("ours", [True, False])
def test_a_row_during_a_capture_does_not_break_it(ours: bool) -> None:
    log = MemoryLog("engine")
    source = torch.full((MIB,), 3.0, device="cuda")
    (source + 1).sum().item()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph) if ours else torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        result = source + 1
        log.mark("capturing")
    graph.replay()
    assert float(result.min()) == float(result.max()) == 4
    assert log.rows[-1].label == "capturing"
    graph.reset()


def test_a_cycle_logged_released_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    logged = log_memory(role="engine", path=path, release=True)
    with saver.region("a"):
        tensor = empty(SIZE)

    @logged
    def sleep() -> None:
        burst = empty(2 * SIZE)
        del burst
        saver.pause("a")

    @logged
    def wake_up() -> None:
        saver.resume("a")

    sleep()
    wake_up()
    rows = {row.label: row for row in read_memory_log(path) if row.device == 0}
    assert list(rows) == [
        f"{when} {name}" for name in ("sleep", "wake_up") for when in ("before", "after", "released after")
    ]
    slept, released = rows["after sleep"], rows["released after sleep"]
    assert difference(slept, rows["before sleep"], "reserved") == 2 * SIZE
    assert difference(slept, released, "reserved") == difference(slept, released, "physical") == 2 * SIZE
    assert difference(rows["after wake_up"], released, "physical") == SIZE
    assert tuple(logged.log.rows) == tuple(read_memory_log(path))
    pytest.importorskip("matplotlib")
    plot_memory_log(tmp_path / "log.png", logged.log.rows)
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")
    del tensor
