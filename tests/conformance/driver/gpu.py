"""What a behaviour uses: the driver and the runtime through ctypes, with every result as a name.

Both libraries are called as a program would call them, by their exported symbols, so the same functions run on a real GPU
and on the simulated one (where one library is both: the variable TMS_CUDA_DRIVER names it).
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
#: Minimum granularity of the virtual memory management on every GPU this suite was recorded on.
GRANULE = 2 * MIB
READ_WRITE, READ_ONLY, NO_ACCESS = 3, 1, 0
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NON_BLOCKING = 1
DISABLE_TIMING = 2
HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)

#: Results by number; the runtime's are the driver's. Anything else is shown as its number.
RESULT_NAMES = {
    0: "SUCCESS", 1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 3: "NOT_INITIALIZED", 4: "DEINITIALIZED",
    17: "INVALID_DEVICE_POINTER", 21: "INVALID_COPY_DIRECTION", 35: "INSUFFICIENT_DRIVER", 100: "NO_DEVICE",
    46: "DEVICE_UNAVAILABLE", 101: "INVALID_DEVICE", 201: "INVALID_CONTEXT", 202: "CONTEXT_ALREADY_CURRENT",
    205: "MAP_FAILED", 206: "UNMAP_FAILED",
    208: "ALREADY_MAPPED", 211: "NOT_MAPPED", 217: "PEER_ACCESS_UNSUPPORTED", 304: "OPERATING_SYSTEM",
    400: "INVALID_HANDLE", 401: "ILLEGAL_STATE", 500: "NOT_FOUND", 600: "NOT_READY", 700: "ILLEGAL_ADDRESS",
    704: "PEER_ACCESS_ALREADY_ENABLED", 705: "PEER_ACCESS_NOT_ENABLED", 708: "PRIMARY_CONTEXT_ACTIVE",
    709: "CONTEXT_IS_DESTROYED", 712: "HOST_MEMORY_ALREADY_REGISTERED", 713: "HOST_MEMORY_NOT_REGISTERED",
    719: "LAUNCH_FAILED", 800: "NOT_PERMITTED", 801: "NOT_SUPPORTED", 900: "CAPTURE_UNSUPPORTED",
    901: "CAPTURE_INVALIDATED", 902: "CAPTURE_MERGE", 903: "CAPTURE_UNMATCHED", 904: "CAPTURE_UNJOINED",
    905: "CAPTURE_ISOLATION", 906: "CAPTURE_IMPLICIT", 907: "CAPTURED_EVENT", 908: "CAPTURE_WRONG_THREAD", 999: "UNKNOWN",
}  # fmt: skip

#: The functions that cuda.h renames. Others have a second version too (cuCtxSynchronize), which is another function.
VERSION_2 = {
    "cuCtxCreate", "cuCtxDestroy", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxReset",
    "cuDevicePrimaryCtxSetFlags", "cuDeviceTotalMem", "cuEventDestroy", "cuMemAlloc", "cuMemFree",
    "cuMemGetAddressRange", "cuMemGetInfo",
    "cuMemHostRegister", "cuMemcpyBatchAsync", "cuMemcpyDtoD", "cuMemcpyDtoDAsync", "cuMemcpyDtoH", "cuMemcpyDtoHAsync",
    "cuMemcpyHtoD", "cuMemcpyHtoDAsync", "cuMemsetD8", "cuStreamBeginCapture", "cuStreamDestroy",
}  # fmt: skip

#: The result of calling a function that the library does not have.
MISSING = "MISSING"


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [("order", ctypes.c_int), ("source", Location), ("target", Location), ("flags", ctypes.c_uint)]


class PointerAttributes(ctypes.Structure):
    """cudaPointerAttributes."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),
    ]


class IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


@dataclass(frozen=True)
class Block:
    """Physical memory mapped somewhere."""

    address: int
    handle: int
    bytes: int


def runtime_path() -> str:
    """The CUDA runtime as torch would load it, or of a toolkit."""
    patterns = [f"{folder}/nvidia/*/lib/libcudart.so.1*" for folder in sys.path if folder]
    patterns += ["/usr/local/cuda*/lib64/libcudart.so.1?", "/usr/local/cuda*/lib/libcudart.so.1?"]
    for pattern in patterns:
        found = sorted(glob.glob(pattern))
        if found:
            return found[-1]
    return "libcudart.so.13"


