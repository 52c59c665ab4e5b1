"""The limits that the hardware sets: one pinned copy of all bytes, and the driver calls alone in C loops (bare_driver.c).

They use the CUDA driver through ctypes, on one device.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["BareAllocations", "CoreCalls", "Device", "DriverFailure", "NoCompiler", "PinnedCopy", "call", "use_memory"]

_SOURCE = Path(__file__).with_name("bare_driver.c")
_COMPILERS = ("gcc", "cc", "clang")
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread", "-w")

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = 0x22
_REGISTER_PORTABLE = 1
_MAX_THREADS = 16
#: The most threads that prefault the new host memory of a bare first pause: as many as the library uses.
_MAX_THREADS_OF_FIRST_PAUSE = 15
_NANOSECONDS = 1e9
#: Bytes that one thread prefaults at a time.
_TOUCHED_BYTES = 32 << 20
#: How many bytes use_memory takes at a time, and how long it waits for the system to have more.
_STEP_BYTES = 1 << 30
_GROWING_S = 5.0


class DriverFailure(Exception):
    """A call of the driver, or of the system, failed."""


class NoCompiler(Exception):
    """The C loops cannot be compiled: there is no C compiler, or it failed."""


def _driver_name() -> str:
    """Return the name or the path of the driver's library."""
    return os.environ.get("TMS_CUDA_DRIVER") or "libcuda.so.1"


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_driver_name())
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


