"""The GPUs of the machine and all processes on them, as NVML knows them."""

from __future__ import annotations

import importlib
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
    """One GPU. The bytes are those of its memory, and None if NVML does not say them."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class Gpus:
    """The GPUs, in NVML's order; and why there are none, or not all is known: one sentence, "" if all is."""

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
        gpus = tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        return Gpus((), f"only processes with a page are shown, because NVML fails: {error}")
    finally:
        nvml.nvmlShutdown()
    silent = [str(gpu.index) for gpu in gpus if gpu.total_bytes is None]
    return Gpus(gpus, f"NVML does not say how much memory is used on GPU {', '.join(silent)}" if silent else "")


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total = used = free = None
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used, free = int(memory.total), int(memory.used), int(memory.free)
    except nvml.NVMLError:  # not supported where memory is one with the host's
        pass
    try:
        rows = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # a MIG device, or no permission
        rows = []
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=total,
        used_bytes=used,
        free_bytes=free,
        processes=tuple(GpuProcess(int(row.pid), row.usedGpuMemory) for row in rows),
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
