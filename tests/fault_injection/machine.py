"""Controls of a worker: the simulated GPU and the interposer of the C library, and one record of the calls to both."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DRIVER, LIBC = "driver", "libc"

OUT_OF_MEMORY, OPERATING_SYSTEM, LAUNCH_FAILED, CAPTURE_UNSUPPORTED, NO_DEVICE = 2, 304, 719, 900, 100

#: Errors that a function can really return, the plainest first. Others fail with CUDA_ERROR_OPERATING_SYSTEM.
DRIVER_CODES: dict[str, tuple[int, ...]] = {
    "cuInit": (NO_DEVICE, OPERATING_SYSTEM),
    "cuMemCreate": (OUT_OF_MEMORY, OPERATING_SYSTEM),
    "cuMemHostRegister": (OUT_OF_MEMORY, OPERATING_SYSTEM),
    "cuMemAddressReserve": (OUT_OF_MEMORY, OPERATING_SYSTEM),
    "cuMemMap": (OPERATING_SYSTEM, OUT_OF_MEMORY),
    "cuMemSetAccess": (OPERATING_SYSTEM, OUT_OF_MEMORY),
    "cuStreamCreate": (OUT_OF_MEMORY, OPERATING_SYSTEM),
    "cuEventCreate": (OUT_OF_MEMORY, OPERATING_SYSTEM),
    "cuDevicePrimaryCtxRetain": (OUT_OF_MEMORY, OPERATING_SYSTEM),
    "cuCtxSynchronize": (OPERATING_SYSTEM, LAUNCH_FAILED, CAPTURE_UNSUPPORTED),
    "cuStreamSynchronize": (OPERATING_SYSTEM, LAUNCH_FAILED),
    "cuMemcpyDtoHAsync": (OPERATING_SYSTEM, LAUNCH_FAILED),
    "cuMemcpyHtoDAsync": (OPERATING_SYSTEM, LAUNCH_FAILED),
    "cuMemcpyBatchAsync": (OPERATING_SYSTEM, LAUNCH_FAILED),
}
LIBC_CODES: dict[str, tuple[int, ...]] = {
    "malloc": (errno.ENOMEM,),
    "calloc": (errno.ENOMEM,),
    "realloc": (errno.ENOMEM,),
    "strdup": (errno.ENOMEM,),
    "mmap": (errno.ENOMEM,),
    "munmap": (errno.ENOMEM,),
    "madvise": (errno.EINVAL,),
    "mincore": (errno.EAGAIN,),
    "syscall": (errno.EPERM, errno.EINTR, errno.EAGAIN),
    "sched_getaffinity": (errno.EINVAL,),
    "fopen": (errno.EMFILE,),
    "open_of_system": (errno.EMFILE, errno.EACCES),
    "read": (errno.EIO, errno.EINTR),
    "open": (errno.EMFILE, errno.EACCES),
    "openat": (errno.EMFILE, errno.EACCES),
    "close": (errno.EIO, errno.EINTR),
    "mkdirat": (errno.EACCES, errno.ENOSPC),
    "fcntl": (errno.EMFILE,),
    "flock": (errno.ENOLCK, errno.EWOULDBLOCK),
    "fchmod": (errno.EPERM,),
    "readlinkat": (errno.EIO,),
    "fallocate": (errno.ENOSPC, errno.EINTR, errno.EOPNOTSUPP),
    "posix_fallocate": (errno.ENOSPC, errno.EINTR),
    "ftruncate": (errno.EIO,),
    "pread": (errno.EIO, errno.EINTR),
    "pwrite": (errno.ENOSPC, errno.EIO, errno.EINTR),
    "fsync": (errno.EIO,),
    "futimens": (errno.EROFS,),
    "fdopendir": (errno.ENOMEM,),
    "getrandom": (errno.EAGAIN,),
    "pthread_create": (errno.EAGAIN,),
    "unlink": (errno.EACCES, errno.EIO),
    "unlinkat": (errno.EACCES, errno.EIO),
    "renameat": (errno.EACCES, errno.ENOSPC),
    "renameat2": (errno.EACCES, errno.ENOSPC),
    "linkat": (errno.EACCES, errno.ENOSPC),
}

#: CUpointer_attributes of a mapping: its start and its size.
MAPPING = (19, 18)
#: Longer than anything that the library does on a thread of its own.
SETTLE_SECONDS = 60


@dataclass(frozen=True)
class Call:
    """The `number`-th call (from 0) of a function in a scenario."""

    domain: str
    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"

    def codes(self) -> tuple[int, ...]:
        if self.domain == DRIVER:
            return DRIVER_CODES.get(self.name, (OPERATING_SYSTEM,))
        return LIBC_CODES.get(self.name, (errno.EACCES,))


@dataclass(frozen=True)
class Fault:
    """`call` and the `times - 1` next of the same function fail with `code`, a CUresult or an errno."""

    call: Call
    code: int
    times: int = 1

    def __str__(self) -> str:
        code = str(self.code) if self.call.domain == DRIVER else errno.errorcode[self.code]
        return f"{self.call}={code}" + (f" x{self.times}" if self.times > 1 else "")


class Usage(ctypes.Structure):
    """tms_sim_usage_t."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("physical_bytes", "handles", "mappings", "reservations", "host_bytes", "streams", "runtime_allocations")
    ]


