"""Before cuInit, without a current context, primary contexts, those of cuCtxCreate, the stack, the runtime's device."""

from __future__ import annotations

import ctypes
import json
import os

from gpu import GRANULE, MIB, Gpu
from table import Observations, behaviour


def calls_without_context(gpu: Gpu) -> Observations:
    value, other, number = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
    pages = gpu.pages()
    flags, active = ctypes.c_uint(), ctypes.c_int()
    return {
        "cuDeviceGetCount": gpu.cuDeviceGetCount(number),
        "cuDeviceGet": gpu.cuDeviceGet(number, 0),
        "cuDriverGetVersion": gpu.cuDriverGetVersion(number),
        "cuDevicePrimaryCtxGetState": gpu.cuDevicePrimaryCtxGetState(0, flags, active),
        "cuCtxGetCurrent": [gpu.cuCtxGetCurrent(value), value.value == 0],
        "cuCtxGetDevice": gpu.cuCtxGetDevice(number),
        "cuCtxPopCurrent": gpu.cuCtxPopCurrent(value),
        "cuCtxSynchronize": gpu.cuCtxSynchronize(),
        "cuMemGetInfo": gpu.cuMemGetInfo(value, other),
        "cuMemAlloc": gpu.cuMemAlloc(value, GRANULE),
        "cuMemFree": gpu.cuMemFree(GRANULE),
        "cuMemHostAlloc": gpu.cuMemHostAlloc(value, 4096, 0),
        "cuMemFreeHost unknown": gpu.cuMemFreeHost(ctypes.addressof(pages)),
        "cuMemHostRegister": gpu.cuMemHostRegister(ctypes.addressof(pages), 4096, 0),
        "cuMemHostUnregister": gpu.cuMemHostUnregister(ctypes.addressof(pages)),
        "cuMemcpyDtoH": gpu.cuMemcpyDtoH(pages, GRANULE, 4096),
        "cuMemsetD8": gpu.cuMemsetD8(GRANULE, 0, 4096),
        "cuStreamCreate": gpu.cuStreamCreate(value, 1),
        "cuStreamSynchronize": gpu.cuStreamSynchronize(0),
        "cuStreamIsCapturing": gpu.cuStreamIsCapturing(0, number),
        "cuEventCreate": gpu.cuEventCreate(value, 2),
        "cuThreadExchangeStreamCaptureMode": gpu.cuThreadExchangeStreamCaptureMode(ctypes.c_int(2)),
        "cuMemGetAllocationGranularity": gpu.cuMemGetAllocationGranularity(value, gpu.properties(), 0),
        "cuMemAddressReserve": gpu.cuMemAddressReserve(value, GRANULE, 0, 0, 0),
        "cuMemCreate": gpu.cuMemCreate(value, GRANULE, gpu.properties(), 0),
        "cuPointerGetAttribute": gpu.cuPointerGetAttribute(number, 2, GRANULE),
    }


@behaviour(own_process=True)
def before_init(gpu: Gpu) -> Observations:
    return calls_without_context(gpu)


@behaviour(own_process=True)
def initialised_without_context(gpu: Gpu) -> Observations:
    gpu.must("cuInit", 0)
    seen = calls_without_context(gpu)
    seen["primary context active"] = gpu.primary_active()
    return seen


@behaviour(own_process=True)
def init_arguments(gpu: Gpu) -> Observations:
    return {"flags 1": gpu.cuInit(1), "flags 0": gpu.cuInit(0), "again": gpu.cuInit(0)}


@behaviour
def device_arguments(gpu: Gpu) -> Observations:
    number, name = ctypes.c_int(), (ctypes.c_char * 64)()
    flags, active, size = ctypes.c_uint(), ctypes.c_int(), ctypes.c_uint64()
    return {
        "cuDeviceGet 99": gpu.cuDeviceGet(number, 99),
        "cuDeviceGet -1": gpu.cuDeviceGet(number, -1),
        "cuDeviceGet without result": gpu.cuDeviceGet(None, 0),
        "cuDeviceGetCount without result": gpu.cuDeviceGetCount(None),
        "cuDeviceGetName 99": gpu.cuDeviceGetName(name, 64, 99),
        "cuDeviceTotalMem 99": gpu.cuDeviceTotalMem(size, 99),
        "cuDeviceGetAttribute 99": gpu.cuDeviceGetAttribute(number, 1, 99),
        "attribute 0": gpu.cuDeviceGetAttribute(number, 0, 0),
        "attribute 9999": gpu.cuDeviceGetAttribute(number, 9999, 0),
        "virtual memory management": [gpu.cuDeviceGetAttribute(number, 102, 0), number.value],
        "posix file descriptors": [gpu.cuDeviceGetAttribute(number, 103, 0), number.value],
        "cuDevicePrimaryCtxGetState 99": gpu.cuDevicePrimaryCtxGetState(99, flags, active),
        "cuDevicePrimaryCtxRetain 99": gpu.cuDevicePrimaryCtxRetain(size, 99),
        "cuDevicePrimaryCtxRelease 99": gpu.cuDevicePrimaryCtxRelease(99),
        "can access itself": [gpu.cuDeviceCanAccessPeer(number, 0, 0), number.value],
        "can access 99": gpu.cuDeviceCanAccessPeer(number, 0, 99),
        "cudaSetDevice 99": gpu.cudaSetDevice(99),
        "last error": gpu.cudaGetLastError(),
        "cudaSetDevice -1": gpu.cudaSetDevice(-1),
        "last error, again": gpu.cudaGetLastError(),
        "cudaGetDevice": [gpu.cudaGetDevice(number), number.value],
    }


