"""Virtual memory management: calls in an order that is wrong, or surprising."""

from __future__ import annotations

import ctypes

from gpu import GRANULE, NO_ACCESS, READ_ONLY, READ_WRITE, Gpu
from table import Observations, behaviour


@behaviour
def access_before_map(gpu: Gpu) -> Observations:
    address = gpu.reserve()
    return {"set access": gpu.allow(address), "free": gpu.cuMemAddressFree(address, GRANULE)}


@behaviour
def access_partly_mapped(gpu: Gpu) -> Observations:
    address = gpu.reserve(3 * GRANULE)
    block = gpu.block(address=address, access=False)
    seen: Observations = {
        "mapped and not": gpu.allow(address, 2 * GRANULE),
        "unmapped part": gpu.allow(address + GRANULE, GRANULE),
    }
    flags = ctypes.c_uint64(9)
    seen["flags of the mapped part"] = [gpu.cuMemGetAccess(flags, gpu.access().location, address), flags.value]
    gpu.drop(block, keep_address=True)
    return seen


@behaviour
def access_over_two_mappings(gpu: Gpu) -> Observations:
    address = gpu.reserve(2 * GRANULE)
    gpu.block(address=address, access=False)
    gpu.block(address=address + GRANULE, access=False)
    return {
        "both at once": gpu.allow(address, 2 * GRANULE),
        "write over both": gpu.fill(address, 3, 2 * GRANULE),
        "read": gpu.read(address + GRANULE - 16, 32),
        "unmap both at once": gpu.cuMemUnmap(address, 2 * GRANULE),
    }


@behaviour
def map_twice(gpu: Gpu) -> Observations:
    block = gpu.block()
    other = gpu.create()
    seen = {
        "the same handle again": gpu.cuMemMap(block.address, GRANULE, 0, block.handle, 0),
        "another handle over it": gpu.cuMemMap(block.address, GRANULE, 0, other, 0),
        "still works": [gpu.fill(block.address, 5), gpu.read(block.address)],
    }
    gpu.must("cuMemRelease", other)
    gpu.drop(block)
    return seen


@behaviour
def map_overlapping(gpu: Gpu) -> Observations:
    address, first, second = gpu.reserve(4 * GRANULE), gpu.create(2 * GRANULE), gpu.create(2 * GRANULE)
    seen = {
        "first": gpu.cuMemMap(address, 2 * GRANULE, 0, first, 0),
        "second, half over it": gpu.cuMemMap(address + GRANULE, 2 * GRANULE, 0, second, 0),
        "second, behind it": gpu.cuMemMap(address + 2 * GRANULE, 2 * GRANULE, 0, second, 0),
        "unmap from the middle of one to the middle of the other": gpu.cuMemUnmap(address + GRANULE, 2 * GRANULE),
        "unmap one and a half": gpu.cuMemUnmap(address, 3 * GRANULE),
        "unmap both": gpu.cuMemUnmap(address, 4 * GRANULE),
    }
    gpu.must("cuMemRelease", first)
    gpu.must("cuMemRelease", second)
    return seen


@behaviour
def map_over_two_reservations(gpu: Gpu) -> Observations:
    whole = gpu.reserve(4 * GRANULE)
    gpu.must("cuMemAddressFree", whole, 4 * GRANULE)
    low, high = ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cuMemAddressReserve", low, GRANULE, 0, whole, 0)
    gpu.must("cuMemAddressReserve", high, GRANULE, 0, whole + GRANULE, 0)
    adjacent = low.value == whole and high.value == whole + GRANULE
    handle = gpu.create(2 * GRANULE)
    return {"adjacent": adjacent, "map": gpu.cuMemMap(low.value, 2 * GRANULE, 0, handle, 0)}


@behaviour
def unmap_with_a_hole(gpu: Gpu) -> Observations:
    address = gpu.reserve(3 * GRANULE)
    gpu.block(address=address)
    gpu.block(address=address + 2 * GRANULE)
    return {
        "never mapped": gpu.cuMemUnmap(address + GRANULE, GRANULE),
        "all, hole in the middle": gpu.cuMemUnmap(address, 3 * GRANULE),
        "first": gpu.cuMemUnmap(address, GRANULE),
        "last": gpu.cuMemUnmap(address + 2 * GRANULE, GRANULE),
    }


@behaviour
def unmap_with_unmapped_tail(gpu: Gpu) -> Observations:
    address = gpu.reserve(2 * GRANULE)
    gpu.block(address=address)
    return {"mapping and tail": gpu.cuMemUnmap(address, 2 * GRANULE), "mapping": gpu.cuMemUnmap(address, GRANULE)}


@behaviour
def free_while_mapped(gpu: Gpu) -> Observations:
    block = gpu.block()
    return {
        "address free": gpu.cuMemAddressFree(block.address, GRANULE),
        "still there": [gpu.fill(block.address, 6), gpu.read(block.address)],
        "unmap": gpu.cuMemUnmap(block.address, GRANULE),
        "address free again": gpu.cuMemAddressFree(block.address, GRANULE),
        "release": gpu.cuMemRelease(block.handle),
    }


