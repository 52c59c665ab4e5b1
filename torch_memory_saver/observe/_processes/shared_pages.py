"""Shared pages, in which each process of this user publishes what it holds (``csrc/include/tms_shared_page.h``)."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._files import can_lock
from torch_memory_saver._folders import Folder, is_changed_by_others, private_directory
from torch_memory_saver._text import printable

__all__ = [
    "Page",
    "PageDevice",
    "Pages",
    "Row",
    "is_alive",
    "open_page",
    "own_namespace",
    "page_directory",
    "read_page",
    "read_pages",
]

_PATTERN = "tms-*-*.page"
#: Files that a process writes on request, and those that it leaves if it is killed before it has ended.
_RESULTS = ("tms-*-*.json", "tms-*-*.pickle", ".tms-*-*.tmp")
_VARIABLE = "TMS_SHARED_PAGE"
#: The first word of a page, and its size: csrc/include/tms_shared_page.h.
_MAGIC, _PAGE_BYTES = b"TMS_PAGE", 32768
_NAMESPACE, _BOOT_ID = "/proc/self/ns/pid", "/proc/sys/kernel/random/boot_id"
#: Age in seconds from which a page that is still shorter counts as abandoned by its process.
_MAKING_S = 60.0
#: Seconds for which the files that a process wrote on request are kept after the process has ended.
_KEPT_RESULTS_S = 24 * 3600.0
_OPERATIONS = {0: "", 1: "pause", 2: "resume"}
#: Index of the start time among the fields that follow the name in /proc/<pid>/stat.
_START_FIELD = 19


@dataclass(frozen=True)
class Row:
    """The allocations of one tag on one device, or all allocations whose tags have no row of their own.

    Attributes:
        tag: Tag of the allocations; "" for tags without a row of their own.
        device: CUDA ordinal in that process; -1 for tags without a row of their own.
        allocations: Number of live allocations, in every state.
        damaged: Number of allocations whose memory the driver failed to release.
        resident_bytes: Bytes of device memory that is resident.
        paused_bytes: Bytes of device memory that a resume maps again.
        slack_bytes: Bytes of device memory that freed allocations have left in runs. No other number includes them.
        host_backup_bytes: Bytes of backups in host memory.
        disk_backup_bytes: Bytes of backups in files.
        shared_backup_bytes: Bytes of backups in the shared store. Other processes may hold the same objects.
        pauses_total, resumes_total: Number of calls that succeeded and concerned an allocation of the row.
        failed_pauses_total, failed_resumes_total: Number of calls that failed. Each attempt of a resume with a timeout
            counts.
        failed_allocations_total: Number of allocations that failed.
        last_pause_ended, last_resume_ended: Time at which the last successful call took effect, in nanoseconds of the
            monotonic clock; 0 if there was none.
        last_pause_nanoseconds, last_resume_nanoseconds: Duration of that call until it took effect.
    """

    tag: str
    device: int
    allocations: int
    damaged: int
    resident_bytes: int
    paused_bytes: int
    slack_bytes: int
    host_backup_bytes: int
    disk_backup_bytes: int
    shared_backup_bytes: int
    pauses_total: int
    resumes_total: int
    failed_pauses_total: int
    failed_resumes_total: int
    failed_allocations_total: int
    last_pause_ended: int
    last_pause_nanoseconds: int
    last_resume_ended: int
    last_resume_nanoseconds: int

    @property
    def failures_total(self) -> int:
        return self.failed_pauses_total + self.failed_resumes_total + self.failed_allocations_total

    @property
    def is_empty(self) -> bool:
        """Whether all numbers of the row are 0."""
        return not any(value for name, value in vars(self).items() if name not in ("tag", "device"))

    @property
    def state(self) -> str:
        """The state of the allocations: "resident", "paused", "partly", "damaged" or "empty"."""
        if self.damaged:
            return "damaged"
        if self.resident_bytes and self.paused_bytes:
            return "partly"
        return "paused" if self.paused_bytes else "resident" if self.resident_bytes else "empty"


@dataclass(frozen=True)
class PageDevice:
    """A device, by its CUDA ordinal in that process. `uuid` is as nvidia-smi writes it; "" if it is unknown."""

    uuid: str
    total_bytes: int


@dataclass(frozen=True)
class Page:
    """The data that one process publishes about itself.

    Attributes:
        path: Path of the file.
        pid: Number of the process in its own PID namespace.
        foreign: Whether that namespace differs from the namespace of this process, as for a process in a container.
        name: Program of the process, or its role.
        rank: Rank of the process in its job; None if it is unknown.
        serves: Whether the process serves requests.
        process_started: Start time of the process, in clock ticks after the boot; 0 if it is unknown. It distinguishes
            processes with the same number.
        devices: Devices of the process, by ordinal.
        rows: Rows by tag and device. The row for tags without a row of their own is the last one, if it exists.
        running: "pause" or "resume" while such a call moves allocations; "" otherwise.
        running_since: Time at which that call began, in nanoseconds of the monotonic clock.
        counters: Numbers of the process with the names of ``tms_shared_page.h``.
        requests: Bits of the pending requests.
        served_total, unserved_total, serve_error: Values by number of the request.
    """

    path: Path
    pid: int
    foreign: bool
    name: str
    rank: int | None
    serves: bool
    process_started: int
    devices: tuple[PageDevice, ...]
    rows: tuple[Row, ...]
    running: str
    running_since: int
    counters: dict[str, int]
    requests: int
    served_total: tuple[int, ...]
    unserved_total: tuple[int, ...]
    serve_error: tuple[int, ...]


@dataclass(frozen=True)
class Pages:
    """The pages of a directory, by process number; and why others, or the directory, could not be read, by path."""

    pages: tuple[Page, ...]
    unreadable: dict[str, str]


def page_directory() -> Path:
    """Return the directory of this user's pages: the directory that TMS_SHARED_PAGE names, or the default. It may be
    missing."""
    return Path(_core.page_directory())


def own_namespace() -> int:
    """Return the inode of this process's PID namespace, or 0 if it is unknown."""
    try:
        return os.stat(_NAMESPACE).st_ino
    except OSError:
        return 0


