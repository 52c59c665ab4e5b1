"""One row of a memory log, and rows as CSV."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import io
import os
import typing
from collections.abc import Iterable
from dataclasses import dataclass

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["MemoryRow", "append_rows", "read_memory_log"]


@dataclass(frozen=True)
class MemoryRow:
    """The memory of one process on one device at one moment. All sizes in bytes; None, or blank in CSV, is unknown.

    Attributes:
        time: Seconds since the epoch.
        role: What the process is, such as "engine".
        pid: Of the process.
        rank: In torch.distributed, or of ``RANK``.
        label: Of a mark; "" for a row at an interval.
        device: CUDA ordinal in the process. None if it does not use CUDA through PyTorch: then only `host_backup` is known.
        allocated: PyTorch's tensors. PyTorch's own counters do not fall at a pause.
        reserved: PyTorch's segments, the paused ones included.
        peak_allocated: The highest `allocated` since PyTorch's peaks were reset.
        peak_reserved: The highest `reserved` since then.
        physical: `reserved` without the paused segments: what PyTorch holds of the device's memory.
        resident: Managed memory that is not paused, PyTorch's and other.
        paused: Managed memory that is.
        device_used: Of all processes, and of the driver itself.
        device_free: What any process can allocate.
        process: This process's share of `device_used` by NVML, with its CUDA context and all libraries.
        other_processes: `device_used` - `process`. The driver's own memory is a part of it.
        host_backup: Host memory of this process for backups, of all devices, the pool included.
        summary: ``torch.cuda.memory_summary``; "" unless it was asked for.
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
_NAMES = [field.name for field in dataclasses.fields(MemoryRow)]


def append_rows(path: str | os.PathLike[str], rows: Iterable[MemoryRow]) -> None:
    """Appends to a CSV file, which gets a header if it is new. Several processes may append to one file.

    Raises:
        OSError: The file cannot be written.
    """
    with open(path, "a", newline="", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        text = io.StringIO()
        writer = csv.writer(text)
        if os.fstat(file.fileno()).st_size == 0:
            writer.writerow(_NAMES)
        writer.writerows([getattr(row, name) for name in _NAMES] for row in rows)
        file.write(text.getvalue())


def read_memory_log(*paths: str | os.PathLike[str]) -> list[MemoryRow]:
    """The rows of CSV files that memory logs wrote, of several processes, in order of time.

    Raises:
        InvalidArgumentError: A file that is not a memory log.
        OSError: A file cannot be read.
    """
    rows: list[MemoryRow] = []
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is not None and list(reader.fieldnames) != _NAMES:
                raise InvalidArgumentError(f"{os.fspath(path)} is not a memory log: its columns are {reader.fieldnames}")
            try:
                rows += [MemoryRow(**{name: _value(name, row[name]) for name in _NAMES}) for row in reader]
            except (TypeError, ValueError) as error:
                raise InvalidArgumentError(f"{os.fspath(path)}, line {reader.line_num}: {error}") from error
    return sorted(rows, key=lambda row: row.time)


def _value(name: str, text: str | None) -> typing.Any:
    if text is None:
        raise ValueError(f"there is no {name}: the line is cut off")
    kind = _TYPES[name]
    if kind is str:
        return text
    if kind is float:
        return float(text)
    return None if text == "" and kind is not int else int(text)
