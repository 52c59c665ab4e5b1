"""Allocations and frees by the core's own functions, in C loops (bare_driver.c): without PyTorch, and without Python's time.

The allocations get the settings of the region that the calling thread is in.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence

from .driver import DriverFailure
from .savers import Unavailable
from .yardstick import NoYardstick, open_driver

__all__ = ["CoreCalls"]

#: Versions of the function table that are tried. `allocate` and `free` have the same place in all of them.
_API_VERSIONS = range(1, 16)
_NANOSECONDS = 1e9


class _TableHead(ctypes.Structure):
    """The first members of tms_api_t."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("allocate", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


def _core_functions() -> tuple[int, int]:
    """The addresses of the core's `allocate` and `free`."""
    core = importlib.import_module("torch_memory_saver._core")
    get_api = ctypes.CDLL(core.library_path).tms_get_api
    get_api.restype = ctypes.POINTER(_TableHead)
    for version in _API_VERSIONS:
        table = get_api(ctypes.c_uint32(version))
        if table:
            return table.contents.allocate, table.contents.free
    raise DriverFailure("the benchmark does not know the version of the core's function table: build the package again")


class CoreCalls:
    """Times are in seconds, of a whole loop. Makes the primary context of the device current.

    Raises:
        Unavailable: The loops cannot be compiled.
        DriverFailure: A call failed; so do the methods.
    """

    def __init__(self, ordinal: int) -> None:
        try:
            self._library = open_driver(ordinal)
        except NoYardstick as error:
            raise Unavailable(str(error)) from error
        self._allocate, self._free = _core_functions()

    def allocate(self, count: int, size: int) -> tuple[list[int], float]:
        """The addresses of `count` new allocations of `size` bytes on the current device, and the time."""
        addresses, spent = (ctypes.c_uint64 * count)(), ctypes.c_uint64()
        self._check("allocate", self._library.core_allocate(self._allocate, count, size, addresses, ctypes.byref(spent)))
        return list(addresses), spent.value / _NANOSECONDS

    def free(self, addresses: Sequence[int]) -> float:
        """Frees allocations. Returns the time, in which the core waits for the devices at each."""
        given, spent = (ctypes.c_uint64 * len(addresses))(*addresses), ctypes.c_uint64()
        self._check("free", self._library.core_free(self._free, len(addresses), given, ctypes.byref(spent)))
        return spent.value / _NANOSECONDS

    def allocate_and_free(self, count: int, size: int) -> tuple[float, float]:
        """The time of `count` allocations, and of their frees."""
        addresses, allocated = self.allocate(count, size)
        return allocated, self.free(addresses)

    def bare_allocate_and_free(self, count: int, size: int) -> tuple[float, float]:
        """The same by the driver alone, which does not wait at a free."""
        allocated, freed = ctypes.c_uint64(), ctypes.c_uint64()
        result = self._library.bare_allocate_and_free(count, size, ctypes.byref(allocated), ctypes.byref(freed))
        self._check("bare_allocate_and_free", result)
        return allocated.value / _NANOSECONDS, freed.value / _NANOSECONDS

    @staticmethod
    def _check(name: str, result: int) -> None:
        if result != 0:
            raise DriverFailure(f"the loop {name} failed with {result}")