@behaviour(own_process=True)
def primary_context(gpu: Gpu) -> Observations:
    gpu.must("cuInit", 0)
    first, second = ctypes.c_uint64(), ctypes.c_uint64()
    seen: Observations = {"at first": gpu.primary_active()}
    seen["release before retain"] = gpu.cuDevicePrimaryCtxRelease(0)
    seen["retain"] = [gpu.cuDevicePrimaryCtxRetain(first, 0), gpu.primary_active(), gpu.context() == 0]
    seen["retain again"] = [gpu.cuDevicePrimaryCtxRetain(second, 0), first.value == second.value]
    seen["release"] = [gpu.cuDevicePrimaryCtxRelease(0), gpu.primary_active()]
    seen["release the last"] = [gpu.cuDevicePrimaryCtxRelease(0), gpu.primary_active()]
    seen["release one more"] = gpu.cuDevicePrimaryCtxRelease(0)
    seen["reset while inactive"] = gpu.cuDevicePrimaryCtxReset(0)
    seen["set current what was released"] = gpu.cuCtxSetCurrent(first.value)
    return seen


@behaviour(own_process=True)
def primary_context_flags(gpu: Gpu) -> Observations:
    gpu.must("cuInit", 0)
    context, flags, active = ctypes.c_uint64(), ctypes.c_uint(), ctypes.c_int()
    return {
        "set while inactive": gpu.cuDevicePrimaryCtxSetFlags(0, 4),
        "told": [gpu.cuDevicePrimaryCtxGetState(0, flags, active), flags.value],
        "retain": gpu.cuDevicePrimaryCtxRetain(context, 0),
        "set while active": gpu.cuDevicePrimaryCtxSetFlags(0, 1),
        "bad flags": gpu.cuDevicePrimaryCtxSetFlags(0, 0xFFFF),
        "state without results": gpu.cuDevicePrimaryCtxGetState(0, None, None),
    }


@behaviour(own_process=True)
def current_context_dies(gpu: Gpu) -> Observations:
    """The last release with the context current."""
    gpu.must("cuInit", 0)
    context, pointer = ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cuDevicePrimaryCtxRetain", context, 0)
    gpu.must("cuCtxSetCurrent", context.value)
    return {
        "release": gpu.cuDevicePrimaryCtxRelease(0),
        "active": gpu.primary_active(),
        "still current": gpu.context() == context.value,
        "synchronize": gpu.cuCtxSynchronize(),
        "allocate": gpu.cuMemAlloc(pointer, GRANULE),
        "set current again": gpu.cuCtxSetCurrent(context.value),
    }


@behaviour(own_process=True)
def context_stack(gpu: Gpu) -> Observations:
    gpu.must("cuInit", 0)
    context, top = ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cuDevicePrimaryCtxRetain", context, 0)
    return {
        "pop the empty stack": gpu.cuCtxPopCurrent(top),
        "push": gpu.cuCtxPushCurrent(context.value),
        "current": gpu.context() == context.value,
        "push again": gpu.cuCtxPushCurrent(context.value),
        "pop": [gpu.cuCtxPopCurrent(top), top.value == context.value, gpu.context() == context.value],
        "pop without result": gpu.cuCtxPopCurrent(None),
        "none left": gpu.context() == 0,
        "pop too often": gpu.cuCtxPopCurrent(top),
        "push NULL": gpu.cuCtxPushCurrent(0),
        "set current": gpu.cuCtxSetCurrent(context.value),
        "set NULL": [gpu.cuCtxSetCurrent(0), gpu.context() == 0],
        "set NULL again": gpu.cuCtxSetCurrent(0),
        "push, set NULL over it": [gpu.cuCtxPushCurrent(context.value), gpu.cuCtxSetCurrent(0), gpu.context() == 0],
        "pop after that": gpu.cuCtxPopCurrent(top),
        "get without result": gpu.cuCtxGetCurrent(None),
    }


