"""Memory access: copies to and from memory that is reserved, mapped or accessible in part, and the state of a context after
an illegal access."""

from __future__ import annotations

import ctypes

from gpu import DEFAULT, DEVICE_TO_DEVICE, GRANULE, NO_ACCESS, READ_ONLY, Gpu
from table import Observations, behaviour


def everything(gpu: Gpu) -> Observations:
    """The results of many kinds of calls in the present state of the process."""
    value, other = ctypes.c_uint64(), ctypes.c_uint64()
    number = ctypes.c_int()
    host = (ctypes.c_ubyte * 4096)()
    address, handle = ctypes.c_uint64(), ctypes.c_uint64()
    seen: Observations = {
        "cuCtxSynchronize": gpu.cuCtxSynchronize(),
        "cuStreamSynchronize legacy": gpu.cuStreamSynchronize(0),
        "cuStreamQuery legacy": gpu.cuStreamQuery(0),
        "cuMemGetInfo": gpu.cuMemGetInfo(value, other),
        "cuMemAddressReserve": gpu.cuMemAddressReserve(address, GRANULE, 0, 0, 0),
        "cuMemCreate": gpu.cuMemCreate(handle, GRANULE, gpu.properties(), 0),
        "cuMemMap": gpu.cuMemMap(address.value, GRANULE, 0, handle.value, 0),
        "cuMemSetAccess": gpu.allow(address.value),
        "cuMemsetD8": gpu.fill(address.value, 1),
        "cuMemcpyDtoH": gpu.cuMemcpyDtoH(host, address.value, 4096),
        "cuMemUnmap": gpu.cuMemUnmap(address.value, GRANULE),
        "cuMemRelease": gpu.cuMemRelease(handle.value),
        "cuMemAddressFree": gpu.cuMemAddressFree(address.value, GRANULE),
        "cuMemAlloc": gpu.cuMemAlloc(value, GRANULE),
        "cuMemHostAlloc": gpu.cuMemHostAlloc(value, 4096, 0),
        "cuStreamCreate": gpu.cuStreamCreate(value, 1),
        "cuEventCreate": gpu.cuEventCreate(value, 2),
        "cuStreamIsCapturing legacy": gpu.cuStreamIsCapturing(0, number),
        "cuCtxGetCurrent": gpu.cuCtxGetCurrent(value),
        "cuCtxGetDevice": gpu.cuCtxGetDevice(number),
        "cuDeviceGetCount": gpu.cuDeviceGetCount(number),
        "primary context active": gpu.primary_active(),
        "cudaGetDevice": gpu.cudaGetDevice(number),
        "cudaSetDevice": gpu.cudaSetDevice(0),
        "cudaMalloc": gpu.cudaMalloc(value, GRANULE),
        "cudaFree NULL": gpu.cudaFree(None),
        "cudaMemGetInfo": gpu.cudaMemGetInfo(value, other),
        "cudaDeviceSynchronize": gpu.cudaDeviceSynchronize(),
        "cudaGetLastError": gpu.cudaGetLastError(),
        "cudaGetLastError again": gpu.cudaGetLastError(),
    }
    return seen


@behaviour(own_process=True)
def memset_without_access(gpu: Gpu) -> Observations:
    gpu.start()
    block = gpu.block(access=False)
    return {
        "fill": gpu.fill(block.address, 1),
        "synchronize": gpu.cuCtxSynchronize(),
        "read": gpu.read(block.address),
        "cudaMemset": gpu.cudaMemset(block.address, 1, 4096),
        "synchronize again": gpu.cuCtxSynchronize(),
    }


@behaviour(own_process=True)
def copy_without_access(gpu: Gpu) -> Observations:
    gpu.start()
    block, host = gpu.block(access=False), (ctypes.c_ubyte * 4096)()
    good = gpu.block()
    return {
        "to the host": gpu.read(block.address),
        "from the host": gpu.cuMemcpyHtoD(block.address, host, 4096),
        "device to device": gpu.cuMemcpyDtoD(good.address, block.address, 4096),
        "cudaMemcpy default": gpu.cudaMemcpy(host, block.address, 4096, DEFAULT),
        "synchronize": gpu.cuCtxSynchronize(),
        "other memory": [gpu.fill(good.address, 4), gpu.read(good.address)],
    }


@behaviour(own_process=True)
def reserved_to_host(gpu: Gpu) -> Observations:
    gpu.start()
    return {"read": gpu.read(gpu.reserve()), "synchronize": gpu.cuCtxSynchronize()}


@behaviour(own_process=True)
def reserved_from_host(gpu: Gpu) -> Observations:
    gpu.start()
    host = (ctypes.c_ubyte * 4096)()
    return {"write": gpu.cuMemcpyHtoD(gpu.reserve(), host, 4096), "synchronize": gpu.cuCtxSynchronize()}


