"""Virtual memory management: handles released too often or too early, ranges over several mappings, and the effect of each
step on free memory."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable

from gpu import GRANULE, NO_ACCESS, READ_WRITE, Gpu
from table import Observations, behaviour


class Ledger:
    """Calls with their results, and by how many bytes free memory went down with each."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._free = gpu.free_bytes()
        self.seen: Observations = {}

    def __call__(self, label: str, call: Callable[[], object]) -> None:
        result = call()
        free = self._gpu.free_bytes()
        self.seen[label] = [result, self._free - free]
        self._free = free


@behaviour
def cost_of_wrong_calls(gpu: Gpu) -> Observations:
    """A failed call keeps no memory."""
    gpu.drop(gpu.block())
    size = 8 * GRANULE
    block, note = gpu.block(size), Ledger(gpu)
    handle, address = ctypes.c_uint64(), gpu.reserve(size)
    note("create, half a granule", lambda: gpu.cuMemCreate(handle, GRANULE // 2, gpu.properties(), 0))
    note("create, no such device", lambda: gpu.cuMemCreate(handle, size, gpu.properties(99), 0))
    note("map, half of the handle", lambda: gpu.cuMemMap(address, size // 2, 0, block.handle, 0))
    note("map over a mapping", lambda: gpu.cuMemMap(block.address, size, 0, block.handle, 0))
    note("unmap half", lambda: gpu.cuMemUnmap(block.address, size // 2))
    note("free the addresses", lambda: gpu.cuMemAddressFree(block.address, size))
    note("access with wrong flags", lambda: gpu.allow(block.address, size, flags=2))
    note("release handle 0", lambda: gpu.cuMemRelease(0))
    note("unmap", lambda: gpu.cuMemUnmap(block.address, size))
    note("release", lambda: gpu.cuMemRelease(block.handle))
    note("free the addresses at last", lambda: gpu.cuMemAddressFree(block.address, size))
    return note.seen


@behaviour
def access_and_memory(gpu: Gpu) -> Observations:
    """The cost of access, and what removing it releases."""
    gpu.drop(gpu.block())
    size = 8 * GRANULE
    block = gpu.block(size, access=False)
    note = Ledger(gpu)
    for label, flags in (("access", READ_WRITE), ("again", READ_WRITE), ("none", NO_ACCESS), ("anew", READ_WRITE)):
        note(label, lambda flags=flags: gpu.allow(block.address, size, flags=flags))
    gpu.drop(block)
    return note.seen


@behaviour(own_process=True)
def release_twice_while_mapped(gpu: Gpu) -> Observations:
    gpu.start()
    block = gpu.block()
    gpu.put(block.address, 0x12)
    return {
        "release": gpu.cuMemRelease(block.handle),
        "release again": gpu.cuMemRelease(block.handle),
        "a third time": gpu.cuMemRelease(block.handle),
        "contents": gpu.read(block.address),
        "unmap": gpu.cuMemUnmap(block.address, GRANULE),
        "unmap again": gpu.cuMemUnmap(block.address, GRANULE),
    }


@behaviour(own_process=True)
def release_after_unmap_of_released(gpu: Gpu) -> Observations:
    """The handle is destroyed with the last mapping of a released handle."""
    gpu.start()
    block = gpu.block()
    gpu.must("cuMemRelease", block.handle)
    gpu.must("cuMemUnmap", block.address, GRANULE)
    return {"release again": gpu.cuMemRelease(block.handle)}


@behaviour(own_process=True)
def access_after_release(gpu: Gpu) -> Observations:
    gpu.start()
    block = gpu.block(access=False)
    flags = ctypes.c_uint64(9)
    return {
        "release": gpu.cuMemRelease(block.handle),
        "access": gpu.allow(block.address),
        "told": [gpu.cuMemGetAccess(flags, gpu.access().location, block.address), flags.value],
        "fill": gpu.fill(block.address, 1),
    }


@behaviour
def retained_and_released(gpu: Gpu) -> Observations:
    """A handle counts: retained twice, it is released three times."""
    block, handle = gpu.block(), ctypes.c_uint64()
    gpu.must("cuMemRetainAllocationHandle", handle, block.address)
    gpu.must("cuMemRetainAllocationHandle", handle, block.address)
    note = Ledger(gpu)
    note("unmap", lambda: gpu.cuMemUnmap(block.address, GRANULE))
    for label in ("release", "again", "a third time"):
        note(label, lambda: gpu.cuMemRelease(block.handle))
    return note.seen


@behaviour
def the_same_handle_twice_in_a_row(gpu: Gpu) -> Observations:
    """Two mappings of one handle, side by side, treated as one range."""
    address, handle = gpu.reserve(2 * GRANULE), gpu.create()
    seen: Observations = {
        "first": gpu.cuMemMap(address, GRANULE, 0, handle, 0),
        "second": gpu.cuMemMap(address + GRANULE, GRANULE, 0, handle, 0),
        "access": gpu.allow(address, 2 * GRANULE),
        "fill the first": gpu.fill(address, 0x33, GRANULE),
        "read the second": gpu.read(address + GRANULE),
        "free the addresses": gpu.cuMemAddressFree(address, 2 * GRANULE),
        "release": gpu.cuMemRelease(handle),
        "read after that": gpu.read(address + GRANULE),
        "unmap both": gpu.cuMemUnmap(address, 2 * GRANULE),
        "free the addresses again": gpu.cuMemAddressFree(address, 2 * GRANULE),
    }
    return seen


@behaviour
def ranges_over_two_mappings(gpu: Gpu) -> Observations:
    """Access and unmapping of parts that begin or end inside a mapping."""
    size = 2 * GRANULE
    address = gpu.reserve(3 * size)
    blocks = [gpu.block(size, address=address + i * size, access=False) for i in range(2)]
    middle = address + GRANULE
    seen: Observations = {
        "access from the middle to the middle": gpu.allow(middle, size),
        "access to one and a half": gpu.allow(address, size + GRANULE),
        "access to both and what is not mapped": gpu.allow(address, 3 * size),
        "nothing has changed": gpu.fill(address, 1),
        "access to both": gpu.allow(address, 2 * size),
        "unmap from the middle to the end": gpu.cuMemUnmap(middle, size + GRANULE),
        "unmap from the start to the middle": gpu.cuMemUnmap(address, size + GRANULE),
        "still there": [gpu.fill(address, 0x34, 2 * size), gpu.read(address + size - 64, 128)],
        "unmap the second": gpu.cuMemUnmap(address + size, size),
        "the first is still there": gpu.read(address),
        "unmap all": gpu.cuMemUnmap(address, 3 * size),
    }
    for block in blocks:
        gpu.must("cuMemRelease", block.handle)
    return seen


@behaviour
def access_for_several(gpu: Gpu) -> Observations:
    """Two descriptors in one call: of one device twice, and one right and one wrong."""
    block, flags = gpu.block(access=False), ctypes.c_uint64(9)
    array = type(gpu.access()) * 2

    def access_of_both() -> list[str | int]:
        return [gpu.cuMemGetAccess(flags, gpu.access().location, block.address), flags.value]

    twice, wrong = array(gpu.access(), gpu.access(flags=NO_ACCESS)), array(gpu.access(), gpu.access(99))
    seen: Observations = {
        "one right, one wrong": [gpu.cuMemSetAccess(block.address, GRANULE, wrong, 2), *access_of_both()],
        "the same device twice": [gpu.cuMemSetAccess(block.address, GRANULE, twice, 2), *access_of_both()],
    }
    gpu.drop(block)
    return seen


@behaviour
def address_free_in_parts(gpu: Gpu) -> Observations:
    """Addresses that were split by a mapping, and two reservations that lie side by side."""
    whole = gpu.reserve(4 * GRANULE)
    block = gpu.block(address=whole + GRANULE)
    seen: Observations = {
        "whole, one granule mapped": gpu.cuMemAddressFree(whole, 4 * GRANULE),
        "before the mapping": gpu.cuMemAddressFree(whole, GRANULE),
        "behind the mapping": gpu.cuMemAddressFree(whole + 2 * GRANULE, 2 * GRANULE),
        "released while mapped": gpu.cuMemRelease(block.handle),
        "whole after the release": gpu.cuMemAddressFree(whole, 4 * GRANULE),
        "unmap": gpu.cuMemUnmap(whole + GRANULE, GRANULE),
        "whole": gpu.cuMemAddressFree(whole, 4 * GRANULE),
        "map there": gpu.cuMemMap(whole, GRANULE, 0, gpu.create(), 0),
    }
    return seen


@behaviour
def shared_by_descriptor(gpu: Gpu) -> Observations:
    """An exported handle, opened again in the same process, by way of its file descriptor."""
    block = gpu.block()
    handle, again, descriptor = gpu.create(handle_types=1), ctypes.c_uint64(), ctypes.c_int(-1)
    address, second = gpu.reserve(), gpu.reserve()
    gpu.must("cuMemMap", address, GRANULE, 0, handle, 0)
    gpu.allow(address)
    gpu.put(address, 0x77)
    seen: Observations = {"export": gpu.cuMemExportToShareableHandle(descriptor, handle, 1, 0)}
    seen["contents"] = gpu.read(address)
    seen["closed at exec"] = bool(fcntl.fcntl(descriptor.value, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
    seen["import"] = gpu.cuMemImportFromShareableHandle(again, descriptor.value, 1)
    seen["the same handle"] = again.value == handle
    os.close(descriptor.value)
    seen["map"] = gpu.cuMemMap(second, GRANULE, 0, again.value, 0)
    seen["access"] = gpu.allow(second)
    seen["read"] = gpu.read(second)
    seen["write, and read at the first"] = [gpu.fill(second, 0x78), gpu.read(address)]
    seen["other memory"] = [gpu.fill(block.address, 0x79), gpu.read(block.address)]
    note = Ledger(gpu)
    note("unmap the first", lambda: gpu.cuMemUnmap(address, GRANULE))
    note("release the first", lambda: gpu.cuMemRelease(handle))
    note("unmap the second", lambda: gpu.cuMemUnmap(second, GRANULE))
    note("release the second", lambda: gpu.cuMemRelease(again.value))
    seen["memory"] = note.seen
    return seen


@behaviour(own_process=True)
def import_arguments(gpu: Gpu) -> Observations:
    gpu.start()
    handle, descriptor = ctypes.c_uint64(), os.memfd_create("no memory of a device")
    return {
        "no result": gpu.cuMemImportFromShareableHandle(None, descriptor, 1),
        "another file": gpu.cuMemImportFromShareableHandle(handle, descriptor, 1),
        "type 0": gpu.cuMemImportFromShareableHandle(handle, descriptor, 0),
    }


@behaviour(own_process=True)
def handle_types_of_create(gpu: Gpu) -> Observations:
    """1 is a file descriptor, 8 a fabric handle, which needs a service of the machine."""
    gpu.start()
    handle, types = (
        ctypes.c_uint64(),
        {"a descriptor": 1, "fabric": 8, "a descriptor and fabric": 9, "Windows": 2, "4096": 4096},
    )
    return {name: gpu.cuMemCreate(handle, GRANULE, gpu.properties(handle_types=number), 0) for name, number in types.items()}


@behaviour
def a_descriptor_keeps_the_memory(gpu: Gpu) -> Observations:
    """The physical memory of an exported handle stays until the last descriptor is closed."""
    address, handle, descriptor = gpu.reserve(), gpu.create(handle_types=1), ctypes.c_int(-1)
    gpu.must("cuMemMap", address, GRANULE, 0, handle, 0)
    note = Ledger(gpu)
    note("export", lambda: gpu.cuMemExportToShareableHandle(descriptor, handle, 1, 0))
    duplicate = os.dup(descriptor.value)
    note("unmap", lambda: gpu.cuMemUnmap(address, GRANULE))
    note("release", lambda: gpu.cuMemRelease(handle))
    note("close", lambda: os.close(descriptor.value))
    note("close the duplicate", lambda: os.close(duplicate))
    return note.seen