@behaviour(own_process=True)
def created_context(gpu: Gpu) -> Observations:
    """A context of cuCtxCreate, which is current from then on, and beside it the primary one."""
    gpu.must("cuInit", 0)
    primary, created, other, number = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(-1)
    seen: Observations = {
        "create": gpu.cuCtxCreate(created, 0, 0),
        "current": gpu.context() == created.value,
        "primary active": gpu.primary_active(),
        "device": [gpu.cuCtxGetDevice(number), number.value],
        "retain": [gpu.cuDevicePrimaryCtxRetain(primary, 0), primary.value == created.value],
        "cudaFree NULL": [gpu.cudaFree(None), gpu.context() == created.value],
        "destroy the primary one": gpu.cuCtxDestroy(primary.value),
        "destroy NULL": gpu.cuCtxDestroy(None),
        "unknown flags": gpu.cuCtxCreate(other, 1 << 30, 0),
        "no such device": gpu.cuCtxCreate(other, 0, 99),
        "no result": gpu.cuCtxCreate(None, 0, 0),
    }
    seen["set the primary one"] = [gpu.cuCtxSetCurrent(primary.value), gpu.context() == primary.value]
    seen["and back"] = [gpu.cuCtxSetCurrent(created.value), gpu.cuCtxSynchronize()]
    seen["destroy"] = [gpu.cuCtxDestroy(created.value), gpu.context() == 0]
    seen["device afterwards"] = gpu.cuCtxGetDevice(number)
    return seen


@behaviour(own_process=True)
def created_context_goes(gpu: Gpu) -> Observations:
    """What is destroyed with a context of cuCtxCreate."""
    gpu.must("cuInit", 0)
    created, pointer, pinned = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cuCtxCreate", created, 0, 0)
    gpu.must("cuMemAlloc", pointer, GRANULE)
    gpu.must("cuMemHostAlloc", pinned, MIB, 0)
    stream, block = gpu.stream(), gpu.block()
    gpu.must("cuCtxDestroy", created.value)
    gpu.start()
    return {
        "its memory": gpu.cuMemFree(pointer.value),
        "its pinned memory": gpu.cuMemFreeHost(pinned.value),
        "its stream": gpu.cuStreamSynchronize(stream),
        "memory of no context": [gpu.fill(block.address, 7), gpu.read(block.address)],
    }


@behaviour(own_process=True)
def created_context_at_work(gpu: Gpu) -> Observations:
    """Work of one context while another is waited for."""
    gpu.start()
    primary, created = gpu.context(), ctypes.c_uint64()
    gpu.must("cuCtxCreate", created, 0, 0)
    busy, stream = gpu.block(128 * GRANULE), gpu.stream()
    for _ in range(16):
        gpu.must("cuMemsetD8Async", busy.address, 1, busy.bytes, stream)
    gpu.must("cuCtxPushCurrent", primary)
    return {
        "synchronize the primary one": gpu.cuCtxSynchronize(),
        "still at work": gpu.cuStreamQuery(stream),
        "pop": gpu.cuCtxPopCurrent(None),
        "synchronize": gpu.cuCtxSynchronize(),
        "done": gpu.cuStreamQuery(stream),
    }


@behaviour(own_process=True)
def set_device(gpu: Gpu) -> Observations:
    gpu.must("cuInit", 0)
    number = ctypes.c_int(-1)
    seen: Observations = {
        "cudaGetDevice": [gpu.cudaGetDevice(number), number.value, gpu.primary_active()],
        "cudaGetDeviceCount": [gpu.cudaGetDeviceCount(number), gpu.primary_active()],
        "cudaSetDevice": [gpu.cudaSetDevice(0), gpu.primary_active(), gpu.context() != 0],
        "cudaFree NULL": [gpu.cudaFree(None), gpu.primary_active(), gpu.context() != 0],
    }
    seen["driver's current device"] = [gpu.cuCtxGetDevice(number), number.value]
    seen["set NULL"] = [gpu.cuCtxSetCurrent(0), gpu.context() == 0]
    seen["runtime finds it again"] = [gpu.cudaDeviceSynchronize(), gpu.context() != 0]
    return seen