@behaviour(own_process=True)
def reserved_fill(gpu: Gpu) -> Observations:
    gpu.start()
    address = gpu.reserve()
    return {
        "driver": gpu.fill(address, 1),
        "runtime": gpu.cudaMemset(address, 1, 4096),
        "synchronize": gpu.cuCtxSynchronize(),
    }


@behaviour(own_process=True)
def reserved_by_default(gpu: Gpu) -> Observations:
    gpu.start()
    host = (ctypes.c_ubyte * 4096)()
    return {"to the host": gpu.cudaMemcpy(host, gpu.reserve(), 4096, DEFAULT), "synchronize": gpu.cuCtxSynchronize()}


@behaviour(own_process=True)
def async_on_unmapped(gpu: Gpu) -> Observations:
    gpu.start()
    block, stream = gpu.block(), gpu.stream()
    gpu.must("cuMemUnmap", block.address, GRANULE)
    return {
        "memset": gpu.cuMemsetD8Async(block.address, 1, 4096, stream),
        "stream synchronize": gpu.cuStreamSynchronize(stream),
        "context synchronize": gpu.cuCtxSynchronize(),
    }


@behaviour(own_process=True)
def async_copy_on_unmapped(gpu: Gpu) -> Observations:
    gpu.start()
    block, other, stream = gpu.block(), gpu.block(), gpu.stream()
    gpu.must("cuMemUnmap", block.address, GRANULE)
    return {
        "copy": gpu.cuMemcpyDtoDAsync(other.address, block.address, 4096, stream),
        "stream synchronize": gpu.cuStreamSynchronize(stream),
        "pinned to unmapped": gpu.cuMemcpyHtoDAsync(block.address, gpu.pinned(), 4096, stream),
        "context synchronize": gpu.cuCtxSynchronize(),
        "cudaMemcpyAsync": gpu.cudaMemcpyAsync(other.address, block.address, 4096, DEVICE_TO_DEVICE, stream),
        "cudaDeviceSynchronize": gpu.cudaDeviceSynchronize(),
    }


@behaviour(own_process=True)
def past_the_mapping(gpu: Gpu) -> Observations:
    gpu.start()
    address = gpu.reserve(2 * GRANULE)
    gpu.block(address=address)
    return {
        "fill over the end": gpu.fill(address + GRANULE - 2048, 1, 4096),
        "synchronize": gpu.cuCtxSynchronize(),
        "read over the end": gpu.read(address + GRANULE - 2048),
    }


@behaviour(own_process=True)
def read_only(gpu: Gpu) -> Observations:
    gpu.start()
    block = gpu.block()
    other = gpu.block()
    gpu.put(block.address, 0x41, GRANULE)
    return {
        "read only": gpu.allow(block.address, flags=READ_ONLY),
        "read": gpu.read(block.address),
        "copy from it": [gpu.cuMemcpyDtoD(other.address, block.address, 4096), gpu.read(other.address)],
        "copy into it": gpu.cuMemcpyDtoD(block.address, other.address, 4096),
        "synchronize": gpu.cuCtxSynchronize(),
    }


@behaviour(own_process=True)
def read_only_fill(gpu: Gpu) -> Observations:
    gpu.start()
    block = gpu.block()
    return {
        "read only": gpu.allow(block.address, flags=READ_ONLY),
        "fill": gpu.fill(block.address, 1),
        "synchronize": gpu.cuCtxSynchronize(),
    }


def _repeated(gpu: Gpu, count: int) -> tuple[int, int, int]:
    """One handle, filled where it may be written, and mapped `count` times in a row: its address, that of the row, and the
    handle."""
    block = gpu.block()
    gpu.put(block.address, 0xFF, GRANULE)
    row = gpu.reserve(4 * GRANULE)
    for number in range(count):
        gpu.must("cuMemMap", row + number * GRANULE, GRANULE, 0, block.handle, 0)
    return block.address, row, block.handle


@behaviour(own_process=True)
def one_handle_read_only_all_over_a_range(gpu: Gpu) -> Observations:
    """What guard mode does. The handle can be written at another address."""
    gpu.start()
    original, row, _ = _repeated(gpu, 4)
    host, other = (ctypes.c_ubyte * 4096)(), gpu.block()
    seen: Observations = {
        "before access": gpu.read(row),
        "access over the range": gpu.allow(row, 4 * GRANULE, flags=READ_ONLY),
        "read": [gpu.read(row + number * GRANULE) for number in range(4)],
        "read over an edge": gpu.read(row + GRANULE - 2048),
        "copy from it": [gpu.cuMemcpyDtoD(other.address, row, 4096), gpu.read(other.address)],
        "copy into it from the host": gpu.cuMemcpyHtoD(row + GRANULE, host, 4096),
        "copy into it from the device": gpu.cuMemcpyDtoD(row, other.address, 4096),
        "fill": gpu.fill(row, 1),
        "cudaMemset": gpu.cudaMemset(row, 1, 4096),
        "synchronize": gpu.cuCtxSynchronize(),
        "write elsewhere": [gpu.fill(original, 0x41), gpu.read(row + 3 * GRANULE)],
        "unmap": gpu.cuMemUnmap(row, 4 * GRANULE),
        "read at last": [gpu.read(row), gpu.read(original)],
        "synchronize at last": gpu.cuCtxSynchronize(),
    }
    return seen


