"""Pinned host memory: what may be registered, its users, when it is unpinned, and copies of unpinned pages."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import ClassVar

from gpu import DEFAULT, DEVICE_TO_HOST, GRANULE, MIB, Gpu, PointerAttributes
from table import Observations, behaviour

PAGE = 4096
MADV_HUGEPAGE = 14
PORTABLE, DEVICE_MAP, IO_MEMORY, READ_ONLY_PAGES = 1, 2, 4, 8


class Pages:
    """Pages of their own mapping, which nothing else lies in; kept until the process ends."""

    kept: ClassVar[list[mmap.mmap]] = []

    def __init__(self, size: int, *, huge: bool = False, shared: bool = False) -> None:
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        memory = mmap.mmap(-1, size + GRANULE, flags=kind | mmap.MAP_ANONYMOUS)
        self.kept.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.address = start + -start % GRANULE
        self.size = size
        if huge:
            memory.madvise(MADV_HUGEPAGE)
            ctypes.memset(self.address, 1, size)

    def protect(self, protection: int) -> None:
        libc = ctypes.CDLL(None)
        if libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), protection) != 0:
            raise RuntimeError("mprotect failed")


def both(gpu: Gpu, address: int, size: int, flags: int = 0) -> list[str]:
    """Registered, and if so unregistered."""
    result = gpu.cuMemHostRegister(address, size, flags)
    return [result, gpu.cuMemHostUnregister(address)] if result == "SUCCESS" else [result]


@behaviour
def register_sizes(gpu: Gpu) -> Observations:
    at = Pages(MIB).address
    return {
        "a byte": both(gpu, at, 1),
        "a byte inside a page": both(gpu, at + 5, 1),
        "over a page's end": both(gpu, at + PAGE - 1, 2),
        "2**63 bytes": both(gpu, at, 1 << 63),
        "past the mapping": both(gpu, at, 1 << 40),
        "runtime, 0 bytes": [gpu.cudaHostRegister(at, 0, 0), gpu.cudaGetLastError()],
        "runtime, bad flags": [gpu.cudaHostRegister(at, PAGE, 0x100), gpu.cudaGetLastError()],
        "runtime, NULL": [gpu.cudaHostRegister(0, PAGE, 0), gpu.cudaGetLastError()],
    }


@behaviour
def register_flags(gpu: Gpu) -> Observations:
    at = Pages(MIB).address
    flags = {"portable": PORTABLE, "device map": DEVICE_MAP, "read only": READ_ONLY_PAGES, "16": 16, "all known": 15}
    return {label: both(gpu, at, PAGE, value) for label, value in flags.items()}


@behaviour(own_process=True)
def register_io_memory(gpu: Gpu) -> Observations:
    gpu.start()
    return {"ordinary pages": both(gpu, Pages(MIB).address, PAGE, IO_MEMORY)}


@behaviour
def register_kinds(gpu: Gpu) -> Observations:
    """Kinds of pages: huge, shared, never accessed, without access, not mapped at all."""
    huge, shared, fresh = Pages(4 * GRANULE, huge=True), Pages(MIB, shared=True), Pages(MIB)
    closed, constant = Pages(MIB), Pages(MIB)
    closed.protect(0)
    constant.protect(mmap.PROT_READ)
    at = huge.address
    seen: Observations = {
        "huge": gpu.cuMemHostRegister(at, huge.size, 0),
        "inside a huge page": gpu.cuMemHostUnregister(at + PAGE),
        "at the second huge page": gpu.cuMemHostUnregister(at + GRANULE),
        "unregister": gpu.cuMemHostUnregister(at),
        "half a huge page": both(gpu, at, GRANULE // 2),
        "from the middle of one to the middle of the next": both(gpu, at + GRANULE // 2, GRANULE),
        "shared": both(gpu, shared.address, shared.size),
        "never touched": both(gpu, fresh.address, fresh.size),
        "no access": both(gpu, closed.address, closed.size),
        "read only": both(gpu, constant.address, constant.size),
        "read only, said so": both(gpu, constant.address, constant.size, READ_ONLY_PAGES),
        "reserved for the device": both(gpu, gpu.reserve(), PAGE),
    }
    return seen


@behaviour
def register_device_memory(gpu: Gpu) -> Observations:
    block, pointer = gpu.block(), gpu.malloc()
    seen: Observations = {
        "VMM": both(gpu, block.address, PAGE),
        "cudaMalloc": both(gpu, pointer, PAGE),
        "unregister VMM": gpu.cuMemHostUnregister(block.address),
        "free VMM as host memory": gpu.cuMemFreeHost(block.address),
        "free cudaMalloc as host memory": gpu.cuMemFreeHost(pointer),
    }
    gpu.drop(block)
    return seen


@behaviour
def register_neighbours(gpu: Gpu) -> Observations:
    """Two registrations that share a page, though not a byte."""
    at = Pages(MIB).address
    seen: Observations = {
        "first half of a page": gpu.cuMemHostRegister(at, PAGE // 2, 0),
        "second half of it": gpu.cuMemHostRegister(at + PAGE // 2, PAGE // 2, 0),
        "the next page": gpu.cuMemHostRegister(at + PAGE, PAGE, 0),
        "around all": gpu.cuMemHostRegister(at, 4 * PAGE, 0),
    }
    for label, offset in (("first half", 0), ("second half", PAGE // 2), ("next page", PAGE)):
        seen[f"unregister the {label}"] = gpu.cuMemHostUnregister(at + offset)
    return seen


@behaviour
def copies_of_unregistered(gpu: Gpu) -> Observations:
    """Asynchronous copies of pages that CUDA does not know, that it knows in part, and that it knew."""
    pages, block, stream = Pages(MIB), gpu.block(), gpu.stream()
    at, half = pages.address, pages.size // 2
    gpu.put(block.address, 0x21, MIB)
    seen: Observations = {"to it": gpu.cuMemcpyDtoHAsync(at, block.address, MIB, stream)}
    seen["from it"] = gpu.cuMemcpyHtoDAsync(block.address, at, MIB, stream)
    seen["synchronize"] = gpu.cuStreamSynchronize(stream)
    seen["contents"] = ctypes.string_at(at + MIB - 1, 1).hex()
    seen["register half"] = gpu.cuMemHostRegister(at, half, 0)
    seen["to both halves"] = gpu.cuMemcpyDtoHAsync(at, block.address, MIB, stream)
    seen["from both halves"] = gpu.cuMemcpyHtoDAsync(block.address, at, MIB, stream)
    seen["from the middle"] = gpu.cuMemcpyHtoDAsync(block.address, at + half // 2, half, stream)
    seen["synchronize again"] = gpu.cuStreamSynchronize(stream)
    seen["unregister"] = gpu.cuMemHostUnregister(at)
    seen["to it afterwards"] = gpu.cuMemcpyDtoHAsync(at, block.address, MIB, stream)
    seen["synchronize at last"] = gpu.cuStreamSynchronize(stream)
    seen["device as host, source"] = gpu.cuMemcpyHtoD(block.address, block.address + GRANULE // 2, PAGE)
    seen["device as host, target"] = gpu.cuMemcpyDtoH(block.address, block.address + GRANULE // 2, PAGE)
    gpu.drop(block)
    return seen


@behaviour
def batches_of_pageable_memory(gpu: Gpu) -> Observations:
    """Many copies by one call, to and from host memory that is not pinned; each end somewhere in a page."""
    count, size, step = 64, 40_000, 48 * 1024
    pages, block, stream = Pages(count * step), gpu.block(2 * GRANULE), gpu.stream()
    places = [i * step + 64 * (i % 7) for i in range(count)]
    for i, place in enumerate(places):
        gpu.put(block.address + place, i + 1, size)
    to_host = [(pages.address + place, block.address + place, size) for place in places]
    seen: Observations = {"to host": [gpu.batch(to_host, stream), gpu.cuStreamSynchronize(stream)]}
    expected = [bytes([i + 1]) * size for i in range(count)]
    seen["same"] = [ctypes.string_at(pages.address + place, size) for place in places] == expected
    gpu.put(block.address, 0, block.bytes)
    to_device = [(target, host, size) for host, target, size in to_host]
    for order in (1, 3):
        gpu.put(block.address, 0, block.bytes)
        seen[f"to device, order {order}"] = [gpu.batch(to_device, stream, orders=(order,)), gpu.cuStreamSynchronize(stream)]
        seen[f"same, order {order}"] = [gpu.read(block.address + place, size) for place in places] == [
            f"bytes {i + 1:02x}" for i in range(count)
        ]
    gpu.drop(block)
    return seen


@behaviour
def batches_of_copies(gpu: Gpu) -> Observations:
    """Several copies by one call, and the arguments that it accepts."""
    pages, block, other, stream = Pages(MIB), gpu.block(), gpu.block(), gpu.stream()
    at, half = pages.address, pages.size // 2
    gpu.put(block.address, 0x21, PAGE)
    gpu.put(block.address + GRANULE // 2, 0x43, PAGE)
    both = [(at, block.address, PAGE), (at + half, block.address + GRANULE // 2, PAGE)]
    seen: Observations = {"to pages": [gpu.batch(both, stream), gpu.cuStreamSynchronize(stream)]}
    seen["pages"] = [ctypes.string_at(at + offset, 1).hex() for offset in (0, PAGE - 1, half, half + PAGE - 1)]
    ctypes.memset(at, 0, pages.size)
    seen["register"] = gpu.cuMemHostRegister(at, pages.size, 0)
    seen["to registered"] = [gpu.batch(both, stream), gpu.cuStreamSynchronize(stream)]
    seen["registered"] = [ctypes.string_at(at + offset, 1).hex() for offset in (0, PAGE - 1, half, half + PAGE - 1)]
    back = [(other.address + PAGE, at, PAGE), (other.address, at + half, PAGE)]
    seen["back"] = [gpu.batch(back, stream), gpu.cuStreamSynchronize(stream)]
    seen["on the device"] = [gpu.read(other.address), gpu.read(other.address + PAGE)]
    mixed = [(other.address, block.address, PAGE), both[0]]
    seen["both ways"] = [gpu.batch(mixed, stream), gpu.cuStreamSynchronize(stream), gpu.read(other.address)]
    seen["two attributes"] = [gpu.batch(both, stream, orders=(1, 3), first=(0, 1)), gpu.cuStreamSynchronize(stream)]
    seen["one copy"] = [gpu.batch(both[:1], stream), gpu.cuStreamSynchronize(stream)]
    seen["no copies"] = gpu.batch([], stream)
    seen["no attributes"] = gpu.batch(both, stream, orders=())
    seen["more attributes than copies"] = gpu.batch(both[:1], stream, orders=(1, 1), first=(0, 1))
    seen["attributes from the second on"] = gpu.batch(both, stream, first=(1,))
    seen["no order"] = gpu.batch(both, stream, orders=(0,))
    seen["an unknown order"] = gpu.batch(both, stream, orders=(4,))
    seen["no bytes"] = gpu.batch([both[0], (at, block.address, 0)], stream)
    seen["no target"] = gpu.batch([both[0], (0, block.address, PAGE)], stream)
    seen["no source"] = gpu.batch([both[0], (at, 0, PAGE)], stream)
    seen["legacy stream"] = gpu.batch(both, 0)
    seen["synchronize"] = gpu.cuCtxSynchronize()
    gpu.must("cuMemHostUnregister", at)
    gpu.drop(block)
    gpu.drop(other)
    return seen


@behaviour
def batches_over_the_end_of_registered_memory(gpu: Gpu) -> Observations:
    pages, block, stream = Pages(MIB), gpu.block(), gpu.stream()
    at, half = pages.address, pages.size // 2
    gpu.put(block.address, 0x21, MIB)
    seen: Observations = {"register half": gpu.cuMemHostRegister(at, half, 0)}
    seen["to both halves"] = gpu.batch([(at, block.address, PAGE), (at + half - PAGE, block.address, 2 * PAGE)], stream)
    seen["from both halves"] = gpu.batch(
        [(block.address, at, PAGE), (block.address + PAGE, at + half - PAGE, 2 * PAGE)], stream
    )
    seen["synchronize"] = gpu.cuStreamSynchronize(stream)
    gpu.must("cuMemHostUnregister", at)
    gpu.drop(block)
    return seen


@behaviour(own_process=True)
def batches_with_unmapped_memory(gpu: Gpu) -> Observations:
    gpu.start()
    block, pinned, stream = gpu.block(), gpu.pinned(), gpu.stream()
    return {"from it": gpu.batch([(pinned, block.address, PAGE), (pinned + PAGE, gpu.reserve(), PAGE)], stream)}


@behaviour(own_process=True)
def copies_of_read_only_pages(gpu: Gpu) -> Observations:
    gpu.start()
    pages, block = Pages(MIB), gpu.block()
    pages.protect(mmap.PROT_READ)
    return {
        "from it": gpu.cuMemcpyHtoD(block.address, pages.address, PAGE),
        "to it": gpu.cuMemcpyDtoH(pages.address, block.address, PAGE),
        "synchronize": gpu.cuCtxSynchronize(),
    }


@behaviour
def memory_for_host_memory(gpu: Gpu) -> Observations:
    """Whether pinning takes memory of the device."""
    pages, seen = Pages(64 * MIB), {}
    gpu.must("cuMemHostRegister", pages.address, PAGE, 0)
    gpu.must("cuMemHostUnregister", pages.address)
    before = gpu.free_bytes()
    gpu.must("cuMemHostRegister", pages.address, pages.size, 0)
    seen["register 64 MiB"] = before - gpu.free_bytes()
    gpu.must("cuMemHostUnregister", pages.address)
    seen["unregister"] = before - gpu.free_bytes()
    host = gpu.pinned(64 * MIB)
    seen["allocate 64 MiB"] = before - gpu.free_bytes()
    gpu.must("cuMemFreeHost", host)
    seen["free"] = before - gpu.free_bytes()
    return seen


@behaviour
def allocation_arguments(gpu: Gpu) -> Observations:
    """What is left in the result, with no bytes or no memory."""
    seen: Observations = {}
    for label, size in (("0 bytes", 0), ("2**60 bytes", 1 << 60)):
        for name, arguments in (("cuMemHostAlloc", (0,)), ("cudaHostAlloc", (0,)), ("cudaMallocHost", ())):
            value = ctypes.c_uint64(7)
            seen[f"{name}, {label}"] = [gpu.call(name, value, size, *arguments), value.value]
            gpu.cudaGetLastError()
    value = ctypes.c_uint64(7)
    seen["cudaHostAlloc, bad flags"] = [gpu.cudaHostAlloc(value, PAGE, 0x100), value.value, gpu.cudaGetLastError()]
    seen["cuMemHostAlloc, 0 bytes, bad flags"] = gpu.cuMemHostAlloc(value, 0, 0x100)
    return seen


@behaviour(own_process=True)
def without_context(gpu: Gpu) -> Observations:
    """A thread with no current context releases what another allocated."""
    gpu.start()
    pages, pointer, host, block = Pages(MIB), gpu.malloc(), gpu.pinned(), gpu.block()
    gpu.must("cuMemHostRegister", pages.address, PAGE, 0)
    seen: Observations = {}

    def give_back() -> None:
        number = ctypes.c_int(-7)
        seen["current"] = gpu.context()
        seen["type of pinned memory"] = [gpu.cuPointerGetAttribute(number, 2, host), number.value]
        seen["type of VMM memory"] = [gpu.cuPointerGetAttribute(number, 2, block.address), number.value]
        seen["cuMemFree NULL"] = gpu.cuMemFree(0)
        seen["cuMemFreeHost NULL"] = gpu.cuMemFreeHost(0)
        seen["cuMemHostUnregister"] = gpu.cuMemHostUnregister(pages.address)
        seen["cuMemFreeHost"] = gpu.cuMemFreeHost(host)
        seen["cuMemFree"] = gpu.cuMemFree(pointer)
        seen["current afterwards"] = gpu.context()

    thread = threading.Thread(target=give_back)
    thread.start()
    thread.join()
    seen["free twice"] = gpu.cuMemFree(pointer)
    return seen


@behaviour(own_process=True)
def after_the_context(gpu: Gpu) -> Observations:
    """Registered and pinned memory after the end of its context, while its handle is still current, and in the next one."""
    gpu.start()
    pages, host, number = Pages(MIB), gpu.pinned(), ctypes.c_int(-7)
    gpu.must("cuMemHostRegister", pages.address, PAGE, 0)
    gpu.must("cudaDeviceReset")
    seen: Observations = {
        "cuMemFree NULL": gpu.cuMemFree(0),
        "cuMemFree unknown": gpu.cuMemFree(GRANULE),
        "cuMemFreeHost": gpu.cuMemFreeHost(host),
        "cuMemHostUnregister": gpu.cuMemHostUnregister(pages.address),
        "cuPointerGetAttribute": gpu.cuPointerGetAttribute(number, 2, host),
    }
    gpu.start()
    seen["unregister in the next"] = gpu.cuMemHostUnregister(pages.address)
    seen["register in the next"] = both(gpu, pages.address, PAGE)
    return seen


@behaviour(own_process=True)
def touched_after_the_context(gpu: Gpu) -> Observations:
    """Whether pinned memory can be read after the end of its context."""
    gpu.start()
    host = gpu.pinned()
    gpu.must("cudaDeviceReset")
    return {"byte": ctypes.string_at(host, 1).hex() is not None}


@behaviour(own_process=True, devices=2)
def of_another_device(gpu: Gpu) -> Observations:
    """Memory pinned with one device, not portable, used with another, and after the first one's reset."""
    gpu.start()
    host, pages, got = gpu.pinned(), Pages(MIB), PointerAttributes(type=9, device=9)
    gpu.must("cuMemHostRegister", pages.address, PAGE, 0)
    gpu.start(1)
    block, stream = ctypes.c_uint64(gpu.malloc()), gpu.stream()
    seen: Observations = {
        "attributes": [gpu.cudaPointerGetAttributes(got, host), got.type, got.device],
        "register again": gpu.cuMemHostRegister(pages.address, PAGE, 0),
        "copy": gpu.cuMemcpyDtoHAsync(host, block.value, PAGE, stream),
        "synchronize": gpu.cuStreamSynchronize(stream),
        "unregister": gpu.cuMemHostUnregister(pages.address),
        "reset of the other": gpu.cuDevicePrimaryCtxReset(0),
        "free": gpu.cuMemFreeHost(host),
    }
    return seen


@behaviour
def directions_of_unregistered(gpu: Gpu) -> Observations:
    """The runtime's asynchronous copies of pages that it does not know."""
    pages, block, stream = Pages(MIB), gpu.block(), gpu.stream()
    return {
        "default": gpu.cudaMemcpyAsync(pages.address, block.address, PAGE, DEFAULT, stream),
        "to the host": gpu.cudaMemcpyAsync(pages.address, block.address, PAGE, DEVICE_TO_HOST, stream),
        "to NULL": [gpu.cudaMemcpyAsync(0, block.address, PAGE, DEVICE_TO_HOST, stream), gpu.cudaGetLastError()],
        "synchronize": gpu.cudaStreamSynchronize(stream),
    }