@behaviour(own_process=True)
def runtime_without_init(gpu: Gpu) -> Observations:
    """The runtime initialises the driver itself."""
    pointer = ctypes.c_uint64()
    return {
        "before": gpu.primary_active(),
        "cudaMalloc": gpu.cudaMalloc(pointer, GRANULE),
        "after": gpu.primary_active(),
        "current": gpu.context() != 0,
    }


@behaviour(own_process=True)
def runtime_uses_current_context(gpu: Gpu) -> Observations:
    gpu.must("cuInit", 0)
    context, pointer = ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cuDevicePrimaryCtxRetain", context, 0)
    gpu.must("cuCtxPushCurrent", context.value)
    return {
        "cudaMalloc": gpu.cudaMalloc(pointer, GRANULE),
        "the same context": gpu.context() == context.value,
        "release": [gpu.cuDevicePrimaryCtxRelease(0), gpu.primary_active()],
        "free": gpu.cudaFree(pointer.value),
    }


@behaviour(own_process=True)
def device_reset(gpu: Gpu) -> Observations:
    gpu.start()
    block, pointer, pinned, context = gpu.block(), gpu.malloc(), gpu.pinned(), gpu.context()
    gpu.put(block.address, 0x51, 4096)
    again = ctypes.c_uint64()
    seen: Observations = {
        "reset": gpu.cudaDeviceReset(),
        "active": gpu.primary_active(),
        "current context": gpu.context() == context,
        "driver without runtime": gpu.cuCtxSynchronize(),
        "runtime": gpu.cudaFree(None),
        "active again": gpu.primary_active(),
        "same context": gpu.context() == context,
        "VMM contents": gpu.read(block.address),
        "VMM access": gpu.allow(block.address),
        "VMM contents with access": gpu.read(block.address),
        "retain": gpu.cuMemRetainAllocationHandle(again, block.address),
        "unmap": gpu.cuMemUnmap(block.address, GRANULE),
        "release": gpu.cuMemRelease(block.handle),
        "address free": gpu.cuMemAddressFree(block.address, GRANULE),
        "free what was allocated": gpu.cudaFree(pointer),
        "free pinned": gpu.cudaFreeHost(pinned),
    }
    return seen


@behaviour(own_process=True)
def primary_release_keeps_vmm(gpu: Gpu) -> Observations:
    gpu.must("cuInit", 0)
    context = ctypes.c_uint64()
    gpu.must("cuDevicePrimaryCtxRetain", context, 0)
    gpu.must("cuCtxSetCurrent", context.value)
    block, pointer = gpu.block(), ctypes.c_uint64()
    gpu.put(block.address, 0x52, 4096)
    gpu.must("cuMemAlloc", pointer, 8 * MIB)
    gpu.must("cuDevicePrimaryCtxRelease", 0)
    gpu.must("cuDevicePrimaryCtxRetain", context, 0)
    gpu.must("cuCtxSetCurrent", context.value)
    return {
        "contents": gpu.read(block.address),
        "access": gpu.allow(block.address),
        "contents with access": gpu.read(block.address),
        "unmap": gpu.cuMemUnmap(block.address, GRANULE),
        "release": gpu.cuMemRelease(block.handle),
        "free what was allocated": gpu.cuMemFree(pointer.value),
    }


@behaviour(own_process=True)
def in_a_forked_child(gpu: Gpu) -> Observations:

    gpu.start()
    block = gpu.block()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            seen = calls_without_context(gpu)
            seen["cuInit"] = gpu.cuInit(0)
            seen["cuMemUnmap"] = gpu.cuMemUnmap(block.address, GRANULE)
            seen["cudaGetDeviceCount"] = gpu.cudaGetDeviceCount(ctypes.c_int())
            seen["cudaSetDevice"] = gpu.cudaSetDevice(0)
            seen["cudaMalloc"] = gpu.cudaMalloc(ctypes.c_uint64(), 4096)
            seen["cudaGetLastError"] = gpu.cudaGetLastError()
            os.write(writing, json.dumps(seen).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    inside = json.loads(text) if text else "died"
    return {"child": inside, "parent afterwards": [gpu.fill(block.address, 2), gpu.read(block.address)]}


@behaviour(own_process=True)
def fork_before_use(gpu: Gpu) -> Observations:
    """A child of a process that has only loaded the libraries can use them."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            result = gpu.cuInit(0) + " " + gpu.cudaMalloc(ctypes.c_uint64(), 4096)
            os.write(writing, result.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        answered = answer.read().decode()
    os.waitpid(child, 0)
    return {"child": answered, "parent": gpu.cuInit(0)}