@behaviour(own_process=True)
def one_handle_in_a_part_of_a_range(gpu: Gpu) -> Observations:
    gpu.start()
    _, row, _ = _repeated(gpu, 3)
    return {
        "access beyond the part": gpu.allow(row, 4 * GRANULE, flags=READ_ONLY),
        "access": gpu.allow(row, 3 * GRANULE, flags=READ_ONLY),
        "read": gpu.read(row + 2 * GRANULE),
        "unmap of the part": gpu.cuMemUnmap(row, 3 * GRANULE),
        "free": gpu.cuMemAddressFree(row, 4 * GRANULE),
    }


@behaviour(own_process=True)
def one_handle_released_while_it_is_mapped(gpu: Gpu) -> Observations:
    gpu.start()
    original, row, handle = _repeated(gpu, 4)
    return {
        "access": gpu.allow(row, 4 * GRANULE, flags=READ_ONLY),
        "unmap the original": gpu.cuMemUnmap(original, GRANULE),
        "release": gpu.cuMemRelease(handle),
        "read": gpu.read(row + 3 * GRANULE),
        "unmap": gpu.cuMemUnmap(row, 4 * GRANULE),
    }


@behaviour(own_process=True)
def access_taken_away(gpu: Gpu) -> Observations:
    gpu.start()
    block = gpu.block()
    return {
        "fill": gpu.fill(block.address, 0x42),
        "no access": gpu.allow(block.address, flags=NO_ACCESS),
        "read": gpu.read(block.address),
        "synchronize": gpu.cuCtxSynchronize(),
        "access": gpu.allow(block.address),
        "read again": gpu.read(block.address),
    }


@behaviour(own_process=True)
def after_a_fault(gpu: Gpu) -> Observations:
    """A graph's memset on unmapped memory is a fault on the device, whatever the driver checks at the call."""
    gpu.start()
    block = gpu.block()
    stream, executable = gpu.capture(lambda stream: gpu.must("cuMemsetD8Async", block.address, 7, 4096, stream))
    gpu.must("cuMemUnmap", block.address, GRANULE)
    return {
        "launch": gpu.cuGraphLaunch(executable, stream),
        "synchronize": gpu.cuStreamSynchronize(stream),
        "everything": everything(gpu),
    }


@behaviour(own_process=True)
def freeing_after_a_fault(gpu: Gpu) -> Observations:
    gpu.start()
    block, keep = gpu.block(), gpu.block()
    pinned, pointer, pages = gpu.pinned(), gpu.malloc(), gpu.pages()
    registered = ctypes.addressof(pages)
    gpu.must("cuMemHostRegister", registered, len(pages), 0)
    side, event = gpu.stream(), gpu.event()
    stream, executable = gpu.capture(lambda stream: gpu.must("cuMemsetD8Async", block.address, 7, 4096, stream))
    gpu.must("cuMemUnmap", block.address, GRANULE)
    gpu.call("cuGraphLaunch", executable, stream)
    retained = ctypes.c_uint64()
    return {
        "stream synchronize": gpu.cuStreamSynchronize(stream),
        "cuMemRetainAllocationHandle": gpu.cuMemRetainAllocationHandle(retained, keep.address),
        "cuMemUnmap": gpu.cuMemUnmap(keep.address, GRANULE),
        "cuMemRelease": gpu.cuMemRelease(keep.handle),
        "cuMemAddressFree": gpu.cuMemAddressFree(keep.address, GRANULE),
        "cuMemFreeHost": gpu.cuMemFreeHost(pinned),
        "cuMemHostUnregister": gpu.cuMemHostUnregister(registered),
        "cudaFree": gpu.cudaFree(pointer),
        "cuEventQuery": gpu.cuEventQuery(event),
        "cuEventDestroy": gpu.cuEventDestroy(event),
        "cuStreamDestroy": gpu.cuStreamDestroy(side),
        "cuGraphExecDestroy": gpu.cuGraphExecDestroy(executable),
        "cuDevicePrimaryCtxRelease": gpu.cuDevicePrimaryCtxRelease(0),
    }