def _prefault(address: int, size: int) -> None:
    """Writes to `size` bytes with several threads."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
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
        _prefault(ctypes.addressof(view), _STEP_BYTES)


def _has_room() -> bool:
    """Whether the system has memory to spare. Waits a moment for it: some virtual machines grow as memory is used."""
    deadline = time.monotonic() + _GROWING_S
    while True:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")), 0)
        if available >= 2 * _STEP_BYTES or time.monotonic() > deadline:
            return available >= 2 * _STEP_BYTES
        time.sleep(_GROWING_S / 50)


class HostMemory:
    """Host memory in an anonymous mapping with huge pages, prefaulted by several threads and pinned in one piece.

    Raises:
        DriverFailure: The system has too little memory, or the driver does not register it.
    """

    def __init__(self, size: int) -> None:
        self._mapped = size + _HUGE_PAGE
        base = _libc().mmap(None, self._mapped, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise DriverFailure(f"{size} bytes of host memory could not be mapped: {os.strerror(ctypes.get_errno())}")
        self._base = int(base)
        self.address = -(-self._base // _HUGE_PAGE) * _HUGE_PAGE
        _libc().madvise(self.address, size, _MADV_HUGEPAGE)  # Only advice: without huge pages everything is slower.
        _prefault(self.address, size)
        call("cuMemHostRegister_v2", ctypes.c_void_p(self.address), ctypes.c_size_t(size), _REGISTER_PORTABLE)
        self.is_open = True

    def close(self) -> None:
        """Unregisters and unmaps the memory. Does nothing the second time."""
        if self.is_open:
            call("cuMemHostUnregister", ctypes.c_void_p(self.address))
            _libc().munmap(self._base, self._mapped)
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

    def copy_out(self, host: HostMemory, address: int, size: int) -> None:
        """Copies from the device to pinned memory."""
        self.make_current()
        target, source = ctypes.c_void_p(host.address), ctypes.c_uint64(address)
        call("cuMemcpyDtoHAsync_v2", target, source, ctypes.c_size_t(size), self._stream)
        call("cuStreamSynchronize", self._stream)

    def copy_back(self, host: HostMemory, address: int, size: int) -> None:
        """Copies from pinned memory to the device."""
        self.make_current()
        target, source = ctypes.c_uint64(address), ctypes.c_void_p(host.address)
        call("cuMemcpyHtoDAsync_v2", target, source, ctypes.c_size_t(size), self._stream)
        call("cuStreamSynchronize", self._stream)


class PinnedCopy:
    """One copy of `size` bytes to pinned host memory and back: the limit that the bus sets.

    Raises:
        DriverFailure: The device or the host has too little memory.
    """

    name = "one pinned copy"

    def __init__(self, device: Device, size: int) -> None:
        self._device, self.size = device, size
        self._address = device.allocate(size)
        device.fill(self._address, size, 1)
        self.host = HostMemory(size)

    def out(self) -> None:
        self._device.copy_out(self.host, self._address, self.size)

    def back(self) -> None:
        self._device.copy_back(self.host, self._address, self.size)

    def back_and_release(self) -> None:
        """Copies back, and then releases the host memory."""
        self.back()
        self.host.close()

    def close(self) -> None:
        """Releases the device memory and the host memory."""
        self.host.close()
        self._device.free(self._address)


@functools.cache
def _compiled() -> ctypes.CDLL:
    """The functions of bare_driver.c, compiled by the compiler that CC names or else by the first one found.

    Raises:
        NoCompiler: There is no compiler, or it failed.
    """
    requested = shlex.split(os.environ.get("CC", ""))
    compiler = requested or [path for path in map(shutil.which, _COMPILERS) if path is not None][:1]
    if not compiler:
        raise NoCompiler(f"there is no C compiler: install one of {', '.join(_COMPILERS)}, or set CC")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "bare_driver.so")
        command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(library), "-ldl"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise NoCompiler(f"the C compiler {compiler[0]} could not be started: {error.strerror}") from error
        if done.returncode != 0:
            raise NoCompiler(f"{compiler[0]} failed:\n{done.stderr.strip()}")
        loaded = ctypes.CDLL(str(library))
    size, words = ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64)
    loaded.bare_open.argtypes = [ctypes.c_char_p, ctypes.c_int]
    loaded.bare_make.argtypes = [size, size, size]
    loaded.bare_address.argtypes, loaded.bare_address.restype = [size], ctypes.c_uint64
    loaded.bare_pause_with_contents.argtypes = loaded.bare_resume_with_contents.argtypes = [ctypes.c_void_p]
    loaded.bare_allocate_and_free.argtypes = [size, size, words, words]
    loaded.core_allocate.argtypes = [ctypes.c_void_p, size, size, words, words]
    loaded.core_free.argtypes = [ctypes.c_void_p, size, words, words]
    return loaded


def _opened(ordinal: int) -> ctypes.CDLL:
    """The compiled functions, ready for use on a device, whose primary context becomes the current one.

    Raises:
        NoCompiler: The functions cannot be compiled.
        DriverFailure: A driver call failed.
    """
    library = _compiled()
    _check("bare_open", library.bare_open(_driver_name().encode(), ordinal))
    return library


def _check(name: str, result: int) -> None:
    if result != 0:
        raise DriverFailure(f"{name} of bare_driver.c failed with {result}")


class BareAllocations:
    """Address ranges that hold `total` bytes in handles of `size` bytes, resumed and paused by the driver calls alone. They
    start paused. The last handle is as large as the rest needs.

    Raises:
        NoCompiler: The functions cannot be compiled.
        DriverFailure: A driver call failed.
    """

    def __init__(self, total: int, size: int, ordinal: int = 0) -> None:
        self._library = _opened(ordinal)
        count = -(-total // size)
        last = total - (count - 1) * size
        self._call("bare_make", count, size, last)
        sizes = [size] * (count - 1) + [last]
        #: The address and the size of each range.
        self.blocks = [(self._library.bare_address(index), bytes) for index, bytes in enumerate(sizes)]

    def _call(self, name: str, *arguments: int) -> None:
        _check(name, getattr(self._library, name)(*arguments))

    def resume(self) -> None:
        self._call("bare_resume")

    def pause(self) -> None:
        self._call("bare_pause")

    def resume_with_contents(self, host: int) -> None:
        """Resumes, and copies from pinned memory at address `host`, which has as many bytes as all ranges together."""
        self._call("bare_resume_with_contents", host)

    def pause_with_contents(self, host: int) -> None:
        self._call("bare_pause_with_contents", host)

    def first_pause(self) -> None:
        """Pauses with copies to new host memory, which is kept until forget_host."""
        processors = len(os.sched_getaffinity(0))
        self._call("bare_first_pause", min(_MAX_THREADS_OF_FIRST_PAUSE, max(1, processors - 1)))

    def forget_host(self) -> None:
        self._call("bare_forget_host")

    def close(self) -> None:
        """Frees the address ranges. They must be paused."""
        self._call("bare_unmake")


class _TableHead(ctypes.Structure):
    """The first members of tms_api_t."""

    _fields_ = (
        ("allocate", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


class CoreCalls:
    """Allocations and frees in C loops: by the core's own functions with the settings of the current region, and by the
    driver alone. Times are in seconds, of a whole loop.

    Raises:
        NoCompiler: The loops cannot be compiled.
        DriverFailure: A call failed; so do the methods.
    """

    def __init__(self, ordinal: int) -> None:
        self._library = _opened(ordinal)
        core = importlib.import_module("torch_memory_saver._core")
        get_api = ctypes.CDLL(core.library_path).tms_get_api
        get_api.restype = ctypes.POINTER(_TableHead)
        head = get_api(ctypes.c_uint32(core.INTERFACE)).contents
        self._allocate, self._free = head.allocate, head.free

    def core(self, count: int, size: int) -> tuple[float, float]:
        """Time `count` allocations through the core, and their frees, each of which waits for the devices."""
        addresses, allocated, freed = (ctypes.c_uint64 * count)(), ctypes.c_uint64(), ctypes.c_uint64()
        made = self._library.core_allocate(self._allocate, count, size, addresses, ctypes.byref(allocated))
        _check("core_allocate", made)
        _check("core_free", self._library.core_free(self._free, count, addresses, ctypes.byref(freed)))
        return allocated.value / _NANOSECONDS, freed.value / _NANOSECONDS

    def bare(self, count: int, size: int) -> tuple[float, float]:
        """Time `count` allocations by the driver alone, and their frees, which do not wait."""
        allocated, freed = ctypes.c_uint64(), ctypes.c_uint64()
        result = self._library.bare_allocate_and_free(count, size, ctypes.byref(allocated), ctypes.byref(freed))
        _check("bare_allocate_and_free", result)
        return allocated.value / _NANOSECONDS, freed.value / _NANOSECONDS
