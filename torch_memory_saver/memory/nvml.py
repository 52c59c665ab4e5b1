"""This process's share of a device's memory, which only NVML knows: the context, and what every library allocated."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

__all__ = ["ProcessShare"]

logger = logging.getLogger("torch_memory_saver")


class ProcessShare:
    """NVML's numbers for this process. Needs the package nvidia-ml-py (extra ``nvml``).

    NVML lists processes by the numbers that they have outside of containers. In a container with process numbers of its own
    the share is unknown, because another process may have this one's number there.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._unavailable = ""  # why, once it is known
        self._handles: dict[str, Any] = {}
        self._reasons: set[str] = set()  # those that were logged

    def bytes(self, uuid: str, known: int) -> int | None:
        """The device memory of this process.

        Args:
            uuid: The device's, such as "GPU-5d5ba0d6-...".
            known: Bytes that this process certainly holds there. An entry with less is of another process.

        Returns:
            None if it is hidden. The reason is logged once, with level INFO.
        """
        if self._nvml is None and not self._unavailable:
            self._load()
        if self._unavailable:
            self._tell(self._unavailable)
            return None
        try:
            handle = self._handles.get(uuid)
            if handle is None:
                handle = self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            rows = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError as error:
            self._tell(f"NVML: {error}")
            return None
        shares = [row.usedGpuMemory for row in rows if row.pid == os.getpid()]
        if not shares or shares[0] is None or shares[0] < known:
            self._tell("NVML does not list this process, as in a container that is started without --pid=host")
            return None
        return int(shares[0])

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

    def _tell(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.info("the memory of other processes is not logged: %s", reason)
