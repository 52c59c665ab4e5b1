"""Virtual memory management: arguments that are wrong."""

from __future__ import annotations

import ctypes

from gpu import GRANULE, NO_ACCESS, READ_WRITE, Gpu
from table import Observations, behaviour

BAD_DEVICE = 99


@behaviour
def granularity(gpu: Gpu) -> Observations:
    size = ctypes.c_uint64()
    seen: Observations = {}
    for label, option in (("minimum", 0), ("recommended", 1)):
        result = gpu.cuMemGetAllocationGranularity(size, gpu.properties(), option)
        seen[label] = [result, size.value]
    seen["unknown option"] = gpu.cuMemGetAllocationGranularity(size, gpu.properties(), 7)
    seen["no such device"] = gpu.cuMemGetAllocationGranularity(size, gpu.properties(BAD_DEVICE), 0)
    seen["device -1"] = gpu.cuMemGetAllocationGranularity(size, gpu.properties(-1), 0)
    seen["kind 0"] = gpu.cuMemGetAllocationGranularity(size, gpu.properties(kind=0), 0)
    seen["location 0"] = gpu.cuMemGetAllocationGranularity(size, gpu.properties(location=0), 0)
    seen["no result"] = gpu.cuMemGetAllocationGranularity(None, gpu.properties(), 0)
    seen["no properties"] = gpu.cuMemGetAllocationGranularity(size, None, 0)
    seen["file descriptors"] = [gpu.cuMemGetAllocationGranularity(size, gpu.properties(handle_types=1), 0), size.value]
    return seen


