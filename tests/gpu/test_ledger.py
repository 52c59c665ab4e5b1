"""Guards the ledger with PyTorch: managed memory and PyTorch's other memory are told apart, and all lines add up."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from gpu_support import MIB, assert_close_to, saver, torch
from second_process import SecondProcess

from torch_memory_saver import _core
from torch_memory_saver.reports import DeviceLedger

SIZE = 64 * MIB


def ledger_of(device: int = 0) -> DeviceLedger:
    ledger = saver.ledger(device)[device]
    assert sum(line.bytes or 0 for line in ledger.lines) == ledger.used_bytes
    assert ledger.used_bytes + ledger.free_bytes == ledger.total_bytes
    assert ledger.total_bytes == torch.cuda.mem_get_info(device)[1]
    return ledger


def size_of(ledger: DeviceLedger, holder: str) -> int:
    return sum(line.bytes or 0 for line in ledger.of(holder))


def part_of(ledger: DeviceLedger, holder: str, name: str) -> int:
    return sum(part.bytes or 0 for line in ledger.of(holder) for part in line.parts if part.name == name)


def test_managed_memory_and_ordinary_memory() -> None:
    torch.cuda.empty_cache()
    before = ledger_of()
    with saver.region("managed"):
        managed = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    ordinary = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    after = ledger_of()
    assert part_of(after, "managed", "managed") == SIZE
    assert size_of(after, "managed") - size_of(before, "managed") == SIZE
    assert size_of(after, "torch") - size_of(before, "torch") == SIZE
    saver.pause("managed")
    paused = ledger_of()
    assert size_of(after, "managed") - size_of(paused, "managed") == SIZE
    assert size_of(paused, "torch") == size_of(after, "torch")
    cached = part_of(paused, "torch", "cached")
    del ordinary
    assert part_of(ledger_of(), "torch", "cached") - cached == SIZE
    saver.resume()
    assert bool(managed[0] >= 0)
    assert str(saver.ledger()).splitlines()[0].split() == ["device", "0", "MiB", "allocations"]


def test_expandable_segments_are_of_torch_only() -> None:
    torch.cuda.empty_cache()
    before = ledger_of()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        ordinary = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
        after = ledger_of()
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    assert part_of(after, "torch", "in use") - part_of(before, "torch", "in use") == SIZE
    assert size_of(after, "managed") == size_of(before, "managed")
    assert size_of(after, "library") == size_of(before, "library")
    del ordinary
    torch.cuda.empty_cache()


def test_during_a_capture() -> None:
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        static += 1
        ledger = ledger_of()
    graph.replay()
    assert static.tolist() == [1.0] * 4
    assert size_of(ledger, "torch") > 0


def test_frees_during_a_capture_are_counted() -> None:
    """Their memory is on the device until the capture ends."""
    with saver.region("freed during a capture"):
        tensor = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    reached, proceed = threading.Event(), threading.Event()

    def capture() -> None:
        graph, static = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
        with saver.cuda_graph(graph, tag="captured", stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            static += 1
            reached.set()
            assert proceed.wait(60)

    with ThreadPoolExecutor(1) as pool:
        captured = pool.submit(capture)
        assert reached.wait(60)
        try:
            del tensor
            saver.empty_cache()
            usage = saver.stats("freed during a capture").total
            ledger = ledger_of()
        finally:
            proceed.set()
        captured.result()
    assert (usage.resident_bytes, usage.deferred_bytes) == (0, SIZE)
    assert part_of(ledger, "deferred", "freed during a capture") == SIZE
    saver.empty_cache()
    assert saver.stats().total.deferred_bytes == 0
    assert ledger_of().of("deferred") == ()


@pytest.mark.skipif(not _core.preloaded, reason="only in hook mode preload: other libraries are counted")
def test_another_library_is_a_line_of_its_own() -> None:
    torch.zeros(1, device="cuda")
    runtime = ctypes.CDLL(None)  # what the dynamic linker binds
    address = ctypes.c_void_p()
    before = ledger_of()
    assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(SIZE)) == 0
    during = ledger_of()
    assert size_of(during, "library") - size_of(before, "library") == SIZE
    assert during.used_bytes - before.used_bytes >= SIZE - 4 * MIB
    assert size_of(during, "torch") == size_of(before, "torch")
    (line,) = (line for line in during.of("library") if (line.bytes or 0) >= SIZE)
    assert line.allocations
    assert runtime.cudaFree(address) == 0
    assert size_of(ledger_of(), "library") == size_of(before, "library")


@pytest.mark.usefixtures("shared_device")
def test_memory_of_another_process() -> None:
    tensor = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    with SecondProcess() as other:
        other.do("allocate", "weights", SIZE, "none")  # its context and its kernels as well
        before = ledger_of()
        other.do("allocate", "weights", 3 * SIZE, "none")
        more = ledger_of()
        grown = size_of(more, "processes") - size_of(before, "processes")
        assert_close_to(grown, 3 * SIZE, "other processes")  # where NVML is hidden, with the context of this one
        assert size_of(more, "torch") == size_of(before, "torch")
        (line,) = more.of("processes")
        if more.of("context")[0].bytes is not None:
            (process,) = (part for part in line.parts if part.name == f"pid {other.pid}")
            assert (process.bytes or 0) >= 4 * SIZE
        other.do("pause")
        fallen = size_of(more, "processes") - size_of(ledger_of(), "processes")
        assert_close_to(fallen, 4 * SIZE, "other processes")
    del tensor
