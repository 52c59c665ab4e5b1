"""The GPUs of the machine and all processes on them, as NVML knows them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Gpu", "GpuProcess", "Gpus", "read_gpus"]


@dataclass(frozen=True)
class GpuProcess:
    """A process with a context on a GPU. `pid` is its number outside of containers; `used_bytes` None: hidden."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG device of a GPU that is divided. The bytes are those of its memory, and None if NVML does not say
    them.

    Attributes:
        index: NVML's, of the whole GPU.
        mig: The number of the MIG device on the GPU; None for a GPU that is not divided.
        uuid: As nvidia-smi writes it, with "GPU-" or "MIG-".
    """

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    processes: tuple[GpuProcess, ...]
    mig: int | None = None


@dataclass(frozen=True)
class Gpus:
    """The GPUs, in NVML's order; and why there are none, or not all is known: "" if all is."""

    gpus: tuple[Gpu, ...]
    missing: str


def read_gpus() -> Gpus:
    """Asks NVML. Never fails: what is wrong is in the result. Initialises no CUDA."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Gpus(
            (), "only processes with a page are shown, because NVML's bindings are missing: pip install nvidia-ml-py"
        )
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus((), f"only processes with a page are shown, because NVML cannot be used: {error}")
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return Gpus((), f"only processes with a page are shown, because NVML fails: {error}")
    else:
        return _Reader(nvml).read(count)
    finally:
        with contextlib.suppress(nvml.NVMLError):  # nothing depends on it
            nvml.nvmlShutdown()


class _Reader:
    """One look at all GPUs. A GPU that fails, such as one that has fallen off the bus, does not hide the others."""

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
        """The GPU, or its MIG devices: those have the memory and the processes of a divided one."""
        whole = self._nvml.nvmlDeviceGetHandleByIndex(index)
        migs = [self._gpu(handle, index, number) for number, handle in self._mig_handles(whole)]
        return migs or [self._gpu(whole, index, None)]

    def _mig_handles(self, whole: Any) -> Iterator[tuple[int, Any]]:
        try:
            most = self._nvml.nvmlDeviceGetMaxMigDeviceCount(whole)
        except (self._nvml.NVMLError, AttributeError):  # an old GPU, driver or binding
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
        try:
            rows = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError as error:
            rows = []
            self._note("NVML does not list the processes", error, index, mig)
        return Gpu(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            total_bytes=total,
            used_bytes=used,
            free_bytes=free,
            processes=tuple(GpuProcess(int(row.pid), row.usedGpuMemory) for row in rows),
            mig=mig,
        )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
