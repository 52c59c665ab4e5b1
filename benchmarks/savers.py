"""One interface for two libraries: this library and the C++ package that it replaces."""

from __future__ import annotations

import importlib
import inspect
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

__all__ = ["Ours", "Peer", "Saver", "Unavailable"]

#: How many seconds `settle` waits at most.
_SETTLING_S = 3.0
_POLL_S = 0.002


class Unavailable(Exception):
    """The library or the machine lacks what a case needs."""


class Saver(ABC):
    """One of the libraries. `backup` is "none", "pinned", "mmap" or "disk"; `host_memory` "release", "pool" or "retain"."""

    @abstractmethod
    def region(self, tag: str, backup: str, host_memory: str) -> AbstractContextManager[None]:
        """Return a region with that tag and backup. Raises Unavailable if the library has no such backup."""

    @abstractmethod
    def pause(self, tag: Any = None, *, live_only: bool = True) -> None: ...

    @abstractmethod
    def resume(self, tag: Any = None) -> None: ...

    @abstractmethod
    def set_disk_directory(self, path: str) -> None: ...

    def settle(self) -> None:
        """Waits until host memory that is no longer needed is released."""
        return


class Ours(Saver):
    """This library."""

    def __init__(self) -> None:
        self._module = importlib.import_module("torch_memory_saver")
        self._saver = self._module.torch_memory_saver

    def region(self, tag: str, backup: str, host_memory: str) -> AbstractContextManager[None]:
        settings: dict[str, Any] = {}
        if backup == "disk":
            settings["backup"] = "disk"
        elif backup != "none":
            settings |= {"backup": "mmap" if backup == "mmap" else "host", "host_memory": host_memory}
        manager: AbstractContextManager[None] = self._saver.region(tag=tag, **settings)
        return manager

    def pause(self, tag: Any = None, *, live_only: bool = True) -> None:
        self._saver.pause(tag, live_only=live_only)

    def pause_with_live(self, tag: str, live: tuple[bytes, bytes]) -> int:
        """Pauses with the live ranges `live`, as the core takes them. Returns how many bytes were copied."""
        core = importlib.import_module("torch_memory_saver._core")
        copied: int = core.pause((tag,), None, False, None, lambda: live).copied_bytes
        return copied

    def reserved_bytes(self, tag: str) -> int:
        """The bytes of all allocations with the tag."""
        core = importlib.import_module("torch_memory_saver._core")
        return sum(row.reserved_bytes for row in core.segments() if row.tag == tag)

    def resume(self, tag: Any = None) -> None:
        self._saver.resume(tag)

    def set_disk_directory(self, path: str) -> None:
        self._saver.set_disk_backup_dir(path)

    def settle(self) -> None:
        """Waits until only backups in use and pooled memory are resident."""
        deadline = time.monotonic() + _SETTLING_S
        while time.monotonic() < deadline:
            counters = self._saver.stats().counters
            if counters["host_resident_bytes"] <= counters["host_backup_bytes"] + counters["host_pooled_bytes"]:
                return
            time.sleep(_POLL_S)


class Peer(Saver):
    """The C++ package, used in hook mode "torch". It must be installed in `folder`.

    Raises:
        Unavailable: It is not installed there.
    """

    def __init__(self, folder: str) -> None:
        self._module = importlib.import_module("torch_memory_saver")
        found = Path(str(self._module.__file__)).resolve()
        if Path(folder).resolve() not in found.parents:
            raise Unavailable(f"there is no torch_memory_saver in {folder}: python found {found.parent}")
        self._saver = self._module.torch_memory_saver
        self._saver.hook_mode = "torch"

    def region(self, tag: str, backup: str, host_memory: str) -> AbstractContextManager[None]:
        known = inspect.signature(self._saver.region).parameters
        settings: dict[str, Any] = {}
        if backup == "disk":
            settings["enable_disk_backup"] = True
        elif backup != "none":
            settings["enable_cpu_backup"] = True
            if backup == "mmap":
                settings["cpu_backup_backend"] = backup
        for name in settings:
            if name not in known:
                raise Unavailable(f"its region() has no parameter {name}")
        if host_memory == "pool":
            raise Unavailable("it has no pool of host memory")
        if host_memory == "retain":
            if not hasattr(type(self._saver), "retain_cpu_backup"):
                raise Unavailable("it does not retain backups")
            self._saver.retain_cpu_backup = True
        manager: AbstractContextManager[None] = self._saver.region(tag=tag, **settings)
        return manager

    def pause(self, tag: Any = None, *, live_only: bool = True) -> None:
        self._saver.pause(tag)

    def resume(self, tag: Any = None) -> None:
        self._saver.resume(tag)

    def set_disk_directory(self, path: str) -> None:
        if not hasattr(self._saver, "set_disk_backup_dir"):
            raise Unavailable("it has no disk backups")
        self._saver.set_disk_backup_dir(path)
