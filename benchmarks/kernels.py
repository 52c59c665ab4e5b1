"""The fingerprint kernel alone, and a kernel that only reads device memory: the limits of a pause that finds out what has
changed. They use the CUDA driver through ctypes."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

from limits import Device, DriverFailure, HostMemory, call

__all__ = ["CHUNK", "DeviceRead", "Fingerprints", "device_read"]

_FOLDER = Path(__file__).resolve().parent
_FINGERPRINT = _FOLDER.parent / "csrc" / "kernels" / "fingerprint.ptx"
_READ = _FOLDER / "device_read.ptx"
#: As in csrc/include/tms_fingerprint.h: bytes of a chunk; chunks and threads of a block; bytes of the key.
CHUNK = 512 << 10
_GROUP, _THREADS = 4, 256
_KEY_BYTES = (CHUNK // 16 + 3) * 16 + 4 * 9 * 8
_ROW_BYTES = 16
#: Blocks of the reading kernel for each multiprocessor.
_BLOCKS_EACH = 8
_ATTRIBUTE_MULTIPROCESSORS = 16


class _Kernel:
    """A kernel of a module of its own.

    Raises:
        DriverFailure: The module cannot be loaded, for instance on the simulated GPU, which knows one kernel only.
    """

    def __init__(self, device: Device, ptx: Path, name: str) -> None:
        self._device, self.module, self._function = device, ctypes.c_void_p(), ctypes.c_void_p()
        device.make_current()
        call("cuModuleLoadData", ctypes.byref(self.module), ctypes.c_char_p(ptx.read_bytes()))
        call("cuModuleGetFunction", ctypes.byref(self._function), self.module, ctypes.c_char_p(name.encode()))

    def run(self, blocks: int, *arguments: ctypes.c_uint32 | ctypes.c_uint64) -> None:
        """Launches the kernel in the legacy stream, and waits for it."""
        self._device.make_current()
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        shape = map(ctypes.c_uint, (blocks, 1, 1, _THREADS, 1, 1, 0))
        call("cuLaunchKernel", self._function, *shape, None, pointers, None)
        call("cuCtxSynchronize")


class Fingerprints:
    """The fingerprints of blocks of device memory, by one launch of the kernel.

    Args:
        blocks: Address and bytes of each.
    """

    name = "the fingerprint kernel"

    def __init__(self, device: Device, blocks: list[tuple[int, int]]) -> None:
        self._kernel = _Kernel(device, _FINGERPRINT, "tms_fingerprint")
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        name = ctypes.c_char_p(b"tms_fingerprint_key")
        call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), self._kernel.module, name)
        key = random.Random(0).randbytes(_KEY_BYTES)
        call("cuMemcpyHtoD_v2", address, ctypes.c_char_p(key), ctypes.c_size_t(_KEY_BYTES))
        rows = [(start + at, min(CHUNK, bytes - at)) for start, bytes in blocks for at in range(0, bytes, CHUNK)]
        self._count = len(rows)
        self._host = HostMemory(2 * _ROW_BYTES * self._count)
        table = (ctypes.c_uint64 * (2 * self._count)).from_address(self._host.address)
        table[:] = [number for row in rows for number in row]

    def run(self) -> None:
        chunks, results = self._host.address, self._host.address + _ROW_BYTES * self._count
        blocks = -(-self._count // _GROUP)
        self._kernel.run(blocks, ctypes.c_uint64(chunks), ctypes.c_uint32(self._count), ctypes.c_uint64(results))

    def close(self) -> None:
        self._host.close()


class DeviceRead:
    """A kernel that reads `size` bytes of its own device memory, and does nothing else.

    Raises:
        DriverFailure: The kernel cannot be loaded, or the device has too little memory.
    """

    name = "a kernel that only reads"

    def __init__(self, device: Device, size: int) -> None:
        self._kernel = _Kernel(device, _READ, "device_read")
        self._device, self._size = device, size
        self._address = device.allocate(size)
        device.fill(self._address, size, 1)
        count = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(count), _ATTRIBUTE_MULTIPROCESSORS, device.ordinal)
        self._blocks = _BLOCKS_EACH * count.value

    def run(self) -> None:
        address = ctypes.c_uint64(self._address)
        self._kernel.run(self._blocks, address, ctypes.c_uint64(self._size // 16), address)

    def close(self) -> None:
        self._device.free(self._address)


def device_read(device: Device, size: int) -> tuple[DeviceRead | None, str]:
    """The kernel that only reads, and its name. None where it cannot run; then the text says why."""
    try:
        return DeviceRead(device, size), DeviceRead.name
    except DriverFailure as error:
        return None, f"no limit: {error}"