@behaviour(own_process=True)
def reset_after_a_fault(gpu: Gpu) -> Observations:
    gpu.start()
    block, pointer = gpu.block(), ctypes.c_uint64()
    stream, executable = gpu.capture(lambda stream: gpu.must("cuMemsetD8Async", block.address, 7, 4096, stream))
    gpu.must("cuMemUnmap", block.address, GRANULE)
    gpu.call("cuGraphLaunch", executable, stream)
    return {
        "synchronize": gpu.cudaDeviceSynchronize(),
        "reset": gpu.cudaDeviceReset(),
        "last error": gpu.cudaGetLastError(),
        "malloc": gpu.cudaMalloc(pointer, GRANULE),
        "synchronize again": gpu.cudaDeviceSynchronize(),
    }


def fault(gpu: Gpu) -> str:
    """A copy in a graph, of memory that is gone."""
    block, other = gpu.block(), gpu.block()
    stream, executable = gpu.capture(
        lambda stream: gpu.must("cuMemcpyDtoDAsync", other.address, block.address, 4096, stream)
    )
    gpu.must("cuMemUnmap", block.address, GRANULE)
    gpu.call("cuGraphLaunch", executable, stream)
    return gpu.cuStreamSynchronize(stream)


@behaviour(own_process=True)
def after_a_faulting_copy(gpu: Gpu) -> Observations:
    """The same as after a memset's fault, which is another error."""
    gpu.start()
    return {"fault": fault(gpu), "everything": everything(gpu)}


@behaviour(own_process=True)
def repeated_synchronizing_after_a_fault(gpu: Gpu) -> Observations:
    """The error stays for the context, and is reported to the runtime once for each call."""
    gpu.start()
    event, side = gpu.event(), gpu.stream()
    seen: Observations = {"fault": fault(gpu)}
    for label in ("first", "second"):
        seen[label] = [
            gpu.cuCtxSynchronize(), gpu.cudaDeviceSynchronize(), gpu.cudaPeekAtLastError(), gpu.cudaGetLastError(),
            gpu.cudaGetLastError(), gpu.cuStreamSynchronize(side), gpu.cuEventRecord(event, side),
            gpu.cuEventSynchronize(event),
        ]  # fmt: skip
    seen["new context"] = [gpu.cuDevicePrimaryCtxRelease(0), gpu.primary_active()]
    return seen


@behaviour(own_process=True)
def retained_after_a_fault(gpu: Gpu) -> Observations:
    """A primary context that is destroyed with its error, and made again."""
    gpu.start()
    context, flags = ctypes.c_uint64(), gpu.free_bytes() > 0
    seen: Observations = {"memory before": flags, "fault": fault(gpu), "reset": gpu.cuDevicePrimaryCtxReset(0)}
    seen["active"] = gpu.primary_active()
    seen["retain"] = gpu.cuDevicePrimaryCtxRetain(context, 0)
    seen["create"] = gpu.cuMemCreate(ctypes.c_uint64(), GRANULE, gpu.properties(), 0)
    seen["set device"] = [gpu.cudaSetDevice(0), gpu.cudaGetLastError()]
    return seen


@behaviour(own_process=True, devices=2)
def other_device_after_a_fault(gpu: Gpu) -> Observations:
    """One device is lost; the other is usable."""
    gpu.start()
    seen: Observations = {"fault": fault(gpu)}
    gpu.call("cudaSetDevice", 1)
    pointer = ctypes.c_uint64()
    seen["other"] = [gpu.cudaMalloc(pointer, GRANULE), gpu.fill(pointer.value, 7), gpu.read(pointer.value)]
    seen["back"] = [gpu.cudaSetDevice(0), gpu.cudaDeviceSynchronize()]
    return seen


@behaviour(own_process=True)
def freeing_without_context_after_a_fault(gpu: Gpu) -> Observations:
    gpu.start()
    pinned, pointer, number = gpu.pinned(), gpu.malloc(), ctypes.c_int()
    seen: Observations = {"fault": fault(gpu)}
    gpu.must("cuCtxSetCurrent", None)
    seen["cuPointerGetAttribute"] = gpu.cuPointerGetAttribute(number, 2, pointer)
    seen["cuMemFreeHost"] = gpu.cuMemFreeHost(pinned)
    seen["cuMemFree"] = gpu.cuMemFree(pointer)
    return seen


@behaviour(own_process=True)
def work_that_was_queued(gpu: Gpu) -> Observations:
    """A memset outside of any graph, whose memory is released while it waits for earlier work."""
    gpu.start()
    block, busy, stream = gpu.block(), gpu.block(128 * GRANULE), gpu.stream()
    for _ in range(32):
        gpu.must("cuMemsetD8Async", busy.address, 1, busy.bytes, stream)
    gpu.must("cuMemsetD8Async", block.address, 1, GRANULE, stream)
    return {
        "still at work": gpu.cuStreamQuery(stream),
        "unmap": gpu.cuMemUnmap(block.address, GRANULE),
        "synchronize": gpu.cuStreamSynchronize(stream),
    }
