"""The simulated GPU as the model's tests use it: its control functions, and memory compared in place.

Device addresses of the simulated GPU are host addresses. Reads and writes access the memory itself; paused memory must not
be accessed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MIB = 1 << 20
GRANULARITY = 2 * MIB
READ_ONLY, READ_WRITE = 1, 3  # CUmemAccess_flags
#: Each a pair of CUpointer_attribute: the start and the size.
RESERVATION = (11, 12)
MAPPING = (19, 18)
POISON = 0xA5

OUT_OF_MEMORY = 2  # CUresult numbers
OPERATING_SYSTEM = 304
UNKNOWN = 999

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Span(NamedTuple):
    """Addresses."""

    address: int
    bytes: int


class Usage(ctypes.Structure):
    """tms_sim_usage_t."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("physical_bytes", "handles", "mappings", "reservations", "host_bytes", "streams", "runtime_allocations")
    ]


def holds(address: int, data: bytes) -> bool:
    """Whether the memory at the address holds exactly these bytes."""
    return _libc.memcmp(address, data, len(data)) == 0


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def first_difference(address: int, data: bytes) -> str:
    """For a message: where the memory differs from what it should hold."""
    found = ctypes.string_at(address, len(data))
    wrong = [index for index in range(len(data)) if found[index] != data[index]]
    if not wrong:
        return "no byte differs any more"
    first = wrong[0]
    return f"{len(wrong)} of {len(data)} bytes differ, the first at {first}: {found[first]:#x}, should be {data[first]:#x}"


class Machine:
    """The simulated machine of this process."""

    def __init__(self, path: str | None = None) -> None:
        self.library: Any = ctypes.CDLL(path or os.environ["TMS_CUDA_DRIVER"])
        for name, result, arguments in (
            ("fail_after", ctypes.c_int, (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)),
            ("failures_fired", ctypes.c_uint64, ()),
            ("calls", ctypes.c_uint64, (ctypes.c_char_p,)),
            ("clear_counts", None, ()),
            ("usage", None, (ctypes.c_int, ctypes.POINTER(Usage))),
            ("take_memory", ctypes.c_int, (ctypes.c_int, ctypes.c_int64)),
            ("launch_add", ctypes.c_int, (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)),
            ("open_gate", None, (ctypes.c_int,)),
            ("wait_until_synchronizing", None, ()),
            ("set_bandwidth", None, (ctypes.c_uint64,)),
        ):
            function = getattr(self.library, f"tms_sim_{name}")
            function.restype, function.argtypes = result, arguments
        # Of new memory the model knows every byte, large allocations included.
        self.library.tms_sim_set_poison_limit(ctypes.c_uint64(64 * MIB))
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._next_gate = 1_000_000  # above what other tests of this process use
        self.taken = {0: 0, 1: 0}

    def usage(self, device: int) -> Any:
        usage = Usage()
        self.library.tms_sim_usage(device, ctypes.byref(usage))
        return usage

    def fail(self, call: str, succeed: int, times: int, code: int) -> None:
        """Lets `call` succeed `succeed` times, then fail `times` times. `times` 0: never."""
        assert self.library.tms_sim_fail_after(call.encode(), succeed, times, code) == 0, call

    def fired(self) -> int:
        return int(self.library.tms_sim_failures_fired())

    def take(self, device: int, size: int) -> None:
        """`size` bytes are another process's from now on; a negative size releases them."""
        assert self.library.tms_sim_take_memory(device, size) == 0
        self.taken[device] += size

    @contextlib.contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The device's primary context is this thread's current one inside."""
        if device not in self._contexts:
            assert self.library.cuInit(0) == 0
            context = ctypes.c_void_p()
            assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
            self._contexts[device] = context
        assert self.library.cuCtxPushCurrent_v2(self._contexts[device]) == 0
        try:
            yield
        finally:
            assert self.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())) == 0

    def current_context(self) -> int | None:
        """Of this thread."""
        context = ctypes.c_void_p()
        assert self.library.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value

    def add(self, device: int, address: int, size: int, value: int, *, gate: int = 0) -> None:
        """A kernel that adds `value` to each byte; it runs when the gate is opened, at once if there is none."""
        with self.context(device):
            assert self.library.tms_sim_launch_add(None, address, size, value, gate) == 0

    def synchronize(self, device: int) -> None:
        with self.context(device):
            assert self.library.cuCtxSynchronize() == 0

    def access(self, device: int, address: int) -> int:
        """Return the access flags of the device at this address."""
        location, flags = (ctypes.c_int * 2)(1, device), ctypes.c_uint64()
        self.library.cuMemGetAccess(ctypes.byref(flags), location, ctypes.c_uint64(address))
        return flags.value

    def is_guarded(self, device: int, address: int) -> bool:
        """Whether the device may read, and not write, at this address."""
        return self.access(device, address) == READ_ONLY

    def devices(self) -> int:
        """Return the number of simulated devices."""
        count = ctypes.c_int()
        assert self.library.cuInit(0) == 0
        assert self.library.cuDeviceGetCount(ctypes.byref(count)) == 0
        return count.value

    def reset(self, device: int) -> None:
        """End the use of a device by this process. The context of the device is destroyed."""
        if self._contexts.pop(device, None) is not None:
            assert self.library.cuDevicePrimaryCtxReset_v2(device) == 0

    def set_bandwidth(self, bytes_per_second: int) -> None:
        """Set the speed of copies that begin from now on. With 0, copies are as fast as the host."""
        self.library.tms_sim_set_bandwidth(bytes_per_second)

    def mapping(self, address: int) -> Span:
        """What is mapped with this address: a handle, whole."""
        return self._span(MAPPING, address)

    def reservation(self, address: int) -> Span:
        """What was reserved with this address, at which memory is mapped."""
        return self._span(RESERVATION, address)

    def _span(self, attributes: tuple[int, int], address: int) -> Span:
        found = []
        for attribute in attributes:
            value = ctypes.c_uint64()
            result = self.library.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address))
            assert result == 0, f"attribute {attribute} of {address:#x}: {result}"
            found.append(value.value)
        return Span(*found)

    def new_gate(self) -> int:
        self._next_gate += 1
        return self._next_gate

    def open(self, gate: int) -> None:
        self.library.tms_sim_open_gate(gate)

    def wait_until_synchronizing(self) -> None:
        self.library.tms_sim_wait_until_synchronizing()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Polls until the condition is true."""
        while not condition():
            time.sleep(0)

    def calls(self, call: str) -> int:
        return int(self.library.tms_sim_calls(call.encode()))

    def clear_counts(self) -> None:
        self.library.tms_sim_clear_counts()