def read_pages(directory: Path | None = None) -> Pages:
    """Read the pages of all live processes, and remove those of dead ones.

    Root may also read the pages in a folder of another user, to which only that user can write.
    """
    place = page_directory() if directory is None else directory
    try:
        with private_directory(place, may_be_of_user=os.geteuid() == 0) as folder:
            pages, unreadable = _read_all(folder)
            _remove_results(folder)
    except FileNotFoundError:  # no process has made a page yet
        return Pages((), {})
    except PermissionError as error:
        advice = f"{_VARIABLE} names the folder, for the processes and for this command"
        return Pages((), {printable(str(place)): f"{_why(error)}; {advice}"})
    except OSError as error:
        return Pages((), {printable(str(place)): _why(error)})
    return Pages(tuple(sorted(pages, key=lambda page: (page.foreign, page.pid))), unreadable)


def _read_all(folder: Folder) -> tuple[list[Page], dict[str, str]]:
    pages: list[Page] = []
    unreadable: dict[str, str] = {}
    for name in sorted(folder.names()):
        if not fnmatch.fnmatchcase(name, _PATTERN):
            continue
        try:
            with open_page(folder, name, os.O_RDONLY) as descriptor:
                page = _read_or_remove(descriptor, folder, name)
        except FileNotFoundError:  # its process has ended
            continue
        except (OSError, ValueError) as error:
            unreadable[printable(str(folder.path / name))] = _why(error)
            continue
        if page is not None:
            pages.append(page)
    return pages, unreadable


def read_page(descriptor: int, path: Path) -> Page:
    """Read the page in an open file.

    Raises:
        ValueError: It is no page of this release.
        OSError: It cannot be read, or its process is stopped in the middle of writing.
    """
    data = _core.read_page(descriptor)
    process = data["process"]
    if process["boot_id"] != _own_boot_id():
        raise _OtherBootError(
            f"it is of another machine or boot: remove it, or let {_VARIABLE} name a directory that is local to the machine"
        )
    namespace = own_namespace()
    return Page(
        path=path,
        pid=process["pid"],
        foreign=bool(process["pid_namespace"] and namespace) and process["pid_namespace"] != namespace,
        name=printable(process["name"]),
        rank=_signed(process["rank"]) if process["rank_known"] else None,
        serves=bool(process["serves"]),
        process_started=process["process_started"],
        devices=tuple(PageDevice(_uuid_text(raw), total) for raw, total in data["devices"]),
        rows=_rows_of(data),
        running=_OPERATIONS.get(process["running"], ""),
        running_since=process["running_since"],
        counters={
            name: value
            for name, value in process.items()
            if name.endswith("_total") or name.startswith(("last_pause_", "last_resume_"))
        },
        requests=sum(1 << number for number, made in enumerate(data["requests"]) if made),
        served_total=tuple(data["served_total"]),
        unserved_total=tuple(data["unserved_total"]),
        serve_error=tuple(data["serve_error"]),
    )


