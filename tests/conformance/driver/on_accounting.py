"""What cuMemGetInfo reports as memory is allocated and released, and what happens when there is none left."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from gpu import GRANULE, MIB, Gpu
from table import Observations, behaviour


def changes(gpu: Gpu, *steps: tuple[str, Callable[[], object]]) -> Observations:
    """By how many bytes free memory went down with each step."""
    seen: Observations = {}
    before = gpu.free_bytes()
    for label, step in steps:
        step()
        after = gpu.free_bytes()
        seen[label] = before - after
        before = after
    return seen


@behaviour
def vmm_cycle(gpu: Gpu) -> Observations:
    size = 8 * GRANULE
    address, handle = gpu.reserve(size), 0

    def create() -> None:
        nonlocal handle
        handle = gpu.create(size)

    gpu.drop(gpu.block())  # the cost of the first use is not under observation
    return changes(
        gpu,
        ("create", create),
        ("map", lambda: gpu.must("cuMemMap", address, size, 0, handle, 0)),
        ("access", lambda: gpu.allow(address, size)),
        ("unmap", lambda: gpu.must("cuMemUnmap", address, size)),
        ("release", lambda: gpu.must("cuMemRelease", handle)),
        ("free address", lambda: gpu.must("cuMemAddressFree", address, size)),
    )


@behaviour
def reservation(gpu: Gpu) -> Observations:
    return changes(gpu, ("reserve 1 GiB", lambda: gpu.reserve(1 << 30)))


@behaviour
def release_then_unmap(gpu: Gpu) -> Observations:
    block = gpu.block(8 * GRANULE)
    return changes(
        gpu,
        ("release", lambda: gpu.must("cuMemRelease", block.handle)),
        ("unmap", lambda: gpu.must("cuMemUnmap", block.address, block.bytes)),
    )


@behaviour
def retained(gpu: Gpu) -> Observations:
    block, again = gpu.block(8 * GRANULE), ctypes.c_uint64()
    return changes(
        gpu,
        ("retain", lambda: gpu.must("cuMemRetainAllocationHandle", again, block.address)),
        ("unmap", lambda: gpu.must("cuMemUnmap", block.address, block.bytes)),
        ("release", lambda: gpu.must("cuMemRelease", block.handle)),
        ("release retained", lambda: gpu.must("cuMemRelease", again.value)),
    )


@behaviour
def exported(gpu: Gpu) -> Observations:

    handle, descriptor = gpu.create(8 * GRANULE, handle_types=1), ctypes.c_int()
    return changes(
        gpu,
        ("export", lambda: gpu.must("cuMemExportToShareableHandle", descriptor, handle, 1, 0)),
        ("release", lambda: gpu.must("cuMemRelease", handle)),
        ("close", lambda: os.close(descriptor.value)),
    )


@behaviour
def mapped_twice(gpu: Gpu) -> Observations:
    block, second = gpu.block(8 * GRANULE), gpu.reserve(8 * GRANULE)
    return changes(
        gpu,
        ("map again", lambda: gpu.must("cuMemMap", second, block.bytes, 0, block.handle, 0)),
        ("release", lambda: gpu.must("cuMemRelease", block.handle)),
        ("unmap first", lambda: gpu.must("cuMemUnmap", block.address, block.bytes)),
        ("unmap second", lambda: gpu.must("cuMemUnmap", second, block.bytes)),
    )


@behaviour
def runtime_large(gpu: Gpu) -> Observations:
    pointers: list[int] = []
    return changes(
        gpu,
        ("malloc 16 MiB", lambda: pointers.append(gpu.malloc(16 * MIB))),
        ("malloc 33 MiB", lambda: pointers.append(gpu.malloc(33 * MIB))),
        ("free the first", lambda: gpu.must("cudaFree", pointers[0])),
        ("free the second", lambda: gpu.must("cudaFree", pointers[1])),
    )


@behaviour
def runtime_small(gpu: Gpu) -> Observations:
    pointers: list[int] = []
    return changes(
        gpu,
        ("malloc 1 byte", lambda: pointers.append(gpu.malloc(1))),
        ("a second byte", lambda: pointers.append(gpu.malloc(1))),
        ("free one", lambda: gpu.must("cudaFree", pointers[0])),
        ("free the other", lambda: gpu.must("cudaFree", pointers[1])),
    )


@behaviour
def pinned_host(gpu: Gpu) -> Observations:
    return changes(gpu, ("pinned 8 MiB", lambda: gpu.pinned(8 * MIB)))


@behaviour
def both_tell_the_same(gpu: Gpu) -> Observations:
    free, total = ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cudaMemGetInfo", free, total)
    whole = ctypes.c_uint64()
    return {
        "free": gpu.free_bytes() == free.value,
        "total": gpu.total_bytes() == total.value,
        "cuDeviceTotalMem": [gpu.cuDeviceTotalMem(whole, 0), whole.value == total.value],
        "some is taken": free.value < total.value,
        "no results": [gpu.cuMemGetInfo(None, None), gpu.cudaMemGetInfo(None, None)],
    }


@behaviour
def too_much(gpu: Gpu) -> Observations:
    free, total = gpu.free_bytes(), gpu.total_bytes()
    handle, pointer, other = ctypes.c_uint64(7), ctypes.c_uint64(7), ctypes.c_uint64(7)
    more = (free // GRANULE + 64) * GRANULE
    all_and_one = (total // GRANULE + 1) * GRANULE
    seen: Observations = {}
    for label, size in (("more than free", more), ("more than there is", all_and_one), ("2**60", 1 << 60)):
        seen[label] = {
            "cuMemCreate": gpu.cuMemCreate(handle, size, gpu.properties(), 0),
            "cuMemAlloc": gpu.cuMemAlloc(pointer, size),
            "cudaMalloc": gpu.cudaMalloc(other, size),
            "cudaGetLastError": gpu.cudaGetLastError(),
        }
    seen["results afterwards"] = [handle.value, pointer.value, other.value]
    seen["free as before"] = gpu.free_bytes() == free
    seen["works afterwards"] = gpu.cuMemCreate(handle, GRANULE, gpu.properties(), 0)
    return seen


@behaviour
def huge_host(gpu: Gpu) -> Observations:
    host = ctypes.c_uint64()
    return {"cuMemHostAlloc 2**60": gpu.cuMemHostAlloc(host, 1 << 60, 0), "size 0": gpu.cuMemHostAlloc(host, 0, 0)}
