"""The runtime's memory calls: wrong pointers, attributes, IPC, host memory, directions of copies, and the last error."""

from __future__ import annotations

import ctypes

from gpu import (
    DEFAULT,
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    GRANULE,
    HOST_TO_DEVICE,
    HOST_TO_HOST,
    MIB,
    Gpu,
    IpcHandle,
    PointerAttributes,
)
from table import Observations, behaviour


@behaviour
def malloc_arguments(gpu: Gpu) -> Observations:
    pointer = ctypes.c_uint64(7)
    seen: Observations = {"0 bytes": [gpu.cudaMalloc(pointer, 0), pointer.value], "last error": gpu.cudaGetLastError()}
    seen["no result"] = [gpu.cudaMalloc(None, 4096), gpu.cudaGetLastError()]
    seen["driver, 0 bytes"] = gpu.cuMemAlloc(pointer, 0)
    seen["driver, no result"] = gpu.cuMemAlloc(None, 4096)
    first, second = gpu.malloc(1), gpu.malloc(1)
    seen["aligned"] = [first % 512 == 0, second % 512 == 0]
    return seen


@behaviour
def free_arguments(gpu: Gpu) -> Observations:
    pointer, block, host = gpu.malloc(), gpu.block(), (ctypes.c_ubyte * 4096)()
    seen: Observations = {}
    for label, address in (
        ("inside", pointer + 4096),
        ("VMM memory", block.address),
        ("host memory", ctypes.addressof(host)),
        ("pinned memory", gpu.pinned()),
        ("nonsense", 0x1000),
    ):
        seen[label] = [gpu.cudaFree(address), gpu.cudaGetLastError(), gpu.cuMemFree(address)]
    seen["VMM memory afterwards"] = [gpu.fill(block.address, 1), gpu.read(block.address)]
    seen["NULL"] = [gpu.cudaFree(None), gpu.cuMemFree(0)]
    seen["right"] = gpu.cudaFree(pointer)
    seen["twice"] = [gpu.cudaFree(pointer), gpu.cuMemFree(pointer), gpu.cudaGetLastError()]
    return seen


@behaviour
def last_error(gpu: Gpu) -> Observations:
    pointer = ctypes.c_uint64()
    return {
        "at first": gpu.cudaGetLastError(),
        "an error": gpu.cudaMalloc(None, 1),
        "peek": gpu.cudaPeekAtLastError(),
        "peek again": gpu.cudaPeekAtLastError(),
        "a success": gpu.cudaMalloc(pointer, 1),
        "is not forgotten": gpu.cudaPeekAtLastError(),
        "get": gpu.cudaGetLastError(),
        "get again": gpu.cudaGetLastError(),
        "driver's error": gpu.cuMemAlloc(None, 1),
        "not the runtime's": gpu.cudaGetLastError(),
        "not ready": [gpu.cudaSetDevice(99), gpu.cudaMalloc(None, 1), gpu.cudaGetLastError()],
    }


def attributes(gpu: Gpu, address: int) -> list[object]:
    got = PointerAttributes(type=9, device=9)
    result = gpu.cudaPointerGetAttributes(got, address)
    if result != "SUCCESS":
        return [result, gpu.cudaGetLastError()]
    return [got.type, got.device, got.device_pointer == address, got.host_pointer == address]


@behaviour
def pointer_attributes(gpu: Gpu) -> Observations:
    block, bare, pointer, host = gpu.block(), gpu.block(access=False), gpu.malloc(), gpu.pages()
    registered = gpu.pages()
    gpu.must("cuMemHostRegister", ctypes.addressof(registered), 4096, 0)
    seen: Observations = {
        "cudaMalloc": attributes(gpu, pointer),
        "cudaMalloc, inside": attributes(gpu, pointer + 4097),
        "VMM": attributes(gpu, block.address),
        "VMM, inside": attributes(gpu, block.address + 4097),
        "VMM without access": attributes(gpu, bare.address),
        "reserved": attributes(gpu, gpu.reserve()),
        "pinned": attributes(gpu, gpu.pinned()),
        "registered": attributes(gpu, ctypes.addressof(registered)),
        "host memory": attributes(gpu, ctypes.addressof(host)),
        "NULL": attributes(gpu, 0),
        "nonsense": attributes(gpu, 0x1000),
        "no result": gpu.cudaPointerGetAttributes(None, pointer),
    }
    gpu.drop(block, keep_address=True)
    seen["VMM unmapped"] = attributes(gpu, block.address)
    gpu.must("cudaFree", pointer)
    gpu.must("cuMemHostUnregister", ctypes.addressof(registered))
    seen["unregistered"] = attributes(gpu, ctypes.addressof(registered))
    return seen