class Machine:
    def __init__(self, driver: str, watched: Sequence[str]) -> None:
        self.driver: Any = ctypes.CDLL(driver)
        self.libc: Any = ctypes.CDLL(None)
        self.driver.tms_sim_failures_fired.restype = ctypes.c_uint64
        self.driver.tms_sim_read_trace.restype = ctypes.c_size_t
        self.driver.tms_sim_read_trace.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self.driver.tms_sim_fail_after.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
        self.driver.tms_sim_usage.argtypes = [ctypes.c_int, ctypes.POINTER(Usage)]
        self.driver.tms_sim_events.restype = ctypes.c_uint64
        self.driver.tms_sim_context_references.restype = ctypes.c_uint64
        self.driver.tms_sim_set_bandwidth.argtypes = [ctypes.c_uint64]
        self.driver.tms_sim_take_memory.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.driver.tms_sim_launch_add.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_uint8,
            ctypes.c_int,
        ]
        self.driver.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
        self.driver.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
        for name in ("fired", "blocks", "mapped_bytes", "resident_bytes", "trace_stamp"):
            getattr(self.libc, f"tms_fault_{name}").restype = ctypes.c_uint64
        self.libc.tms_fault_trace_length.restype = ctypes.c_size_t
        self.libc.tms_fault_trace_name.restype = ctypes.c_char_p
        self.libc.tms_fault_trace_name.argtypes = [ctypes.c_size_t]
        self.libc.tms_fault_trace_stamp.argtypes = [ctypes.c_size_t]
        self.libc.tms_fault_fail_after.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
        self.libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        self.libc.tms_fault_clock.argtypes = [ctypes.c_void_p]
        self.libc.tms_fault_clock(ctypes.cast(self.driver.tms_sim_calls, ctypes.c_void_p))
        for path in watched:
            before = self.libc.tms_fault_watch(b"/none")
            assert self.libc.tms_fault_watch(path.encode()) > before, f"{path} is not loaded"
        self._driver_rules: set[str] = set()
        self._gate = 0

    # Failures.

    def arm(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if fault.call.domain == DRIVER:
                rule = self.driver.tms_sim_fail_after
                self._driver_rules.add(fault.call.name)
            else:
                rule = self.libc.tms_fault_fail_after
            assert rule(fault.call.name.encode(), fault.call.number, fault.times, fault.code) == 0, f"cannot fail {fault}"

    def disarm(self) -> None:
        for name in self._driver_rules:
            self.driver.tms_sim_fail_after(name.encode(), 0, 0, 0)
        self._driver_rules.clear()
        self.libc.tms_fault_stop()

    def refuse_once(self, name: str) -> None:
        """The driver's next call of that name fails: for scenarios, before anything is armed."""
        assert self.driver.tms_sim_fail_after(name.encode(), 0, 1, OPERATING_SYSTEM) == 0

    def refuse(self, name: str) -> None:
        """The driver's calls of that name fail until `disarm`: for scenarios, before anything is armed."""
        assert self.driver.tms_sim_fail_after(name.encode(), 0, 1 << 40, OPERATING_SYSTEM) == 0
        self._driver_rules.add(name)

    def fired(self) -> int:
        return int(self.driver.tms_sim_failures_fired()) + int(self.libc.tms_fault_fired())

    # The record.

    def record(self) -> None:
        self.driver.tms_sim_clear_counts()
        self.driver.tms_sim_trace(1)
        self.libc.tms_fault_record(1)

    def recorded(self) -> list[Call]:
        """The calls since `record`, to both, in their order."""
        self.libc.tms_fault_record(0)
        self.driver.tms_sim_trace(0)
        length = self.driver.tms_sim_read_trace(None, 0)
        text = ctypes.create_string_buffer(length + 1)
        self.driver.tms_sim_read_trace(text, length + 1)
        driver = text.value.decode().split("\n") if text.value else []
        rows = self.libc.tms_fault_trace_length()
        libc = [(self.libc.tms_fault_trace_stamp(row), self.libc.tms_fault_trace_name(row).decode()) for row in range(rows)]
        order = [(number, 1, DRIVER, name) for number, name in enumerate(driver)]
        order += [(stamp, 0, LIBC, name) for stamp, name in libc]
        counts: Counter[tuple[str, str]] = Counter()
        calls = []
        for _, _, domain, name in sorted(order, key=lambda row: row[:2]):
            calls.append(Call(domain, name, counts[domain, name]))
            counts[domain, name] += 1
        return calls

    # What is there.

    def settle(self) -> None:
        """Waits for the library's background work, on threads that end when it is done, and lets a second pass for the
        library. A thread that does not end is reported among what is held."""
        self.libc.tms_fault_wait_for_threads(SETTLE_SECONDS)

    def holds(self, address: int, data: bytes) -> bool:
        return bool(self.libc.memcmp(address, data, len(data)) == 0)

    def is_read_only(self, device: int, address: int) -> bool:
        """Whether the device may read, and not write, at this address."""
        location, flags = (ctypes.c_int * 2)(1, device), ctypes.c_uint64()
        self.driver.cuMemGetAccess(ctypes.byref(flags), location, ctypes.c_uint64(address))
        return flags.value == 1

    def mapped_with(self, address: int) -> tuple[int, int]:
        """The address and the size of what is mapped there: a handle, whole."""
        found = []
        for attribute in MAPPING:
            value = ctypes.c_uint64()
            assert self.driver.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address)) == 0
            found.append(value.value)
        return found[0], found[1]

    def holdings(self, devices: int) -> dict[str, Any]:
        """Everything that could have leaked."""
        held: dict[str, Any] = {}
        self.settle()
        for device in range(devices):
            usage = Usage()
            self.driver.tms_sim_usage(device, ctypes.byref(usage))
            held |= {f"device {device} {name}": getattr(usage, name) for name, *_ in Usage._fields_}
            held[f"device {device} context references"] = self.driver.tms_sim_context_references(device)
        held["events"] = self.driver.tms_sim_events()
        held["blocks of memory"] = self.libc.tms_fault_blocks()
        held["mapped bytes"] = self.libc.tms_fault_mapped_bytes()
        held["resident bytes"] = self.libc.tms_fault_resident_bytes()
        held["context stack"] = list(self.context_stack())
        # The shared page is made once, and stays open until the process ends.
        opened = map(self._target, os.listdir("/proc/self/fd"))
        held["open files"] = sorted(target for target in opened if not target.endswith(".page"))
        held["threads of the library"] = self.libc.tms_fault_wait_for_threads(0)
        return held

    @staticmethod
    def _target(descriptor: str) -> str:
        """What a descriptor refers to. Pipes differ by number only, and holders of the shared store by a random name. The
        listing's own descriptor is closed again."""
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]
            return re.sub(r"/holders/[0-9a-f]+", "/holders/NAME", target)
        except FileNotFoundError:
            return ""

    def physical_bytes(self, device: int) -> int:
        usage = Usage()
        self.driver.tms_sim_usage(device, ctypes.byref(usage))
        return int(usage.physical_bytes)

    def host_bytes(self) -> int:
        """Pinned."""
        usage = Usage()
        self.driver.tms_sim_usage(0, ctypes.byref(usage))
        return int(usage.host_bytes)

    def context_stack(self) -> tuple[int, ...]:
        """This thread's current contexts, the innermost first."""
        stack: list[int] = []
        context = ctypes.c_void_p()
        while self.driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0 and context.value:
            stack.append(context.value)
        for value in reversed(stack):
            assert self.driver.cuCtxPushCurrent_v2(value) == 0
        return tuple(stack)

    # Contexts and work in flight.

    def retain(self, device: int) -> int:
        context = ctypes.c_void_p()
        assert self.driver.cuInit(0) == 0
        assert self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert context.value
        return context.value

    def release(self, device: int) -> None:
        assert self.driver.cuDevicePrimaryCtxRelease_v2(device) == 0

    def push(self, context: int) -> None:
        assert self.driver.cuCtxPushCurrent_v2(context) == 0

    def hold_device(self, address: int) -> int:
        """Work that adds 0 to a byte and waits for the gate returned."""
        self._gate += 1
        assert self.driver.tms_sim_launch_add(None, address, 1, 0, self._gate) == 0
        return self._gate

    def drain(self) -> None:
        """Waits for what is in flight on the current device."""
        assert self.driver.cuCtxSynchronize() == 0

    def open_gate(self, gate: int) -> None:
        self.driver.tms_sim_open_gate(gate)

    def set_bandwidth(self, bytes_per_second: int) -> None:
        self.driver.tms_sim_set_bandwidth(bytes_per_second)

    def take_memory(self, device: int, size: int) -> None:
        assert self.driver.tms_sim_take_memory(device, size) == 0
