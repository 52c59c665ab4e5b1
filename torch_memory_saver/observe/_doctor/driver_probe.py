"""Print what the CUDA driver says about the devices, as a line of JSON. The doctor starts this program.

A driver that crashes or hangs does so here, and the context that is made on each device ends with the process. Imports
nothing of the package. Its one argument is the driver's library. If a call fails, the object or device has a "problem".
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from typing import Any

_NO_DEVICE = 100
#: CUdevice_attribute, by the names in the output.
_CAPABILITIES = {"virtual_memory": 102, "exportable": 103, "rdma": 110, "dma_buf": 124}
_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN = 33, 34, 50
_NAME_BYTES = 256
_PINNED_ALLOCATION = _ON_DEVICE = 1
_MINIMUM_GRANULARITY = 0


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _CallError(Exception):
    """A driver call that failed. `result` is its CUresult."""

    def __init__(self, call: str, result: int, name: str) -> None:
        super().__init__(f"{call} failed with {name}")
        self.result = result


class _Driver:
    """The driver's functions. A failure is a _CallError."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise _CallError(name, -1, "no such function, because the driver is too old") from None
        result = int(function(*arguments))
        if result:
            raise _CallError(name.partition("_v")[0], result, self._name(result))

    def number(self, name: str, *arguments: Any) -> int:
        """Return the int that the function stores by its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def _name(self, result: int) -> str:
        text = ctypes.c_char_p()
        with contextlib.suppress(AttributeError):
            self._library.cuGetErrorName(result, ctypes.byref(text))
        return (text.value or str(result).encode()).decode()


def _capability(driver: _Driver, attribute: int, device: ctypes.c_int) -> bool:
    """Return whether the device has a capability. A driver that does not know the attribute lacks it."""
    try:
        return driver.number("cuDeviceGetAttribute", attribute, device) != 0
    except _CallError:
        return False


def _free_memory(driver: _Driver, device: ctypes.c_int) -> int:
    """Make a context, as every program does that uses the device."""
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver.call("cuCtxPushCurrent_v2", context)
    driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    driver.call("cuCtxPopCurrent_v2", ctypes.byref(context))
    driver.call("cuDevicePrimaryCtxRelease_v2", device)
    return free.value


def _describe(driver: _Driver, device: ctypes.c_int, row: dict[str, Any]) -> None:
    """Fill the row of one device, as far as the driver answers."""
    name, total, granularity = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuDeviceGetName", name, _NAME_BYTES, device)
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    row |= {"name": name.value.decode(errors="replace"), "total_bytes": total.value}
    row |= {key: _capability(driver, attribute, device) for key, attribute in _CAPABILITIES.items()}
    pci = [driver.number("cuDeviceGetAttribute", part, device) for part in (_PCI_DOMAIN, _PCI_BUS, _PCI_DEVICE)]
    row["pci"] = "{:04x}:{:02x}:{:02x}.0".format(*pci)
    if row["virtual_memory"]:
        properties = _AllocationProperties(_PINNED_ALLOCATION, 0, _ON_DEVICE, row["ordinal"])
        driver.call(
            "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), _MINIMUM_GRANULARITY
        )
        row["granularity_bytes"] = granularity.value
    row["free_bytes"] = _free_memory(driver, device)


def _devices(driver: _Driver) -> list[dict[str, Any]]:
    handles = [ctypes.c_int(driver.number("cuDeviceGet", i)) for i in range(driver.number("cuDeviceGetCount"))]
    rows: list[dict[str, Any]] = []
    for ordinal, device in enumerate(handles):
        row: dict[str, Any] = {"ordinal": ordinal, "problem": None}
        try:
            _describe(driver, device, row)
            others = [(number, peer) for number, peer in enumerate(handles) if number != ordinal]
            row["peers"] = [n for n, peer in others if driver.number("cuDeviceCanAccessPeer", device, peer)]
        except _CallError as error:
            row["problem"] = str(error)
        rows.append(row)
    return rows


def probe(library: str) -> dict[str, Any]:
    """Return the properties of the driver and its devices as plain data."""
    result: dict[str, Any] = {"problem": None, "cuda_version": None, "devices": []}
    try:
        driver = _Driver(library)
    except OSError as error:
        return result | {"problem": f"{library} could not be loaded: {error}", "loaded": False}
    result["loaded"] = True
    try:
        result["cuda_version"] = driver.number("cuDriverGetVersion")
        driver.call("cuInit", 0)
        result["devices"] = _devices(driver)
    except _CallError as error:
        if error.result != _NO_DEVICE:
            result["problem"] = str(error)
    return result


if __name__ == "__main__":
    print("\n" + json.dumps(probe(sys.argv[1])))
