"""Guards calls that a library hands to a thread pool inside a region, with PyTorch and with transformers: their tensors are
managed, with hardly more memory than without a region, and a pause waits for none of them."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import MIB, STARTED_PRELOADED, core, cuda_runtime, saver, torch

#: The peak may be this much of the ordinary one.
MAX_RATIO = 1.15
PATIENCE_S = 60.0


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")


@needs("transformers")
@needs("accelerate")
def test_a_model_of_transformers_is_managed() -> None:
    """However it is loaded."""
    (done,) = run_programs([Program("from_pretrained.py", preload=STARTED_PRELOADED)])
    ordinary, *managed = [list(map(float, line.split())) for line in done.check().output.splitlines()]
    assert len(managed) == 3
    for size, managed_size, peak in managed:
        assert managed_size == size
        assert peak <= MAX_RATIO * ordinary[2]


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_memory_of_many_workers(workers: int) -> None:
    """As many tensors of each size as a model has, each made by a call. Each call that is in the region at the same time may
    leave 17 MiB of its pool unused: a segment of PyTorch has 20 MiB for tensors of 4, and one of 2 MiB for those of 1."""
    sizes = [4 * MIB] * 24 + [MIB] * 32 + [64 * MIB] * 4

    def load(size: int) -> Any:
        return torch.ones(size, dtype=torch.uint8, device="cuda")

    def reserved(managed: bool) -> tuple[int, list[Any]]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        with ThreadPoolExecutor(workers) as pool:
            if managed:
                with saver.region(tag="weights", enable_cpu_backup=True):
                    tensors = list(pool.map(load, sizes))
            else:
                tensors = list(pool.map(load, sizes))
        return torch.cuda.max_memory_reserved() - before, tensors

    ordinary, tensors = reserved(False)
    assert {saver.tag_of(tensor) for tensor in tensors} == {None}
    del tensors
    peak, tensors = reserved(True)
    assert {saver.tag_of(tensor) for tensor in tensors} == {"weights"}
    assert peak <= MAX_RATIO * ordinary
    saver.pause("weights")
    saver.resume("weights")
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_what_a_running_call_allocates_after_a_pause_is_ordinary() -> None:
    """Memory that it takes from the driver itself is managed inside a region by the preload library, and ordinary then."""
    allocated, go_on = threading.Event(), threading.Event()
    runtime = ctypes.CDLL(None) if STARTED_PRELOADED else cuda_runtime()

    def take(size: int) -> bool:
        address = ctypes.c_void_p()
        assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        is_managed = core.find(address.value or 0) is not None
        assert runtime.cudaFree(address) == 0
        return is_managed

    def work() -> tuple[Any, bool, Any, bool]:
        first, first_is_managed = torch.ones(2 * MIB, dtype=torch.uint8, device="cuda"), take(2 * MIB)
        allocated.set()
        assert go_on.wait(PATIENCE_S)
        return first, first_is_managed, torch.ones(2 * MIB, dtype=torch.uint8, device="cuda"), take(2 * MIB)

    with ThreadPoolExecutor(1) as pool:
        with saver.region(tag="weights", enable_cpu_backup=True):
            future = pool.submit(work)
        assert allocated.wait(PATIENCE_S)
        assert saver.pause("weights", timeout=0.0).allocations >= 1
        go_on.set()
        first, first_is_managed, second, second_is_managed = future.result(PATIENCE_S)
    assert (saver.tag_of(first), saver.tag_of(second)) == ("weights", None)
    assert (first_is_managed, second_is_managed) == (STARTED_PRELOADED, False)
    assert bool((second == 1).all())
    saver.resume("weights")
    assert bool((first == 1).all())
    with saver.region(tag="weights", enable_cpu_backup=True), ThreadPoolExecutor(1) as pool:
        third = pool.submit(torch.ones, 2 * MIB, dtype=torch.uint8, device="cuda").result()
    assert saver.tag_of(third) == "weights"
