"""The CUDA driver through ctypes: measures limits, and fills and reads device memory.

The limit of a backup in host memory is one pinned copy of all bytes. Every process makes the host memory of that copy anew,
so it is made as fast as possible: an anonymous mapping with huge pages, prefaulted by several threads, registered in one
piece.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = [
    "Device",
    "DriverFailure",
    "HostMemory",
    "OrdinaryMemory",
    "PinnedCopy",
    "call",
    "driver_name",
    "touch",
    "use_memory",
]

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = 0x22
_REGISTER_PORTABLE = 1
_MOST_THREADS = 16
#: Bytes that one thread prefaults at a time.
_TOUCHED_BYTES = 32 << 20
#: How many bytes use_memory takes at a time, and how long it waits for the system to have more.
_STEP_BYTES = 1 << 30
_GROWING_S = 5.0


class DriverFailure(Exception):
    """A call of the driver, or of the system, failed."""


def driver_name() -> str:
    """The name or the path of the driver's library."""
    return os.environ.get("TMS_CUDA_DRIVER") or "libcuda.so.1"


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(driver_name())
    except OSError as error:
        raise DriverFailure(f"the CUDA driver could not be loaded: {error}") from error


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver.

    Raises:
        DriverFailure: The function failed.
    """
    result = getattr(_driver(), name)(*arguments)
    if result != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(text))
        raise DriverFailure(f"{name} failed with {text.value.decode() if text.value else result}")


def touch(address: int, size: int) -> None:
    """Prefaults `size` bytes by writing to them with several threads."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    pieces = range(address, address + size, _TOUCHED_BYTES)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda piece: ctypes.memset(piece, 1, min(_TOUCHED_BYTES, address + size - piece)), pieces))


def use_memory(size: int) -> None:
    """Maps and prefaults `size` bytes step by step, and then releases them. Stops early if too little memory is left."""
    held = []
    for _ in range(0, size, _STEP_BYTES):
        if not _has_room():
            break
        held.append(mmap.mmap(-1, _STEP_BYTES))
        view = ctypes.c_char.from_buffer(held[-1])
        touch(ctypes.addressof(view), _STEP_BYTES)


def _has_room() -> bool:
    """Whether the system has memory to spare. Waits a moment for it: some virtual machines grow as memory is used."""
    deadline = time.monotonic() + _GROWING_S
    while True:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")), 0)
        if available >= 2 * _STEP_BYTES or time.monotonic() > deadline:
            return available >= 2 * _STEP_BYTES
        time.sleep(_GROWING_S / 50)


