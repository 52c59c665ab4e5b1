"""The wrapper of NVML: the GPUs of the machine, the processes on them, and the share of this process.

Calls the driver's own library, and needs no package of Python. Initialises no CUDA. `Nvml` loads the library and explains
its failures. Two threads that load it at once initialise it twice, which NVML counts. Nothing is locked.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "DeviceProcess",
    "Gpu",
    "Gpus",
    "Nvml",
    "NvmlHiddenError",
    "ProcessShare",
    "read_gpus",
    "share_of_this_process",
]

logger = logging.getLogger("torch_memory_saver")

#: The beginning of UUIDs.
_GPU, _MIG = "GPU-", "MIG-"
#: The longest name or UUID, NUL included.
_TEXT_BYTES = 256
#: The memory of a process whose memory NVML hides.
_HIDDEN_BYTES = (1 << 64) - 1
#: The result of a call whose array is too short.
_INSUFFICIENT_SIZE = 7
_NOT_LISTED = "NVML does not list this process, as in a container that is started without --pid=host"


class NvmlHiddenError(Exception):
    """The error for information that NVML hides. The message gives the reason."""


class DeviceProcess(NamedTuple):
    """A process with a context on a device. `pid` is its number outside of containers. `bytes` is None if NVML hides it."""

    pid: int
    bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG device of a GPU that is divided. The bytes are those of its memory, and None if NVML does not
    report them.

    Attributes:
        index: Index that NVML gives the whole GPU.
        mig: Number that NVML gives the MIG device on its GPU, or None for a GPU that is not divided.
        uuid: UUID as nvidia-smi writes it, with "GPU-" or "MIG-".
    """

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    processes: tuple[DeviceProcess, ...]
    mig: int | None = None


@dataclass(frozen=True)
class Gpus:
    """The GPUs, in NVML's order; and why there are none, or not all is known: "" if all is."""

    gpus: tuple[Gpu, ...]
    missing: str


class Nvml:
    """NVML, loaded at the first call and initialised until `close`. Any thread may call."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._unavailable = ""  # why, once it is known
        self._handles: dict[str, Any] = {}

    def processes(self, uuid: str) -> list[DeviceProcess]:
        """Return the processes on a device.

        NVML lists processes by the numbers that they have outside of containers.

        Args:
            uuid: The device's, such as "GPU-5d5ba0d6-...".

        Raises:
            NvmlHiddenError: NVML cannot be loaded, or does not answer.
        """
        with self._library() as nvml:
            handle = self._handles.get(uuid)
            if handle is None:
                handle = self._handles[uuid] = _find(nvml, uuid)
            return _processes_on(nvml, handle)

    def gpus(self) -> Gpus:
        """Return the GPUs of the machine and the processes on them. Never raises: the result says what is missing."""
        try:
            with self._library() as nvml:
                return _Reader(nvml).read(nvml.nvmlDeviceGetCount())
        except NvmlHiddenError as error:
            return Gpus((), f"only processes with a page are shown, because {error}")

    def close(self) -> None:
        """End the use of NVML. The next call initialises it again."""
        nvml, self._nvml = self._nvml, None
        self._handles.clear()
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):  # nothing depends on it
                nvml.nvmlShutdown()

    @contextlib.contextmanager
    def _library(self) -> Iterator[Any]:
        """Give the library, initialised. Its errors inside become NvmlHiddenError."""
        if self._nvml is None and not self._unavailable:
            self._load()
        if self._unavailable:
            raise NvmlHiddenError(self._unavailable)
        nvml = self._nvml
        try:
            yield nvml
        except nvml.NVMLError as error:
            raise NvmlHiddenError(f"NVML fails: {error}") from error

    def _load(self) -> None:
        try:
            nvml = _Library()
        except OSError as error:
            self._unavailable = f"the driver's library of NVML cannot be loaded: {error}"
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._unavailable = f"NVML cannot be used: {error}"
            return
        self._nvml = nvml


def read_gpus() -> Gpus:
    """Return what NVML says now: see `Nvml.gpus`. Uses NVML for this call only, so that its driver can be unloaded."""
    nvml = Nvml()
    try:
        return nvml.gpus()
    finally:
        nvml.close()


def share_of_this_process(processes: list[DeviceProcess], known: int) -> int:
    """Return the bytes of this process among those of a device.

    In a container with process numbers of its own the share is unknown, because another process may have this one's number
    there.

    Args:
        known: Bytes that this process certainly holds there. An entry with less is of another process.

    Raises:
        NvmlHiddenError: It is not listed.
    """
    for process in processes:
        if process.pid == os.getpid() and process.bytes is not None and process.bytes >= known:
            return process.bytes
    raise NvmlHiddenError(_NOT_LISTED)


class ProcessShare:
    """NVML's numbers for this process, as a log shows them: where they are hidden, the reason is logged."""

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._reasons: set[str] = set()  # those that were logged

    def bytes(self, uuid: str, known: int) -> int | None:
        """Return the device memory of this process: see `share_of_this_process`.

        Returns:
            None if it is hidden. The reason is logged once, with level INFO.
        """
        try:
            return share_of_this_process(self._nvml.processes(uuid), known)
        except NvmlHiddenError as error:
            self._log_once(str(error))
            return None

    def _log_once(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.info("the memory of other processes is not logged: %s", reason)


def _find(nvml: Any, uuid: str) -> Any:
    """Return the handle of a device. CUDA writes the UUID of a MIG device like that of a GPU, NVML does not."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"{_MIG}{uuid.removeprefix(_GPU)}")
        raise


def _processes_on(nvml: Any, handle: Any) -> list[DeviceProcess]:
    rows = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [DeviceProcess(row.pid, None if row.usedGpuMemory == _HIDDEN_BYTES else row.usedGpuMemory) for row in rows]


class _Reader:
    """The state of all GPUs at one moment. A GPU that fails, such as one that has fallen off the bus, does not hide the
    others."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._missing: dict[tuple[str, str], list[str]] = {}  # by what is missing and the error: of which GPUs

    def read(self, count: int) -> Gpus:
        gpus: list[Gpu] = []
        for index in range(count):
            try:
                gpus += self._parts(index)
            except self._nvml.NVMLError as error:
                self._note("NVML fails", error, index, None)
        sentences = (f"{what} on GPU {', '.join(where)}: {error}" for (what, error), where in self._missing.items())
        return Gpus(tuple(gpus), "; ".join(sentences))

    def _note(self, what: str, error: Exception, index: int, mig: int | None) -> None:
        self._missing.setdefault((what, str(error)), []).append(f"{index}" if mig is None else f"{index} MIG {mig}")

    def _parts(self, index: int) -> list[Gpu]:
        """Return the GPU, or its MIG devices: those have the memory and the processes of a divided one."""
        whole = self._nvml.nvmlDeviceGetHandleByIndex(index)
        migs = [self._gpu(handle, index, number) for number, handle in self._mig_handles(whole)]
        return migs or [self._gpu(whole, index, None)]

    def _mig_handles(self, whole: Any) -> Iterator[tuple[int, Any]]:
        try:
            most = self._nvml.nvmlDeviceGetMaxMigDeviceCount(whole)
        except self._nvml.NVMLError:  # an old GPU or driver
            return
        for number in range(most):
            try:
                handle = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number)
            except self._nvml.NVMLError:  # there are fewer
                continue
            yield number, handle

    def _gpu(self, handle: Any, index: int, mig: int | None) -> Gpu:
        nvml = self._nvml
        total = used = free = None
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            total, used, free = int(memory.total), int(memory.used), int(memory.free)
        except nvml.NVMLError as error:  # also where the memory is the host's
            self._note("NVML does not say how much memory is used", error, index, mig)
        processes: list[DeviceProcess] = []
        try:
            processes = _processes_on(nvml, handle)
        except nvml.NVMLError as error:
            self._note("NVML does not list the processes", error, index, mig)
        return Gpu(
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            total_bytes=total,
            used_bytes=used,
            free_bytes=free,
            processes=tuple(processes),
            mig=mig,
        )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, as the functions with a suffix fill it in."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    )