@behaviour
def driver_pointer_attributes(gpu: Gpu) -> Observations:
    """CU_POINTER_ATTRIBUTE_MEMORY_TYPE (2), RANGE_START_ADDR (11), RANGE_SIZE (12), MAPPED (13), DEVICE_ORDINAL (9)."""
    block, pointer = gpu.block(2 * GRANULE), gpu.malloc(5 * MIB)
    number, value = ctypes.c_int(-7), ctypes.c_uint64()
    seen: Observations = {}
    for label, address in (("VMM", block.address), ("cudaMalloc", pointer)):
        seen[label] = {
            "type": [gpu.cuPointerGetAttribute(number, 2, address + 4096), number.value],
            "device": [gpu.cuPointerGetAttribute(number, 9, address + 4096), number.value],
            "start": [gpu.cuPointerGetAttribute(value, 11, address + 4096), value.value == address],
            "size": [gpu.cuPointerGetAttribute(value, 12, address + 4096), value.value],
        }
    seen["reserved"] = gpu.cuPointerGetAttribute(number, 2, gpu.reserve())
    seen["nonsense"] = gpu.cuPointerGetAttribute(number, 2, 0x1000)
    seen["host memory"] = gpu.cuPointerGetAttribute(number, 2, ctypes.addressof(number))
    seen["no result"] = gpu.cuPointerGetAttribute(None, 2, pointer)
    seen["attribute 999"] = gpu.cuPointerGetAttribute(number, 999, pointer)
    gpu.drop(block)
    return seen


@behaviour
def ipc(gpu: Gpu) -> Observations:
    handle, block = IpcHandle(), gpu.block()
    pointer = gpu.malloc(4 * MIB)
    return {
        "cudaMalloc": gpu.cudaIpcGetMemHandle(handle, pointer),
        "cudaMalloc, inside": gpu.cudaIpcGetMemHandle(handle, pointer + 4096),
        "VMM": [gpu.cudaIpcGetMemHandle(handle, block.address), gpu.cudaGetLastError()],
        "driver, VMM": gpu.cuIpcGetMemHandle(handle, block.address),
        "reserved": [gpu.cudaIpcGetMemHandle(handle, gpu.reserve()), gpu.cudaGetLastError()],
        "pinned": [gpu.cudaIpcGetMemHandle(handle, gpu.pinned()), gpu.cudaGetLastError()],
        "NULL": [gpu.cudaIpcGetMemHandle(handle, None), gpu.cudaGetLastError()],
    }


@behaviour
def ipc_same_process(gpu: Gpu) -> Observations:
    """Only what was opened can be closed."""
    handle, pointer = IpcHandle(), gpu.malloc(4 * MIB)
    return {
        "get": gpu.cudaIpcGetMemHandle(handle, pointer),
        "close what was not opened": [gpu.cudaIpcCloseMemHandle(pointer), gpu.cudaGetLastError()],
        "close NULL": [gpu.cudaIpcCloseMemHandle(None), gpu.cudaGetLastError()],
    }