class OrdinaryMemory:
    """Pageable memory: an anonymous mapping, with huge pages if the system has them when it is prefaulted.

    Raises:
        DriverFailure: The system has too little memory.
    """

    def __init__(self, size: int) -> None:
        self.bytes = size
        self._mapped = size + _HUGE_PAGE
        base = _libc().mmap(None, self._mapped, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise DriverFailure(f"{size} bytes of host memory could not be mapped: {os.strerror(ctypes.get_errno())}")
        self._base = int(base)
        self.address = -(-self._base // _HUGE_PAGE) * _HUGE_PAGE
        _libc().madvise(self.address, size, _MADV_HUGEPAGE)  # Only advice: without huge pages everything is slower.

    def close(self) -> None:
        _libc().munmap(self._base, self._mapped)


class HostMemory(OrdinaryMemory):
    """Memory that is prefaulted and pinned.

    Args:
        size: Bytes.
        piece: Bytes of each registration. None: one registration for all.

    Raises:
        DriverFailure: The system has too little memory, or the driver does not register it.
    """

    def __init__(self, size: int, piece: int | None = None) -> None:
        super().__init__(size)
        touch(self.address, size)
        self.is_open = True
        self._registered: list[int] = []
        self._piece = piece or size
        for start in range(self.address, self.address + size, self._piece):
            length = min(self._piece, self.address + size - start)
            call("cuMemHostRegister_v2", ctypes.c_void_p(start), ctypes.c_size_t(length), _REGISTER_PORTABLE)
            self._registered.append(start)

    def pieces(self) -> list[tuple[int, int]]:
        """The offset and the length of each registration in bytes. A copy must stay within one registration."""
        starts = range(0, self.bytes, self._piece)
        return [(start, min(self._piece, self.bytes - start)) for start in starts]

    def close(self) -> None:
        """Unregisters and unmaps the memory."""
        while self._registered:
            call("cuMemHostUnregister", ctypes.c_void_p(self._registered.pop()))
        super().close()
        self.is_open = False


class Device:
    """A device whose primary context is current on this thread.

    Raises:
        DriverFailure: There is no device of that number.
    """

    def __init__(self, ordinal: int = 0) -> None:
        call("cuInit", 0)
        device = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.ordinal = ordinal
        self._context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.make_current()
        self._stream = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(self._stream), 1)

    @staticmethod
    def count() -> int:
        count = ctypes.c_int()
        call("cuInit", 0)
        call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def make_current(self) -> None:
        call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        self.make_current()
        call("cuCtxSynchronize")

    def memory(self) -> tuple[int, int]:
        """The free and the total bytes of the device."""
        self.make_current()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        call("cuDeviceGetName", text, len(text), self.ordinal)
        return text.value.decode(errors="replace")

    def allocate(self, size: int) -> int:
        """Allocates `size` bytes of ordinary device memory. Returns the address."""
        self.make_current()
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address: int, size: int, value: int) -> None:
        self.make_current()
        call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size))

    def read(self, address: int, size: int) -> bytes:
        self.make_current()
        host = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoH_v2", host, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return host.raw

    def start_copy_out(self, host: HostMemory, address: int) -> None:
        """Starts the copies from the device to the host, one for each registration."""
        for offset, length in host.pieces():
            target, source = ctypes.c_void_p(host.address + offset), ctypes.c_uint64(address + offset)
            call("cuMemcpyDtoHAsync_v2", target, source, ctypes.c_size_t(length), self._stream)

    def start_copy_back(self, host: HostMemory, address: int) -> None:
        """Starts the copies from the host to the device, one for each registration."""
        for offset, length in host.pieces():
            target, source = ctypes.c_uint64(address + offset), ctypes.c_void_p(host.address + offset)
            call("cuMemcpyHtoDAsync_v2", target, source, ctypes.c_size_t(length), self._stream)

    def start_piece_out(self, target: int, source: int, size: int, event: ctypes.c_void_p) -> None:
        """Starts one copy from the device to pinned memory and records the event after it. The context must be current."""
        call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(size), self._stream)
        call("cuEventRecord", event, self._stream)

    def start_piece_back(self, target: int, source: int, size: int, event: ctypes.c_void_p) -> None:
        call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(size), self._stream)
        call("cuEventRecord", event, self._stream)

    def wait_for_copies(self) -> None:
        call("cuStreamSynchronize", self._stream)


class PinnedCopy:
    """One copy of `size` bytes to pinned host memory and back: the limit that the bus sets.

    Raises:
        DriverFailure: The device or the host has too little memory.
    """

    name = "one pinned copy"

    def __init__(self, device: Device, size: int, piece: int | None = None) -> None:
        self._device = device
        self._address = device.allocate(size)
        device.fill(self._address, size, 1)
        self.host = HostMemory(size, piece)

    def start_out(self) -> None:
        self._device.make_current()
        self._device.start_copy_out(self.host, self._address)

    def start_back(self) -> None:
        self._device.make_current()
        self._device.start_copy_back(self.host, self._address)

    def wait(self) -> None:
        self._device.make_current()
        self._device.wait_for_copies()

    def out(self) -> None:
        self.start_out()
        self.wait()

    def back(self) -> None:
        self.start_back()
        self.wait()

    def back_and_release(self) -> None:
        """Copies back, and then releases the host memory."""
        self.back()
        self.host.close()

    def close(self) -> None:
        """Releases the device memory, and the host memory unless back_and_release has released it already."""
        if self.host.is_open:
            self.host.close()
        self._device.free(self._address)
