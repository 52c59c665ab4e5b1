"""What a sleep of the vLLM plug-in costs in a process with many Python objects, outside of the core.

The core measures its own part of each call. What is left is Python: the collector, PyTorch's list of segments, the
statistics and the hooks. It needs neither vLLM nor a GPU:

    python -m torch_memory_saver simulate --memory 8GiB -- python benchmarks/sleep_heap.py
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.vllm.allocator import SleepAllocator

MIB = 1 << 20


def make_heap(objects: int) -> list[Any]:
    """Return a structure of that many objects that the collector has to visit."""
    return [{"name": [index]} for index in range(objects // 2)]


def native_ms() -> float:
    stats = saver.stats()
    return (stats.pauses.seconds + stats.resumes.seconds) * 1e3


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds that a call takes, and those of them inside the core."""
    native = native_ms()
    began = time.perf_counter()
    call()
    whole = (time.perf_counter() - began) * 1e3
    return whole, native_ms() - native


def show(name: str, figures: list[tuple[float, float]]) -> None:
    outside = [whole - native for whole, native in figures]
    print(
        f"{name:8} {statistics.median(whole for whole, _ in figures):8.2f} ms, outside the core "
        f"{statistics.median(outside):8.2f} ms [{min(outside):.2f}, {max(outside):.2f}]",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=2_000_000, help="Python objects that the process has")
    parser.add_argument("--weights", type=int, default=400, help="number of tensors of 2 MiB")
    parser.add_argument("--caches", type=int, default=32, help="number of tensors of 32 MiB")
    parser.add_argument("--cycles", type=int, default=10)
    parsed = parser.parse_args()

    allocator = SleepAllocator()
    with allocator.use_memory_pool("weights"):
        weights = [torch.ones(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(parsed.weights)]
    with allocator.use_memory_pool("kv_cache"):
        caches = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(parsed.caches)]
    heap = make_heap(parsed.objects)
    gc.collect()
    sleeps, wakes = [], []
    for _ in range(parsed.cycles):
        sleeps.append(timed(lambda: allocator.sleep("weights")))
        wakes.append(timed(allocator.wake_up))
    assert all(bool((weight == 1).all()) for weight in weights)
    print(f"{len(weights)} weights, {len(caches)} caches, {parsed.objects} objects ({len(heap)})")
    show("sleep 1", sleeps[:1])
    show("sleep", sleeps[1:])
    show("wake up", wakes)


if __name__ == "__main__":
    main()