@behaviour(own_process=True)
def ipc_open_same_process(gpu: Gpu) -> Observations:
    """A handle opened in the process that made it, with the owner's memory and without."""
    gpu.start()
    handle, pointer, opened = IpcHandle(), gpu.malloc(4 * MIB), ctypes.c_uint64(7)
    gpu.must("cudaIpcGetMemHandle", handle, pointer)
    return {
        "open": [gpu.call_with_handle("cudaIpcOpenMemHandle", opened, handle, 1), opened.value == pointer],
        "last error": gpu.cudaGetLastError(),
        "flags 0": [gpu.call_with_handle("cudaIpcOpenMemHandle", opened, handle, 0), gpu.cudaGetLastError()],
        "no handle": [gpu.call_with_handle("cudaIpcOpenMemHandle", opened, IpcHandle(), 1), gpu.cudaGetLastError()],
        "close the owner's": [gpu.cudaIpcCloseMemHandle(pointer), gpu.cudaGetLastError()],
        "free": gpu.cudaFree(pointer),
        "open what was freed": [gpu.call_with_handle("cudaIpcOpenMemHandle", opened, handle, 1), gpu.cudaGetLastError()],
    }


@behaviour
def registering(gpu: Gpu) -> Observations:
    pages = gpu.pages(MIB)
    at = ctypes.addressof(pages)
    return {
        "size 0": gpu.cuMemHostRegister(at, 0, 0),
        "NULL": gpu.cuMemHostRegister(0, 4096, 0),
        "bad flags": gpu.cuMemHostRegister(at, 4096, 0x100),
        "half": gpu.cuMemHostRegister(at, MIB // 2, 0),
        "twice": gpu.cuMemHostRegister(at, MIB // 2, 0),
        "larger over it": gpu.cuMemHostRegister(at, MIB, 0),
        "inside it": gpu.cuMemHostRegister(at + 4096, 4096, 0),
        "overlapping its end": gpu.cuMemHostRegister(at + MIB // 4, MIB // 2, 0),
        "behind it": gpu.cuMemHostRegister(at + MIB // 2, MIB // 4, 0),
        "unregister inside": gpu.cuMemHostUnregister(at + 4096),
        "unregister": gpu.cuMemHostUnregister(at),
        "unregister twice": gpu.cuMemHostUnregister(at),
        "unregister the one behind": gpu.cuMemHostUnregister(at + MIB // 2),
        "unregister NULL": gpu.cuMemHostUnregister(0),
        "unaligned": [gpu.cuMemHostRegister(at + 100, 5000, 0), gpu.cuMemHostUnregister(at + 100)],
        "free what was registered": [
            gpu.cuMemHostRegister(at, 4096, 0), gpu.cuMemFreeHost(at), gpu.cuMemHostUnregister(at),
        ],
        "runtime": [gpu.cudaHostRegister(at, 4096, 0), gpu.cudaHostRegister(at, 4096, 0), gpu.cudaGetLastError()],
        "runtime unregisters": [gpu.cudaHostUnregister(at), gpu.cudaHostUnregister(at), gpu.cudaGetLastError()],
    }  # fmt: skip


@behaviour
def pinned(gpu: Gpu) -> Observations:
    host, pages = gpu.pinned(), gpu.pages()
    value = ctypes.c_uint64(7)
    return {
        "free inside": gpu.cuMemFreeHost(host + 4096),
        "unregister it": gpu.cuMemHostUnregister(host),
        "register it": gpu.cuMemHostRegister(host, 4096, 0),
        "free": gpu.cuMemFreeHost(host),
        "free twice": gpu.cuMemFreeHost(host),
        "free NULL": gpu.cuMemFreeHost(0),
        "free unknown": gpu.cuMemFreeHost(ctypes.addressof(pages)),
        "bad flags": gpu.cuMemHostAlloc(value, 4096, 0x100),
        "no result": gpu.cuMemHostAlloc(None, 4096, 0),
        "runtime, 0 bytes": [gpu.cudaMallocHost(value, 0), value.value],
        "runtime, free NULL": gpu.cudaFreeHost(None),
        "runtime, free unknown": [gpu.cudaFreeHost(ctypes.addressof(pages)), gpu.cudaGetLastError()],
        "runtime alloc": [gpu.cudaHostAlloc(value, 4096, 0), gpu.cudaFreeHost(value.value)],
    }


@behaviour
def copy_directions(gpu: Gpu) -> Observations:
    """Every kind between every pair of a VMM mapping, a cudaMalloc and a host buffer."""
    host, second = (ctypes.c_ubyte * 4096)(), (ctypes.c_ubyte * 4096)()
    block, pointer = gpu.block(), gpu.malloc()
    ends = {"host": ctypes.addressof(host), "VMM": block.address, "cudaMalloc": pointer}
    kinds = {"HtoH": HOST_TO_HOST, "HtoD": HOST_TO_DEVICE, "DtoH": DEVICE_TO_HOST, "DtoD": DEVICE_TO_DEVICE,
             "default": DEFAULT, "kind 5": 5, "kind -1": -1}  # fmt: skip
    seen: Observations = {}
    for label, kind in kinds.items():
        for source, from_address in ends.items():
            for target, to_address in ends.items():
                if label == "HtoH" and (source, target) != ("host", "host"):
                    continue  # the runtime may access device addresses with the processor
                if source == target:
                    to_address = to_address + 8192 if source != "host" else ctypes.addressof(second)
                result = gpu.cudaMemcpy(to_address, from_address, 4096, kind)
                seen[f"{label}, {source} to {target}"] = result
                gpu.cudaGetLastError()
    seen["nothing"] = gpu.cudaMemcpy(0, 0, 0, DEFAULT)
    seen["0 bytes of VMM"] = gpu.cudaMemcpy(block.address, block.address + 4096, 0, DEVICE_TO_DEVICE)
    seen["synchronize"] = gpu.cudaDeviceSynchronize()
    return seen


@behaviour
def copies_by_the_driver(gpu: Gpu) -> Observations:
    host, block, pointer = (ctypes.c_ubyte * 4096)(), gpu.block(), gpu.malloc()
    at = ctypes.addressof(host)
    return {
        "0 bytes": gpu.cuMemcpyDtoH(host, block.address, 0),
        "0 bytes of nothing": gpu.cuMemcpyDtoH(None, 0, 0),
        "NULL to host": gpu.cuMemcpyDtoH(host, 0, 4096),
        "to NULL": gpu.cuMemcpyDtoH(None, block.address, 4096),
        "host as device": gpu.cuMemcpyDtoH(host, at, 16),
        "nonsense": gpu.cuMemcpyDtoH(host, 0x1000, 16),
        "past cudaMalloc's end": gpu.cuMemcpyDtoH(host, pointer + GRANULE - 16, 4096),
        "fill nothing": gpu.cuMemsetD8(block.address, 0, 0),
        "fill NULL": gpu.cuMemsetD8(0, 0, 16),
        "fill host memory": gpu.cuMemsetD8(at, 0, 16),
        "fill VMM": [gpu.cudaMemset(block.address, 0x1FF, 4096), gpu.read(block.address)],
        "synchronize": gpu.cuCtxSynchronize(),
    }


@behaviour
def streams_and_events(gpu: Gpu) -> Observations:
    value, event, stream = ctypes.c_uint64(), gpu.event(), gpu.stream()
    return {
        "create flags 7": gpu.cuStreamCreate(value, 7),
        "create without result": gpu.cuStreamCreate(None, 0),
        "destroy the legacy stream": gpu.cuStreamDestroy(0),
        "destroy stream 1": gpu.cuStreamDestroy(1),
        "query legacy": gpu.cuStreamQuery(0),
        "query": gpu.cuStreamQuery(stream),
        "query stream 1": gpu.cuStreamQuery(1),
        "query stream 2": gpu.cuStreamQuery(2),
        "runtime flags 7": [gpu.cudaStreamCreateWithFlags(value, 7), gpu.cudaGetLastError()],
        "event never recorded": [gpu.cuEventQuery(event), gpu.cuEventSynchronize(event)],
        "wait for it": gpu.cuStreamWaitEvent(stream, event, 0),
        "wait with flags 4": gpu.cuStreamWaitEvent(stream, event, 4),
        "record": [gpu.cuEventRecord(event, stream), gpu.cuEventSynchronize(event), gpu.cuEventQuery(event)],
        "event flags 0x40": gpu.cuEventCreate(value, 0x40),
        "event without result": gpu.cuEventCreate(None, 0),
        "record none": gpu.cuEventRecord(0, stream),
        "query none": gpu.cuEventQuery(0),
        "destroy none": gpu.cuEventDestroy(0),
        "destroy": [gpu.cuEventDestroy(event), gpu.cuStreamDestroy(stream)],
    }
