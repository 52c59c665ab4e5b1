"""The processes of a device by NVML, and this process's share: the context, and what every library allocated."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from typing import Any, NamedTuple

__all__ = ["DeviceProcess", "Nvml", "NvmlHiddenError", "ProcessShare", "share_of_this_process"]

logger = logging.getLogger("torch_memory_saver")

#: The beginning of UUIDs.
_GPU, _MIG = "GPU-", "MIG-"
_NOT_LISTED = "NVML does not list this process, as in a container that is started without --pid=host"


class NvmlHiddenError(Exception):
    """What NVML would tell is hidden. The text says why."""


class DeviceProcess(NamedTuple):
    """A process with a context on a device. `bytes` is None where NVML hides it."""

    pid: int
    bytes: int | None


class Nvml:
    """NVML, loaded at the first call. Needs the package nvidia-ml-py (extra ``nvml``). Any thread."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._unavailable = ""  # why, once it is known
        self._handles: dict[str, Any] = {}

    def processes(self, uuid: str) -> list[DeviceProcess]:
        """The processes on a device.

        NVML lists processes by the numbers that they have outside of containers.

        Args:
            uuid: The device's, such as "GPU-5d5ba0d6-...".

        Raises:
            NvmlHiddenError: It cannot be loaded or asked.
        """
        if self._nvml is None and not self._unavailable:
            self._load()
        if self._unavailable:
            raise NvmlHiddenError(self._unavailable)
        try:
            handle = self._handles.get(uuid)
            if handle is None:
                handle = self._handles[uuid] = self._find(uuid)
            rows = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError as error:
            raise NvmlHiddenError(f"NVML: {error}") from error
        return [DeviceProcess(row.pid, None if row.usedGpuMemory is None else int(row.usedGpuMemory)) for row in rows]

    def _find(self, uuid: str) -> Any:
        """The handle of a device. CUDA writes the UUID of a MIG device like that of a GPU, NVML does not."""
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError:
            with contextlib.suppress(self._nvml.NVMLError):
                return self._nvml.nvmlDeviceGetHandleByUUID(f"{_MIG}{uuid.removeprefix(_GPU)}")
            raise

    def _load(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            self._unavailable = f"it needs NVIDIA's bindings of NVML: pip install 'torch_memory_saver[nvml]' ({error})"
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._unavailable = f"NVML: {error}"
            return
        self._nvml = nvml


def share_of_this_process(processes: list[DeviceProcess], known: int) -> int:
    """The bytes of this process among those of a device.

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
        """The device memory of this process: see `share_of_this_process`.

        Returns:
            None if it is hidden. The reason is logged once, with level INFO.
        """
        try:
            return share_of_this_process(self._nvml.processes(uuid), known)
        except NvmlHiddenError as error:
            self._tell(str(error))
            return None

    def _tell(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.info("the memory of other processes is not logged: %s", reason)
