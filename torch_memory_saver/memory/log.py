"""`MemoryLog`: the memory of this process and its devices over time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType

from torch_memory_saver import _core
from torch_memory_saver._files import default_role, own_rank
from torch_memory_saver._nvml import ProcessShare
from torch_memory_saver._services import DeviceMemory, Periodic, TorchCuda, device_memory, devices_in_use, layer
from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.reports.usage import Usage, take_stats

from .log_row import MemoryRow, append_rows

__all__ = ["MemoryLog"]

_MOST_ROWS = 100_000


class MemoryLog(contextlib.AbstractContextManager["MemoryLog"]):
    """The memory of this process on its devices: a row for each device, at marks and, if wanted, at an interval.

    Taking a row neither waits for a device nor breaks a capture. As a context manager it takes rows at the interval inside,
    and one at the end.

    Args:
        role: What the process is. None: the process's title or program.
        path: A CSV file to which each row is appended when it is taken. Several processes may use one file.
        interval: Seconds between rows that a daemon thread takes, from `start` to `stop`. None: marks only. The thread goes
            on in forked children, where rows have the child's pid.
        rank: None: that of torch.distributed if it is initialised, else ``RANK``.
        summary: Whether rows of marks have the text of ``torch.cuda.memory_summary``.
        most_rows: As many are kept in memory, the last ones. The file has all.

    Raises:
        InvalidArgumentError: An interval or number of rows that is not above 0.
    """

    def __init__(
        self,
        role: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        interval: float | None = None,
        rank: int | None = None,
        summary: bool = False,
        most_rows: int = _MOST_ROWS,
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
        self.after_fork_in_child()
        _logs.add(self)

    def after_fork_in_child(self) -> None:
        """Another thread of the parent may have been taking a row."""
        self._lock = threading.Lock()

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        """The rows in memory, oldest first. In a forked child also those of its parent until then."""
        with self._lock:
            return tuple(self._rows)

    def mark(self, label: str = "") -> tuple[MemoryRow, ...]:
        """Takes a row for each device on which this process has a context now, and returns them. A process without any has
        one row, without a device.

        Raises:
            OSError: The file cannot be written. The rows are kept in memory.
        """
        return self._take(label, self._summary)

    def start(self) -> MemoryLog:
        """Starts the thread that takes rows at the interval. The first comes at once. Does nothing if it runs, or without an
        interval."""
        if self._thread is None and self._interval is not None:
            self._take("", False)
            self._thread = Periodic(f"torch_memory_saver: memory log of {self.role}", self._interval, self._at_interval)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread. Does nothing if there is none."""
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
        """Appends the rows in memory to a CSV file: see `read_memory_log`."""
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


_logs: weakref.WeakSet[MemoryLog] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for log in _logs:
        log.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
