"""Two GPUs: peer access, and memory of one to which the other is given access."""

from __future__ import annotations

import ctypes

from gpu import DEFAULT, GRANULE, Gpu, PointerAttributes
from table import Observations, behaviour


@behaviour(own_process=True)
def enable_for_nothing(gpu: Gpu) -> Observations:
    """Arguments that are wrong on any number of devices."""
    gpu.start()
    number = ctypes.c_int(7)
    return {
        "itself": gpu.cudaDeviceEnablePeerAccess(0, 0),
        "no such device": gpu.cudaDeviceEnablePeerAccess(99, 0),
        "flags 1": gpu.cudaDeviceEnablePeerAccess(99, 1),
        "last error": gpu.cudaGetLastError(),
        "can access itself": [gpu.cudaDeviceCanAccessPeer(number, 0, 0), number.value],
        "can access 99": gpu.cudaDeviceCanAccessPeer(number, 0, 99),
        "driver, no context": gpu.cuCtxEnablePeerAccess(0, 0),
        "driver, own context": gpu.cuCtxEnablePeerAccess(gpu.context(), 0),
    }


@behaviour(own_process=True, devices=2)
def enable(gpu: Gpu) -> Observations:
    gpu.start()
    number = ctypes.c_int()
    seen: Observations = {"peer active before": gpu.primary_active(1)}
    seen["can"] = [gpu.cudaDeviceCanAccessPeer(number, 0, 1), number.value, gpu.primary_active(1)]
    seen["flags 1"] = gpu.cudaDeviceEnablePeerAccess(1, 1)
    seen["enable"] = [gpu.cudaDeviceEnablePeerAccess(1, 0), gpu.primary_active(1)]
    seen["again"] = [gpu.cudaDeviceEnablePeerAccess(1, 0), gpu.cudaGetLastError()]
    seen["current device"] = [gpu.cudaGetDevice(number), number.value]
    seen["disable"] = [gpu.cudaDeviceDisablePeerAccess(1), gpu.primary_active(1)]
    seen["disable again"] = gpu.cudaDeviceDisablePeerAccess(1)
    return seen


@behaviour(own_process=True, devices=2)
def let_a_peer(gpu: Gpu) -> Observations:
    gpu.start()
    block, flags = gpu.block(), ctypes.c_uint64(9)
    there = gpu.access(1).location
    seen: Observations = {"before": [gpu.cuMemGetAccess(flags, there, block.address), flags.value]}
    seen["let"] = gpu.allow(block.address, device=1)
    seen["after"] = [gpu.cuMemGetAccess(flags, there, block.address), flags.value, gpu.primary_active(1)]
    gpu.put(block.address, 0x71, 4096)
    gpu.start(1)
    other = gpu.malloc()
    seen["copy to the peer"] = gpu.cudaMemcpy(other, block.address, 4096, DEFAULT)
    seen["contents"] = gpu.read(other)
    seen["fill by the peer"] = [gpu.fill(block.address, 0x72), gpu.read(block.address)]
    return seen


@behaviour(own_process=True, devices=2)
def copy_without_access(gpu: Gpu) -> Observations:
    """Copies between memory of two devices of which one is VMM memory that the other may not access."""
    gpu.start()
    block = gpu.block()
    gpu.put(block.address, 0x73, 4096)
    gpu.start(1)
    other = gpu.malloc()
    return {
        "out of it, default": gpu.cudaMemcpy(other, block.address, 4096, DEFAULT),
        "into it, default": gpu.cudaMemcpy(block.address, other, 4096, DEFAULT),
        "out of it, driver": gpu.cuMemcpyDtoD(other, block.address, 4096),
        "into it, driver": gpu.cuMemcpyDtoD(block.address, other, 4096),
        "out of it, peer": gpu.cudaMemcpyPeer(other, 1, block.address, 0, 4096),
        "into it, peer": gpu.cudaMemcpyPeer(block.address, 0, other, 1, 4096),
        "last error": gpu.cudaGetLastError(),
        "to the host": gpu.read(block.address),
        "synchronize": gpu.cudaDeviceSynchronize(),
    }


@behaviour(own_process=True, devices=2)
def create_for_another(gpu: Gpu) -> Observations:
    """Memory of a device that has no context, accessed by the one that has."""
    gpu.start()
    address, handle = gpu.reserve(), gpu.create(device=1)
    return {
        "map": gpu.cuMemMap(address, GRANULE, 0, handle, 0),
        "access for the other alone": gpu.allow(address, device=0),
        "fill": [gpu.fill(address, 0x74), gpu.read(address)],
        "owner's access": gpu.allow(address, device=1),
        "owner active": gpu.primary_active(1),
        "unmap": gpu.cuMemUnmap(address, GRANULE),
        "release": gpu.cuMemRelease(handle),
    }


@behaviour(own_process=True, devices=2)
def copy_from_the_owner(gpu: Gpu) -> Observations:
    """The same copies while the owner of the VMM memory is current."""
    gpu.start(1)
    other = gpu.malloc()
    gpu.start()
    block, bare = gpu.block(), gpu.block(access=False)
    gpu.put(block.address, 0x75, 4096)
    return {
        "out of it, default": gpu.cudaMemcpy(other, block.address, 4096, DEFAULT),
        "into it, default": gpu.cudaMemcpy(block.address, other, 4096, DEFAULT),
        "out of it, driver": gpu.cuMemcpyDtoD(other, block.address, 4096),
        "into it, driver": gpu.cuMemcpyDtoD(block.address, other, 4096),
        "out of it, peer": gpu.cudaMemcpyPeer(other, 1, block.address, 0, 4096),
        "wrong devices, peer": gpu.cudaMemcpyPeer(other, 0, block.address, 1, 4096),
        "no access at all, peer": gpu.cudaMemcpyPeer(other, 1, bare.address, 0, 4096),
        "synchronize": gpu.cudaDeviceSynchronize(),
    }


@behaviour(own_process=True, devices=2)
def pointers_to_another_device(gpu: Gpu) -> Observations:
    """What the runtime reports of memory of device 0 while device 1 is current."""
    gpu.start()
    pointer, block, bare = gpu.malloc(), gpu.block(), gpu.block(access=False)
    gpu.must("cuMemSetAccess", bare.address, GRANULE, gpu.access(1), 1)
    gpu.start(1)

    def attributes(address: int) -> list[object]:
        got = PointerAttributes(type=9, device=9)
        return [gpu.cudaPointerGetAttributes(got, address), got.type, got.device, got.device_pointer == address]

    return {
        "cudaMalloc": attributes(pointer),
        "VMM for its owner": attributes(block.address),
        "VMM for the other": attributes(bare.address),
    }


@behaviour(own_process=True, devices=2)
def peer_arguments(gpu: Gpu) -> Observations:
    gpu.start()
    return {
        "itself, flags 1": gpu.cudaDeviceEnablePeerAccess(0, 1),
        "disable itself": gpu.cudaDeviceDisablePeerAccess(0),
        "disable 99": gpu.cudaDeviceDisablePeerAccess(99),
        "copy to device 99": gpu.cudaMemcpyPeer(gpu.malloc(), 99, gpu.malloc(), 0, 4096),
    }