@behaviour
def reserve(gpu: Gpu) -> Observations:
    address = ctypes.c_uint64()
    return {
        "nothing": gpu.cuMemAddressReserve(address, 0, 0, 0, 0),
        "half a granule": gpu.cuMemAddressReserve(address, GRANULE // 2, 0, 0, 0),
        "4 KiB": gpu.cuMemAddressReserve(address, 4096, 0, 0, 0),
        "a byte more than a granule": gpu.cuMemAddressReserve(address, GRANULE + 1, 0, 0, 0),
        "flags 1": gpu.cuMemAddressReserve(address, GRANULE, 0, 0, 1),
        "flags 2": gpu.cuMemAddressReserve(address, GRANULE, 0, 0, 2),
        "alignment 3": gpu.cuMemAddressReserve(address, GRANULE, 3, 0, 0),
        "alignment 4096": gpu.cuMemAddressReserve(address, GRANULE, 4096, 0, 0),
        "alignment 3 granules": gpu.cuMemAddressReserve(address, GRANULE, 3 * GRANULE, 0, 0),
        "alignment 1 GiB": gpu.cuMemAddressReserve(address, GRANULE, 1 << 30, 0, 0),
        "aligned to 1 GiB": address.value % (1 << 30) == 0,
        "no result": gpu.cuMemAddressReserve(None, GRANULE, 0, 0, 0),
        "2**62 bytes": gpu.cuMemAddressReserve(address, 1 << 62, 0, 0, 0),
        "1 TiB": gpu.cuMemAddressReserve(address, 1 << 40, 0, 0, 0),
    }


@behaviour
def reserve_at(gpu: Gpu) -> Observations:
    address = gpu.reserve(4 * GRANULE)
    gpu.must("cuMemAddressFree", address, 4 * GRANULE)
    got = ctypes.c_uint64()
    seen: Observations = {
        "where it was free": gpu.cuMemAddressReserve(got, GRANULE, 0, address, 0),
        "got it": got.value == address,
        "where it is taken": gpu.cuMemAddressReserve(got, GRANULE, 0, address, 0),
        "got another": got.value != address,
        "unaligned wish": gpu.cuMemAddressReserve(got, GRANULE, 0, address + 2 * GRANULE + 4096, 0),
    }
    seen["result is aligned"] = got.value % GRANULE == 0
    return seen


@behaviour
def address_free(gpu: Gpu) -> Observations:
    address = gpu.reserve(4 * GRANULE)
    return {
        "address 0": gpu.cuMemAddressFree(0, GRANULE),
        "size 0": gpu.cuMemAddressFree(address, 0),
        "half of it": gpu.cuMemAddressFree(address, 2 * GRANULE),
        "more than it": gpu.cuMemAddressFree(address, 8 * GRANULE),
        "inside": gpu.cuMemAddressFree(address + GRANULE, 3 * GRANULE),
        "unaligned": gpu.cuMemAddressFree(address + 1, 4 * GRANULE),
        "right": gpu.cuMemAddressFree(address, 4 * GRANULE),
        "twice": gpu.cuMemAddressFree(address, 4 * GRANULE),
        "never reserved": gpu.cuMemAddressFree(1 << 40, GRANULE),
    }


@behaviour
def create(gpu: Gpu) -> Observations:
    handle = ctypes.c_uint64()
    properties = gpu.properties()
    return {
        "size 0": gpu.cuMemCreate(handle, 0, properties, 0),
        "half a granule": gpu.cuMemCreate(handle, GRANULE // 2, properties, 0),
        "a byte more": gpu.cuMemCreate(handle, GRANULE + 1, properties, 0),
        "flags 1": gpu.cuMemCreate(handle, GRANULE, properties, 1),
        "no result": gpu.cuMemCreate(None, GRANULE, properties, 0),
        "no properties": gpu.cuMemCreate(handle, GRANULE, None, 0),
        "no such device": gpu.cuMemCreate(handle, GRANULE, gpu.properties(BAD_DEVICE), 0),
        "device -1": gpu.cuMemCreate(handle, GRANULE, gpu.properties(-1), 0),
        "kind 0": gpu.cuMemCreate(handle, GRANULE, gpu.properties(kind=0), 0),
        "kind 9": gpu.cuMemCreate(handle, GRANULE, gpu.properties(kind=9), 0),
        "location 0": gpu.cuMemCreate(handle, GRANULE, gpu.properties(location=0), 0),
        "location 9": gpu.cuMemCreate(handle, GRANULE, gpu.properties(location=9), 0),
        "handle type 64": gpu.cuMemCreate(handle, GRANULE, gpu.properties(handle_types=64), 0),
        "file descriptors": gpu.cuMemCreate(handle, GRANULE, gpu.properties(handle_types=1), 0),
        "as usual": gpu.cuMemCreate(handle, GRANULE, properties, 0),
    }


@behaviour(own_process=True)
def map_arguments(gpu: Gpu) -> Observations:
    gpu.start()
    address, handle = gpu.reserve(4 * GRANULE), gpu.create(2 * GRANULE)
    size = 2 * GRANULE
    seen = {
        "size 0": gpu.cuMemMap(address, 0, 0, handle, 0),
        "smaller than the handle": gpu.cuMemMap(address, GRANULE, 0, handle, 0),
        "larger than the handle": gpu.cuMemMap(address, 4 * GRANULE, 0, handle, 0),
        "unaligned size": gpu.cuMemMap(address, size - 4096, 0, handle, 0),
        "offset of a granule, the rest": gpu.cuMemMap(address, GRANULE, GRANULE, handle, 0),
        "unaligned offset": gpu.cuMemMap(address, GRANULE, 4096, handle, 0),
        "offset past the end": gpu.cuMemMap(address, size, size, handle, 0),
        "unaligned address": gpu.cuMemMap(address + 4096, size, 0, handle, 0),
        "half outside the reservation": gpu.cuMemMap(address + 3 * GRANULE, size, 0, handle, 0),
        "not reserved": gpu.cuMemMap(1 << 40, size, 0, handle, 0),
        "address 0": gpu.cuMemMap(0, size, 0, handle, 0),
        "flags 1": gpu.cuMemMap(address, size, 0, handle, 1),
        "handle 0": gpu.cuMemMap(address, size, 0, 0, 0),
        "right, inside the reservation": gpu.cuMemMap(address + GRANULE, size, 0, handle, 0),
    }
    gpu.must("cuMemUnmap", address + GRANULE, size)
    gpu.must("cuMemRelease", handle)
    return seen


@behaviour(own_process=True)
def map_unknown_handle(gpu: Gpu) -> Observations:
    gpu.start()
    return {"handle 12345": gpu.cuMemMap(gpu.reserve(), GRANULE, 0, 12345, 0)}


@behaviour(own_process=True)
def unmap_arguments(gpu: Gpu) -> Observations:
    gpu.start()
    block = gpu.block(2 * GRANULE)
    seen = {
        "size 0": gpu.cuMemUnmap(block.address, 0),
        "first half": gpu.cuMemUnmap(block.address, GRANULE),
        "second half": gpu.cuMemUnmap(block.address + GRANULE, GRANULE),
        "unaligned size": gpu.cuMemUnmap(block.address, block.bytes - 4096),
        "unaligned address": gpu.cuMemUnmap(block.address + 4096, block.bytes),
        "address 0": gpu.cuMemUnmap(0, GRANULE),
        "not reserved": gpu.cuMemUnmap(1 << 40, GRANULE),
        "contents afterwards": [gpu.fill(block.address, 7), gpu.read(block.address)],
        "right": gpu.cuMemUnmap(block.address, block.bytes),
        "twice": gpu.cuMemUnmap(block.address, block.bytes),
        "first half of what is unmapped": gpu.cuMemUnmap(block.address, GRANULE),
        "unmapped, unaligned size": gpu.cuMemUnmap(block.address, block.bytes - 4096),
        "unmapped, more than the reservation": gpu.cuMemUnmap(block.address, 8 * GRANULE),
    }
    gpu.must("cuMemRelease", block.handle)
    return seen


@behaviour
def set_access_arguments(gpu: Gpu) -> Observations:
    block = gpu.block(2 * GRANULE, access=False)
    address, size = block.address, block.bytes
    good = gpu.access()
    seen = {
        "no descriptors": gpu.cuMemSetAccess(address, size, good, 0),
        "descriptors at NULL": gpu.cuMemSetAccess(address, size, None, 1),
        "size 0": gpu.cuMemSetAccess(address, 0, good, 1),
        "unaligned size": gpu.cuMemSetAccess(address, size - 4096, good, 1),
        "unaligned address": gpu.cuMemSetAccess(address + 4096, size, good, 1),
        "half of the mapping": gpu.cuMemSetAccess(address, GRANULE, good, 1),
        "second half": gpu.cuMemSetAccess(address + GRANULE, GRANULE, good, 1),
        "more than the reservation": gpu.cuMemSetAccess(address, 4 * GRANULE, good, 1),
        "no such device": gpu.cuMemSetAccess(address, size, gpu.access(BAD_DEVICE), 1),
        "device -1": gpu.cuMemSetAccess(address, size, gpu.access(-1), 1),
        "flags 2": gpu.cuMemSetAccess(address, size, gpu.access(flags=2), 1),
        "flags 4": gpu.cuMemSetAccess(address, size, gpu.access(flags=4), 1),
        "location 0": gpu.cuMemSetAccess(address, size, gpu.access(location=0), 1),
        "host location": gpu.cuMemSetAccess(address, size, gpu.access(location=2), 1),
        "no access": gpu.cuMemSetAccess(address, size, gpu.access(flags=NO_ACCESS), 1),
        "right": gpu.cuMemSetAccess(address, size, gpu.access(flags=READ_WRITE), 1),
        "not reserved": gpu.cuMemSetAccess(1 << 40, size, good, 1),
    }
    gpu.drop(block)
    return seen


@behaviour
def get_access_arguments(gpu: Gpu) -> Observations:
    block = gpu.block(2 * GRANULE)
    flags = ctypes.c_uint64()
    here = gpu.access().location
    seen = {
        "no result": gpu.cuMemGetAccess(None, here, block.address),
        "no location": gpu.cuMemGetAccess(flags, None, block.address),
        "no such device": gpu.cuMemGetAccess(flags, gpu.access(BAD_DEVICE).location, block.address),
        "location 0": gpu.cuMemGetAccess(flags, gpu.access(location=0).location, block.address),
        "inside, unaligned": [gpu.cuMemGetAccess(flags, here, block.address + 4097), flags.value],
        "not reserved": gpu.cuMemGetAccess(flags, here, 1 << 40),
    }
    gpu.drop(block)
    return seen


@behaviour
def release_arguments(gpu: Gpu) -> Observations:
    handle = gpu.create()
    return {
        "handle 0": gpu.cuMemRelease(0),
        "right": gpu.cuMemRelease(handle),
    }


@behaviour(own_process=True)
def release_twice(gpu: Gpu) -> Observations:
    gpu.start()
    handle = gpu.create()
    return {"once": gpu.cuMemRelease(handle), "twice": gpu.cuMemRelease(handle)}


@behaviour(own_process=True)
def release_unknown(gpu: Gpu) -> Observations:
    gpu.start()
    return {"handle 12345": gpu.cuMemRelease(12345)}


@behaviour
def retain_arguments(gpu: Gpu) -> Observations:
    block = gpu.block(2 * GRANULE)
    handle = ctypes.c_uint64()
    seen = {
        "not reserved": gpu.cuMemRetainAllocationHandle(handle, 1 << 40),
        "address 0": gpu.cuMemRetainAllocationHandle(handle, 0),
        "inside, unaligned": gpu.cuMemRetainAllocationHandle(handle, block.address + 4097),
        "the same handle": handle.value == block.handle,
        "released": gpu.cuMemRelease(handle.value),
        "cudaMalloc's memory": gpu.cuMemRetainAllocationHandle(handle, gpu.malloc()),
        "reserved, not mapped": gpu.cuMemRetainAllocationHandle(handle, gpu.reserve()),
    }
    gpu.drop(block)
    return seen


@behaviour
def export_arguments(gpu: Gpu) -> Observations:
    plain, shared = gpu.create(), gpu.create(handle_types=1)
    descriptor = ctypes.c_int(-1)
    return {
        "not asked for at creation": gpu.cuMemExportToShareableHandle(descriptor, plain, 1, 0),
        "as asked for": gpu.cuMemExportToShareableHandle(descriptor, shared, 1, 0),
        "a descriptor": descriptor.value >= 0,
        "type 0": gpu.cuMemExportToShareableHandle(descriptor, shared, 0, 0),
        "flags 1": gpu.cuMemExportToShareableHandle(descriptor, shared, 1, 1),
        "handle 0": gpu.cuMemExportToShareableHandle(descriptor, 0, 1, 0),
    }