class _Library:
    """The functions of the driver's library, under the names that NVIDIA's bindings for Python give them.

    Raises:
        OSError: There is no driver, or it has no NVML.
    """

    class NVMLError(Exception):
        """A call that failed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")

    def nvmlInit(self) -> None:
        self._call("nvmlInit_v2")

    def nvmlShutdown(self) -> None:
        self._call("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return count.value

    def nvmlDeviceGetHandleByIndex(self, index: int) -> ctypes.c_void_p:
        return self._handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory

    def nvmlDeviceGetComputeRunningProcesses(self, handle: ctypes.c_void_p) -> list[_Process]:
        # The second form, of a driver before 510, fills in the same structure.
        suffix = "v3" if hasattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3") else "v2"
        name = f"nvmlDeviceGetComputeRunningProcesses_{suffix}"
        length = 64
        while True:
            count, rows = ctypes.c_uint(length), (_Process * length)()
            result = self._result(name, handle, ctypes.byref(count), rows)
            if result != _INSUFFICIENT_SIZE:
                break
            length = 2 * max(count.value, length)  # a process may have begun since then
        self._check(name, result)
        return rows[: count.value]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> ctypes.c_void_p:
        return self._handle("nvmlDeviceGetHandleByUUID", uuid.encode())

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: ctypes.c_void_p) -> int:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(count))
        return count.value

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: ctypes.c_void_p, index: int) -> ctypes.c_void_p:
        return self._handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index))

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetUUID", handle)

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetName", handle)

    def _handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(handle))
        return handle

    def _text(self, name: str, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(name, handle, text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode(errors="replace")

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, self._result(name, *arguments))

    def _result(self, name: str, *arguments: Any) -> int:
        try:
            return int(getattr(self._library, name)(*arguments))
        except AttributeError:
            raise self.NVMLError(f"the driver has no {name}") from None

    def _check(self, name: str, result: int) -> None:
        if result:
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            raise self.NVMLError(f"{name} failed with {result} ({describe(result).decode()})")