def is_alive(descriptor: int, page: Page) -> bool:
    """Return whether the page's process lives. It holds a lock on the file, which the kernel releases when it ends. A child
    that was made without fork's handlers may hold the lock in its place; then the start time tells."""
    if can_lock(descriptor):
        return False
    if page.foreign or not page.process_started:
        return True
    started = _start_of(page.pid)
    return started is None or started == page.process_started


class _OtherBootError(ValueError):
    """The page is of another machine, or of this one before its last start. Whether its process lives is unknown:
    a lock may be local to a machine."""


@contextlib.contextmanager
def open_page(folder: Folder, name: str, flags: int) -> Iterator[int]:
    """Open the file of a page, which belongs to this user or to the owner of the folder.

    Raises:
        ValueError: It is another user's, or other users can write to it: it may say anything.
        OSError: It cannot be opened.
    """
    # O_NONBLOCK: the name may be a FIFO.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(name, flags, dir_fd=folder.descriptor)
    try:
        found = os.fstat(descriptor)
        if (
            not stat.S_ISREG(found.st_mode)
            or found.st_uid not in (os.geteuid(), folder.owner)
            or is_changed_by_others(found)
        ):
            raise ValueError(
                f"it is not a file to which only its user can write (owner: uid {found.st_uid}, mode "
                f"{stat.S_IMODE(found.st_mode):o}): remove it"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _read_or_remove(descriptor: int, folder: Folder, name: str) -> Page | None:
    found = os.fstat(descriptor)
    magic = os.pread(descriptor, len(_MAGIC), 0)
    if found.st_size < _PAGE_BYTES or not any(magic):  # it is being made
        if time.time() - found.st_mtime > _MAKING_S and can_lock(descriptor):
            folder.remove(name)
        return None
    try:
        page = read_page(descriptor, folder.path / name)
    except (BlockingIOError, ValueError) as error:
        if isinstance(error, _OtherBootError) or magic != _MAGIC or not can_lock(descriptor):
            raise
        folder.remove(name)  # its process was killed while it wrote, or ran another release and has ended
        return None
    if is_alive(descriptor, page):
        return page
    folder.remove(name)
    return None


def _start_of(pid: int) -> int | None:
    """Return when a process was started, in clock ticks after the boot: 0 if it does not exist, None if that is unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0 if os.path.exists("/proc/self/stat") else None
    except OSError:
        return None
    return int(fields[_START_FIELD]) if len(fields) > _START_FIELD else None


def _remove_results(folder: Folder) -> None:
    """Remove files that ended processes wrote on request, or were writing when they were killed, a day later."""
    names = folder.names()
    for name in names:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _RESULTS):
            page = f"{name.lstrip('.').partition('.')[0]}.page"
            with contextlib.suppress(OSError):
                written = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False).st_mtime
                if page not in names and time.time() - written > _KEPT_RESULTS_S:
                    folder.remove(name)


def _rows_of(data: dict[str, Any]) -> tuple[Row, ...]:
    rows = [Row(**{**row, "tag": printable(row["tag"])}) for row in data["rows"]]
    others = dataclasses.replace(Row(**data["others"]), device=-1)
    return (*(row for row in rows if not row.is_empty), *([] if others.is_empty else [others]))


def _why(error: Exception) -> str:
    if isinstance(error, BlockingIOError):
        return "it is being written to all the time: its process may be stopped"
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)


def _own_boot_id() -> bytes:
    try:
        return uuid.UUID(Path(_BOOT_ID).read_text(encoding="ascii").strip()).bytes
    except (OSError, ValueError):  # no /proc: pages have no boot id either
        return bytes(16)


def _uuid_text(raw: bytes) -> str:
    return f"GPU-{uuid.UUID(bytes=raw)}" if any(raw) else ""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
