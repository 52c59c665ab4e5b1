"""The memory log: the memory of this process and its devices over time, as rows in memory and in a CSV file.

`MemoryLog` takes rows at marks and at intervals, and `log_memory` takes them around the calls of a function. Any thread may
call. A log's own lock is held while a row is measured and written to the file. A forked child makes a new lock.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import fcntl
import io
import logging
import math
import os
import threading
import time
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._files import append_to_file, default_role, own_rank
from torch_memory_saver._services import DeviceMemory, Periodic, TorchCuda, device_memory, devices_in_use, layer
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.observe._nvml import ProcessShare
from torch_memory_saver.reports.usage import Usage, take_stats

from .release import around, release_cached

__all__ = ["MemoryLog", "MemoryRow", "append_rows", "log_memory", "read_memory_log"]

logger = logging.getLogger("torch_memory_saver")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MAX_ROWS = 100_000


@dataclass(frozen=True)
class MemoryRow:
    """The memory of one process on one device at one moment.

    All sizes are in bytes. An unknown value is None, or blank in CSV.

    Attributes:
        time: Seconds since the epoch.
        role: The role of the process, such as "engine".
        pid: The id of the process.
        rank: The rank in torch.distributed, or else the value of the variable ``RANK``.
        label: The label of the mark; "" for a row that was taken at an interval.
        device: CUDA ordinal in the process. None if it does not use CUDA through PyTorch: then only `host_backup` is known.
        allocated: PyTorch's tensors. PyTorch's own counters do not fall at a pause.
        reserved: PyTorch's segments, the paused ones included.
        peak_allocated: The highest `allocated` since PyTorch's peaks were reset.
        peak_reserved: The highest `reserved` since then.
        physical: `reserved` without the paused segments: what PyTorch holds of the device's memory.
        resident: Managed memory that is not paused, of PyTorch and of other libraries.
        paused: Managed memory that is paused.
        device_used: Device memory that all processes and the driver itself use.
        device_free: Device memory that any process can allocate.
        process: This process's share of `device_used` by NVML, with its CUDA context and all libraries.
        other_processes: `device_used` - `process`. The driver's own memory is a part of it.
        host_backup: Host memory of this process for backups, of all devices, the pool included.
        summary: ``torch.cuda.memory_summary``; "" unless it was requested.
    """

    time: float
    role: str
    pid: int
    rank: int | None
    label: str
    device: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    physical: int | None = None
    resident: int | None = None
    paused: int | None = None
    device_used: int | None = None
    device_free: int | None = None
    process: int | None = None
    other_processes: int | None = None
    host_backup: int | None = None
    summary: str = ""


_TYPES = typing.get_type_hints(MemoryRow)


class MemoryLog(contextlib.AbstractContextManager["MemoryLog"]):
    """A log of the memory of this process, with a row for each device at marks and, if requested, at an interval.

    Taking a row neither waits for a device nor breaks a capture. As a context manager it takes rows at the interval inside,
    and one at the end.

    Args:
        role: The role of the process. None: the process's title, its name in multiprocessing, or its program.
        path: A CSV file to which each row is appended when it is taken. Several processes may use one file.
        interval: Seconds between rows that a daemon thread takes, from `start` to `stop`. None: marks only. The thread
            continues in forked children, where rows have the child's pid.
        rank: The rank of the process. None: the rank in torch.distributed if it is initialised, else ``RANK``.
        summary: Whether rows of marks have the text of ``torch.cuda.memory_summary``.
        most_rows: The number of rows that are kept in memory: the latest ones. The file has all rows.

    Raises:
        InvalidArgumentError: The interval or the number of rows is not above 0.
    """

    def __init__(
        self,
        role: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        interval: float | None = None,
        rank: int | None = None,
        summary: bool = False,
        most_rows: int = _MAX_ROWS,
    ) -> None:
        if interval is not None and (isinstance(interval, bool) or not 0 < interval < math.inf):
            raise InvalidArgumentError(f"interval must be None or a number of seconds above 0, not {interval!r}")
        if isinstance(most_rows, bool) or not isinstance(most_rows, int) or most_rows < 1:
            raise InvalidArgumentError(f"most_rows must be an int above 0, not {most_rows!r}")
        self.role = default_role() if role is None else role
        self.path = path
        self._rank = rank
        self._summary = summary
        self._rows: collections.deque[MemoryRow] = collections.deque(maxlen=most_rows)
        self._share = ProcessShare()
        self._clock: Callable[[], float] = time.time
        self._thread: Periodic | None = None
        self._interval = interval
        self._after_fork_in_child()
        _logs.add(self)

    def _after_fork_in_child(self) -> None:
        """Replace the lock: another thread of the parent may have been taking a row."""
        self._lock = threading.Lock()

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        """The rows in memory, oldest first.

        A forked child also has the rows that its parent took before the fork.
        """
        with self._lock:
            return tuple(self._rows)

    def mark(self, label: str = "") -> tuple[MemoryRow, ...]:
        """Take a row for each device on which this process has a context now, and return the rows.

        A process without a context gets one row, which has no device.

        Raises:
            OSError: The file cannot be written. The rows are kept in memory.
        """
        return self._take(label, self._summary)

    def start(self) -> MemoryLog:
        """Start the thread that takes rows at the interval, the first one at once, and return the log.

        The method does nothing if the thread runs, or if the log has no interval.
        """
        if self._thread is None and self._interval is not None:
            self._take("", False)
            self._thread = Periodic(f"torch_memory_saver: memory log of {self.role}", self._interval, self._at_interval)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread that takes rows.

        The method does nothing if there is no thread.
        """
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def __enter__(self) -> MemoryLog:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._take("", False)

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """Append the rows in memory to a CSV file, which `read_memory_log` reads."""
        append_rows(path, self.rows)

    def _at_interval(self) -> None:
        self._take("", False)

    def _take(self, label: str, summary: bool) -> tuple[MemoryRow, ...]:
        with self._lock:
            rows = tuple(self._measure(label, summary))
            self._rows.extend(rows)
            if self.path is not None:
                append_rows(self.path, rows)
        return rows

    def _measure(self, label: str, summary: bool) -> list[MemoryRow]:
        stats = take_stats()
        torch = layer.in_use()
        rank = own_rank() if self._rank is None else self._rank
        common = MemoryRow(self._clock(), self.role, os.getpid(), rank, label, host_backup=stats.host_resident_bytes)
        if torch is None or not devices_in_use():
            return [common]
        return [
            self._row(common, torch, memory, stats.devices.get(memory.device, Usage()), summary)
            for memory in device_memory(torch, devices_in_use())
        ]

    def _row(
        self,
        common: MemoryRow,
        torch: TorchCuda,
        memory: DeviceMemory,
        managed: Usage,
        summary: bool,
    ) -> MemoryRow:
        device = memory.device
        of_device = _core.device_memory(device)
        used = of_device.total - of_device.free
        known = managed.resident_bytes + managed.slack_bytes + managed.deferred_bytes
        process = self._share.bytes(torch.uuid(device), max(memory.physical, known))
        return dataclasses.replace(
            common,
            device=device,
            allocated=memory.allocated,
            reserved=memory.reserved,
            peak_allocated=memory.peak_allocated,
            peak_reserved=memory.peak_reserved,
            physical=memory.physical,
            resident=managed.resident_bytes,
            paused=managed.paused_bytes,
            device_used=used,
            device_free=of_device.free,
            process=process,
            other_processes=None if process is None else max(0, used - process),
            summary=torch.summary(device) if summary else "",
        )