class Gpu:
    """Every function of the two libraries as a method that returns the result's name.

    Integers are passed as 64-bit values, None as NULL, ctypes objects by their address.
    """

    def __init__(self) -> None:
        simulated = os.environ.get("TMS_CUDA_DRIVER")
        self.simulated = bool(simulated)
        self._driver = ctypes.CDLL(simulated or "libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        self._runtime = self._driver if simulated else ctypes.CDLL(runtime_path(), mode=ctypes.RTLD_GLOBAL)

    def __getattr__(self, name: str) -> Callable[..., str]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return functools.partial(self.call, name)

    @functools.cache  # noqa: B019 (one object a process)
    def _function(self, name: str) -> Any:
        library = self._runtime if name.startswith("cuda") else self._driver
        function = getattr(library, f"{name}_v2" if name in VERSION_2 else name, None)
        if function is not None:
            function.restype = ctypes.c_int
        return function

    def call(self, name: str, *arguments: Any) -> str:
        function = self._function(name)
        if function is None:
            return MISSING
        code = function(*[_native(argument) for argument in arguments])
        return RESULT_NAMES.get(code, str(code))

    def call_with_handle(self, name: str, result: Any, handle: IpcHandle, flags: int) -> str:
        """A call that takes an IPC handle by value."""
        function = self._function(name)
        if function is None:
            return MISSING
        code = function(ctypes.byref(result), handle, ctypes.c_uint(flags))
        return RESULT_NAMES.get(code, str(code))

    def must(self, name: str, *arguments: Any) -> None:
        """A call that is not under observation."""
        result = self.call(name, *arguments)
        if result != "SUCCESS":
            raise RuntimeError(f"{name} failed: {result}")

    # What most behaviours begin with.

    def is_usable(self) -> bool:
        """Whether the context works, once the enqueued work has completed. Clears the runtime's last error."""
        usable = self.call("cuCtxSynchronize") == "SUCCESS"
        self.call("cudaGetLastError")
        return usable

    def start(self, device: int = 0) -> None:
        """The runtime creates the device's primary context, which is current."""
        self.must("cuInit", 0)
        self.must("cudaSetDevice", device)
        self.must("cudaFree", None)

    def reserve(self, size: int = GRANULE) -> int:
        address = ctypes.c_uint64()
        self.must("cuMemAddressReserve", address, size, 0, 0, 0)
        return address.value

    def create(self, size: int = GRANULE, **properties: int) -> int:
        handle = ctypes.c_uint64()
        self.must("cuMemCreate", handle, size, self.properties(**properties), 0)
        return handle.value

    def properties(self, device: int = 0, *, kind: int = 1, location: int = 1, handle_types: int = 0) -> Properties:
        return Properties(type=kind, handle_types=handle_types, location=Location(location, device))

    def access(self, device: int = 0, flags: int = READ_WRITE, location: int = 1) -> Access:
        return Access(location=Location(location, device), flags=flags)

    def allow(self, address: int, size: int = GRANULE, flags: int = READ_WRITE, device: int = 0) -> str:
        return self.call("cuMemSetAccess", address, size, self.access(device, flags), 1)

    def block(self, size: int = GRANULE, *, address: int | None = None, access: bool = True) -> Block:
        """Physical memory of device 0, mapped, with access by default."""
        block = Block(self.reserve(size) if address is None else address, self.create(size), size)
        self.must("cuMemMap", block.address, size, 0, block.handle, 0)
        if access and self.allow(block.address, size) != "SUCCESS":
            raise RuntimeError("cuMemSetAccess failed")
        return block

    def drop(self, block: Block, *, keep_address: bool = False) -> None:
        self.must("cuMemUnmap", block.address, block.bytes)
        self.must("cuMemRelease", block.handle)
        if not keep_address:
            self.must("cuMemAddressFree", block.address, block.bytes)

    def malloc(self, size: int = GRANULE) -> int:
        address = ctypes.c_uint64()
        self.must("cudaMalloc", address, size)
        return address.value

    def fill(self, address: int, value: int, size: int = 4096) -> str:
        """Sets bytes of device memory, and waits for it: a memset is work in flight."""
        result = self.call("cuMemsetD8", address, value, size)
        return self.call("cuStreamSynchronize", 0) if result == "SUCCESS" else result

    def put(self, address: int, value: int, size: int = 4096) -> None:
        """The same, in a step that is not under observation."""
        if (result := self.fill(address, value, size)) != "SUCCESS":
            raise RuntimeError(f"filling failed: {result}")

    def read(self, address: int, size: int = 4096) -> str:
        """The bytes at a device address, abbreviated, or the result of the call that failed to read them."""
        host = (ctypes.c_ubyte * size)()
        result = self.call("cuMemcpyDtoH", host, address, size)
        if result != "SUCCESS":
            return result
        return "bytes " + " ".join(f"{value:02x}" for value in sorted(set(host)))

    def batch(
        self,
        copies: Sequence[tuple[int, int, int]],
        stream: int,
        *,
        orders: Sequence[int] = (1,),
        first: Sequence[int] = (0,),
    ) -> str:
        """Copies of (target, source, bytes), with as many attributes as there are orders, each from its first copy on."""
        targets, sources, sizes = zip(*copies, strict=True) if copies else ((), (), ())
        addresses, lengths = ctypes.c_uint64 * max(1, len(copies)), ctypes.c_size_t * max(1, len(copies))
        attributes = (CopyAttributes * max(1, len(orders)))(*[CopyAttributes(order=order) for order in orders])
        indices = (ctypes.c_size_t * max(1, len(first)))(*first)
        arrays = (addresses(*targets), addresses(*sources), lengths(*sizes), len(copies), attributes, indices, len(orders))
        return self.call("cuMemcpyBatchAsync", *arrays, stream)

    def free_bytes(self) -> int:
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self.must("cuMemGetInfo", free, total)
        return free.value

    def total_bytes(self) -> int:
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self.must("cuMemGetInfo", free, total)
        return total.value

    def stream(self, flags: int = NON_BLOCKING) -> int:
        stream = ctypes.c_uint64()
        self.must("cuStreamCreate", stream, flags)
        return stream.value

    def event(self, flags: int = DISABLE_TIMING) -> int:
        event = ctypes.c_uint64()
        self.must("cuEventCreate", event, flags)
        return event.value

    def context(self) -> int:
        context = ctypes.c_uint64()
        self.must("cuCtxGetCurrent", context)
        return context.value

    def primary_active(self, device: int = 0) -> bool | str:
        flags, active = ctypes.c_uint(), ctypes.c_int()
        result = self.call("cuDevicePrimaryCtxGetState", device, flags, active)
        return bool(active.value) if result == "SUCCESS" else result

    def pages(self, size: int = MIB) -> Any:
        """Host memory that CUDA does not know, page-aligned; keep the object while its address is used."""
        buffer = (ctypes.c_ubyte * (size + 4096))()
        return (ctypes.c_ubyte * size).from_buffer(buffer, -ctypes.addressof(buffer) % 4096)

    def pinned(self, size: int = MIB) -> int:
        host = ctypes.c_uint64()
        self.must("cuMemHostAlloc", host, size, 0)
        return host.value

    def instantiate(self, graph: int) -> int:
        executable = ctypes.c_uint64()
        self.must("cuGraphInstantiateWithFlags", executable, graph, 0)
        return executable.value

    def capture(self, work: Callable[[int], None], mode: int = GLOBAL) -> tuple[int, int]:
        """A stream, and the executable graph of what `work` enqueued on it."""
        stream, graph = self.stream(), ctypes.c_uint64()
        self.must("cuStreamBeginCapture", stream, mode)
        work(stream)
        self.must("cuStreamEndCapture", stream, graph)
        return stream, self.instantiate(graph.value)

    def capture_status(self, stream: int) -> int | str:
        """0 none, 1 active, 2 invalidated; or the result of the call that failed to report it."""
        status = ctypes.c_int(-1)
        result = self.call("cuStreamIsCapturing", stream, status)
        return status.value if result == "SUCCESS" else result


def _native(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, int):
        return ctypes.c_uint64(argument & (2**64 - 1))
    return ctypes.byref(argument)