@behaviour
def free_part_mapped(gpu: Gpu) -> Observations:
    address = gpu.reserve(2 * GRANULE)
    block = gpu.block(address=address)
    seen = {
        "whole": gpu.cuMemAddressFree(address, 2 * GRANULE),
        "unmapped half": gpu.cuMemAddressFree(address + GRANULE, GRANULE),
    }
    gpu.drop(block, keep_address=True)
    return seen


@behaviour
def release_before_unmap(gpu: Gpu) -> Observations:
    block = gpu.block()
    seen: Observations = {
        "fill": gpu.fill(block.address, 0x11),
        "release": gpu.cuMemRelease(block.handle),
        "contents": gpu.read(block.address),
    }
    again = ctypes.c_uint64()
    seen["retain from the address"] = gpu.cuMemRetainAllocationHandle(again, block.address)
    seen["unmap"] = gpu.cuMemUnmap(block.address, GRANULE)
    seen["map the retained"] = gpu.cuMemMap(block.address, GRANULE, 0, again.value, 0)
    seen["access"] = gpu.allow(block.address)
    seen["contents kept"] = gpu.read(block.address)
    seen["release the retained"] = gpu.cuMemRelease(again.value)
    seen["unmap the last"] = gpu.cuMemUnmap(block.address, GRANULE)
    return seen


@behaviour(own_process=True)
def map_after_release(gpu: Gpu) -> Observations:
    gpu.start()
    address, handle = gpu.reserve(), gpu.create()
    return {"release": gpu.cuMemRelease(handle), "map": gpu.cuMemMap(address, GRANULE, 0, handle, 0)}


@behaviour(own_process=True)
def map_after_release_while_mapped(gpu: Gpu) -> Observations:
    gpu.start()
    block = gpu.block()
    second = gpu.reserve()
    return {
        "release": gpu.cuMemRelease(block.handle),
        "map elsewhere": gpu.cuMemMap(second, GRANULE, 0, block.handle, 0),
        "release again": gpu.cuMemRelease(block.handle),
        "contents": [gpu.fill(block.address, 8), gpu.read(block.address)],
    }


@behaviour(own_process=True)
def export_after_release(gpu: Gpu) -> Observations:
    gpu.start()
    handle, descriptor = gpu.create(handle_types=1), ctypes.c_int()
    gpu.must("cuMemRelease", handle)
    return {"export": gpu.cuMemExportToShareableHandle(descriptor, handle, 1, 0)}


@behaviour
def one_handle_twice(gpu: Gpu) -> Observations:
    block, second = gpu.block(), gpu.reserve()
    seen = {
        "map elsewhere too": gpu.cuMemMap(second, GRANULE, 0, block.handle, 0),
        "access": gpu.allow(second),
        "write through one": gpu.fill(block.address, 0x21),
        "read through the other": gpu.read(second),
        "unmap one": gpu.cuMemUnmap(block.address, GRANULE),
        "other": gpu.read(second),
        "unmap other": gpu.cuMemUnmap(second, GRANULE),
    }
    gpu.must("cuMemRelease", block.handle)
    return seen


@behaviour
def contents_stay_with_the_handle(gpu: Gpu) -> Observations:
    block = gpu.block()
    return {
        "fill": gpu.fill(block.address, 0x31),
        "unmap": gpu.cuMemUnmap(block.address, GRANULE),
        "map": gpu.cuMemMap(block.address, GRANULE, 0, block.handle, 0),
        "access": gpu.allow(block.address),
        "contents": gpu.read(block.address),
    }


@behaviour
def access_ends_with_the_mapping(gpu: Gpu) -> Observations:
    block, flags = gpu.block(), ctypes.c_uint64(9)
    here = gpu.access().location

    def access() -> list[str | int]:
        flags.value = 9
        return [gpu.cuMemGetAccess(flags, here, block.address), flags.value]

    seen: Observations = {"with access": access(), "unmap": gpu.cuMemUnmap(block.address, GRANULE), "unmapped": access()}
    seen["map"] = gpu.cuMemMap(block.address, GRANULE, 0, block.handle, 0)
    seen["mapped again"] = access()
    seen["read only"] = [gpu.allow(block.address, flags=READ_ONLY), *access()]
    seen["read and write"] = [gpu.allow(block.address, flags=READ_WRITE), *access()]
    seen["none"] = [gpu.allow(block.address, flags=NO_ACCESS), *access()]
    gpu.drop(block)
    return seen


@behaviour
def work_without_context(gpu: Gpu) -> Observations:
    """The whole cycle needs no current context."""
    current = gpu.context()
    gpu.must("cuCtxSetCurrent", None)
    address, handle = ctypes.c_uint64(), ctypes.c_uint64()
    seen = {
        "reserve": gpu.cuMemAddressReserve(address, GRANULE, 0, 0, 0),
        "create": gpu.cuMemCreate(handle, GRANULE, gpu.properties(), 0),
        "map": gpu.cuMemMap(address.value, GRANULE, 0, handle.value, 0),
        "access": gpu.allow(address.value),
        "unmap": gpu.cuMemUnmap(address.value, GRANULE),
        "release": gpu.cuMemRelease(handle.value),
        "free": gpu.cuMemAddressFree(address.value, GRANULE),
    }
    gpu.must("cuCtxSetCurrent", current)
    return seen