class log_memory:
    """A decorator that takes rows of a memory log before and after each call of a function.

    It suits functions such as ``wake_up``, ``sleep`` or ``update_weights``.

    The labels are "before sleep" and "after sleep". After a call that raises, the label is "after sleep (KeyError)". One
    object may decorate several functions, whose rows go to one log. It decorates functions and coroutine functions. If a row
    cannot be taken, a warning is logged and the call continues.

    Args:
        role: See :class:`MemoryLog`.
        path: See :class:`MemoryLog`.
        log: A log to use. Then `role` and `path` must be None.
        release: Whether cached memory is released after each call (`release_cached`). A third row, "released after sleep",
            follows.

    Attributes:
        log: The log.

    Raises:
        InvalidArgumentError: `log` together with `role` or `path`; or something other than a function is decorated.
    """

    def __init__(
        self,
        role: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        log: MemoryLog | None = None,
        release: bool = False,
    ) -> None:
        if log is not None and (role is not None or path is not None):
            raise InvalidArgumentError("log has a role and a path: pass either the log or these")
        self.log = MemoryLog(role, path=path) if log is None else log
        self._release = release

    def __call__(self, function: _Function) -> _Function:
        """Return `function` with a row of the log before and after each call.

        Raises:
            InvalidArgumentError: `function` is not a function or a coroutine function.
        """
        name = getattr(function, "__name__", type(function).__name__)
        return around(function, lambda: self._rows(name))

    @contextlib.contextmanager
    def _rows(self, name: str) -> Iterator[None]:
        self._mark(f"before {name}")
        try:
            yield
        except BaseException as error:
            self._mark(f"after {name} ({type(error).__name__})")
            raise
        self._mark(f"after {name}")
        if self._release:
            release_cached()
            self._mark(f"released after {name}")

    def _mark(self, label: str) -> None:
        try:
            self.log.mark(label)
        except Exception:
            logger.warning("no row of the memory log %s: it could not be taken", label, exc_info=True)


def read_memory_log(*paths: str | os.PathLike[str]) -> list[MemoryRow]:
    """Return the rows of CSV files that the memory logs of several processes wrote, in order of time.

    Raises:
        InvalidArgumentError: A file is not a memory log.
        OSError: A file cannot be read.
    """
    rows: list[MemoryRow] = []
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            try:
                columns = list(reader.fieldnames or _NAMES)
                found = [
                    MemoryRow(**{name: _value(name, row[name]) for name in _NAMES}) for row in reader if columns == _NAMES
                ]
            except (TypeError, ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
                raise InvalidArgumentError(f"{os.fspath(path)}, line {reader.line_num}: {error}") from error
            if columns != _NAMES:
                raise InvalidArgumentError(f"{os.fspath(path)} is not a memory log: its columns are {columns}")
            rows += found
    return sorted(rows, key=lambda row: row.time)


def append_rows(path: str | os.PathLike[str], rows: Iterable[MemoryRow]) -> None:
    """Append rows to a CSV file, which gets a header if it is new.

    Several processes of one user may append to one file.

    Raises:
        OSError: The file cannot be written, is a symbolic link, or belongs to another user.
    """
    with open(append_to_file(path), "a", newline="", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        text = io.StringIO()
        writer = csv.writer(text)
        if os.fstat(file.fileno()).st_size == 0:
            writer.writerow(_NAMES)
        writer.writerows([getattr(row, name) for name in _NAMES] for row in rows)
        file.write(text.getvalue())


_NAMES = [field.name for field in dataclasses.fields(MemoryRow)]


def _value(name: str, text: str | None) -> typing.Any:
    if text is None:
        raise ValueError(f"there is no {name}: the line is cut off")
    kind = _TYPES[name]
    if kind is str:
        return text
    if kind is float:
        return float(text)
    return None if text == "" and kind is not int else int(text)


_logs: weakref.WeakSet[MemoryLog] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for log in _logs:
        log._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
