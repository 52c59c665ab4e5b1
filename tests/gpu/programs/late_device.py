"""Each argument names a way to use GPU 1 for the first time, after memory of GPU 0 was allocated in a region.

Each way has a process of its own, forked before the first use of CUDA. `unwatched` runs one without the watch: its copy
fails.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.comm

from torch_memory_saver import _core, torch_memory_saver
from torch_memory_saver._engine.process import late_devices
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL

SIZE = 1 << 20
TIMEOUT = 60
#: Ways that end with an error of the device.
FAILING = ("paused_memory", "unwatched")
WAYS: dict[str, Callable[[torch.Tensor], None]] = {}
Way = Callable[[torch.Tensor], None]


def way(function: Way) -> Way:
    """A way to use GPU 1 first. Its argument is managed, on GPU 0, and full of 7."""
    WAYS[function.__name__] = function
    return function


def late(value: float, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), value, device="cuda:1")


def check(tensor: torch.Tensor, value: float) -> None:
    assert bool((tensor == value).all()), (tensor, value)


@way
def to(managed: torch.Tensor) -> None:
    check(managed.to("cuda:1"), 7)


@way
def copy_into(managed: torch.Tensor) -> None:
    managed.copy_(late(8))
    check(managed, 8)


@way
def copy_into_on_the_devices_stream(managed: torch.Tensor) -> None:
    with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream(device=1)):
        managed.copy_(late(8), non_blocking=True)
    torch.cuda.synchronize(1)
    check(managed, 8)


@way
def kernel_into(managed: torch.Tensor) -> None:
    """A copy between layouts is a kernel of the source's device. Without access it faults, and the context is lost."""
    managed[::2].copy_(late(8, SIZE // 2))
    check(managed[::2], 8)
    check(managed[1::2], 7)


@way
def gradients(managed: torch.Tensor) -> None:
    """Autograd copies the gradient from GPU 1 in C++."""
    managed.requires_grad_()
    with torch_memory_saver.region(tag="gradients"):
        loss = (managed * 2).to("cuda:1") * 3
        loss.backward(torch.ones_like(loss))
    assert managed.grad is not None
    check(managed.grad, 6)


@way
def broadcast(managed: torch.Tensor) -> None:
    for copy in torch.cuda.comm.broadcast(managed, [0, 1]):
        check(copy, 7)


@way
def another_thread(managed: torch.Tensor) -> None:
    """While the main thread waits for a lock, it cannot end the watch; ``empty_cache()`` does."""

    def use_and_empty() -> None:
        copy_into(managed)
        torch.cuda.empty_cache()
        assert not late_devices._pools
        assert torch.cuda.memory_reserved(1) == 0

    in_thread(use_and_empty)
    check(managed, 8)


@way
def inside_disable(managed: torch.Tensor) -> None:
    with torch_memory_saver.region(tag="cache"), torch_memory_saver.disable():
        source = late(8)
        assert _core.find(source.data_ptr()) is None
        managed.copy_(source)
        check(managed, 8)


@way
def inside_a_region(managed: torch.Tensor) -> None:
    with torch_memory_saver.region(tag="cache"):
        source = late(8)
        assert not late_devices._pools
        row = _core.find(source.data_ptr())
        assert row is not None
        assert row.tag == "cache"
        managed.copy_(source)
    check(managed, 8)


@way
def during_pauses(managed: torch.Tensor) -> None:
    """GPU 1 joins while another thread pauses and resumes other memory."""
    with torch_memory_saver.region(tag="cache", enable_cpu_backup=True):
        cache = torch.full((SIZE,), 5.0, device="cuda:0")
    running, joined = threading.Event(), threading.Event()

    def cycle() -> None:
        for _ in range(1000):
            torch_memory_saver.pause("cache")
            running.set()
            torch_memory_saver.resume("cache")
            if joined.is_set():
                return

    thread = threading.Thread(target=cycle)
    thread.start()
    assert running.wait(TIMEOUT)
    source = late(8)
    joined.set()
    thread.join()
    cache.copy_(source)
    managed.copy_(source)
    check(cache, 8)
    check(managed, 8)


@way
def paused_memory(managed: torch.Tensor) -> None:
    source = late(8)
    torch_memory_saver.pause("weights")
    assert copy_fails(managed, source)


@way
def the_watch_leaves_nothing(managed: torch.Tensor) -> None:
    source = late(8)
    later = late(9)
    assert pool_of(source) != DEFAULT_POOL
    assert pool_of(later) == DEFAULT_POOL
    del source
    torch.cuda.empty_cache()
    managed.copy_(later)
    check(managed, 9)
    del later
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == 0


@way
def the_device_keeps_its_own_pool(managed: torch.Tensor) -> None:
    """Only the segment of the first tensor is not used again, until ``empty_cache()``."""
    for _ in range(3):
        tensors = [late(8.0, 16 * SIZE) for _ in range(4)]
        managed.copy_(tensors[0][:SIZE])
        assert torch.cuda.memory_reserved(1) <= 5 * tensors[0].nbytes
        del tensors
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == 0


@way
def a_pool_of_the_program(managed: torch.Tensor) -> None:
    """PyTorch ends the process when a MemPool is destroyed while another is routed on its device."""
    with torch.cuda.device(1):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            source = late(8)
    managed.copy_(source)
    check(managed, 8)
    del source, pool
    gc.collect()
    torch.cuda.empty_cache()


@way
def a_graph(managed: torch.Tensor) -> None:
    """Since 2.15 PyTorch allocates nothing outside of the graph's pool before a capture."""
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            source = late(8)
        graph.replay()
        managed.copy_(source)
        check(managed, 8)
        del source, graph
    torch.cuda.empty_cache()


@way
def unwatched(managed: torch.Tensor) -> None:
    late_devices.end_all()
    assert copy_fails(managed, late(8))


def copy_fails(target: torch.Tensor, source: torch.Tensor) -> bool:
    try:
        target.copy_(source)
        torch.cuda.synchronize(1)
    except RuntimeError as error:  # an illegal access if the copy is a kernel
        assert "invalid argument" in str(error) or "illegal memory access" in str(error), error
        return True
    return False


def in_thread(function: Callable[[], None]) -> None:
    """Calls the function on a thread, for which this one waits."""
    failed: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def pool_of(tensor: torch.Tensor) -> Any:
    """The pool that has the tensor."""
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return segment["segment_pool_id"]
    raise AssertionError(address)


def run(name: str) -> None:
    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        managed = torch.full((SIZE,), 7.0, device="cuda:0")
    assert _core.active_devices() == 1, "GPU 1 is not in use yet"
    WAYS[name](managed)
    if name not in FAILING:
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    for name in sys.argv[1:] or WAYS:
        process = fork.Process(target=run, args=(name,))
        process.start()
        process.join(TIMEOUT)
        assert process.exitcode == 0, (name, process.exitcode)
        print(name, "ok")
