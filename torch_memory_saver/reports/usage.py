"""The use of managed memory at one moment: by tag, by device, and allocation by allocation.

The printed statistics are a table with a row for each tag and each device, followed by lines about everything else of note.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._text import binary_size, counted, duration, mebibytes, table
from torch_memory_saver.options import BACKUPS

__all__ = ["Allocation", "CallTotals", "PreservedBlock", "Stats", "Usage", "take_stats"]

#: The public names of the kinds of backups, by the core's numbers.
_BACKUPS = {_core.BACKUP_NONE: "none"} | {number: name for name, number in BACKUPS.items()}
_ALL_DEVICES = -1
_NANOSECONDS = 1_000_000_000
#: Version of the format of :meth:`Stats.as_dict`. It increases with each change that breaks a reader.
STATS_FORMAT = 1


@dataclass(frozen=True)
class Allocation:
    """One managed allocation, which in PyTorch is a segment of its allocator and may hold several tensors.

    Attributes:
        address: Address of the first byte, on the device.
        bytes: Requested size.
        reserved_bytes: Size of the address range, and of the physical memory while the allocation is resident.
        backup_bytes: Bytes that a backup holds now, or of its file, which stays for the next pause.
        device: CUDA ordinal.
        state: "active", "pausing", "paused", "resuming", "damaged" or "repairing" (damaged, and a call is retrying the
            release).
        backup: Kind of backup that the allocation has: "none", "host", "mmap", "disk" or "shared".
        tag: Tag of the region.
        age: Seconds since the allocation was made.
        state_age: Seconds since its state last changed.
    """

    address: int
    bytes: int
    reserved_bytes: int
    backup_bytes: int
    device: int
    state: str
    backup: str
    tag: str
    age: float = 0.0
    state_age: float = 0.0


@dataclass(frozen=True)
class PreservedBlock:
    """A storage that keeps its contents through pauses of memory without a backup.

    Attributes:
        address: Address of the first byte, on the device.
        bytes: Size of the storage.
        device: CUDA ordinal.
        tag: Tag of the memory that contains the storage.
    """

    address: int
    bytes: int
    device: int
    tag: str


@dataclass(frozen=True)
class Usage:
    """The use of memory by a group of allocations: those of one tag, of one device, or all.

    Damaged allocations count neither as resident nor as paused, because their memory cannot be used. The counter
    ``resident_bytes`` of :class:`Stats` includes memory that is still mapped.

    Attributes:
        allocations: Number of allocations, in every state.
        bytes: Requested bytes.
        resident_bytes: Bytes of physical device memory of allocations that are active, pausing or repairing.
        paused_bytes: Bytes of physical device memory that a resume maps for allocations that are paused or resuming.
        backup_bytes: Bytes that backups hold now, and those of files that stay for the next pause.
        damaged_bytes: Reserved bytes of allocations that are damaged.
        resident_peak_bytes: Largest number of bytes of physical device memory mapped at once, since the start or since
            ``reset_peaks()``. None if it is not known: for a device within one tag, for a tag within one device, and for
            several tags or devices that are not all.
        slack_bytes: Bytes of physical device memory of freed allocations that stays with the tag, because the allocations
            shared a physical handle with others. The next allocations use this memory, and a pause gives it back. No other
            number includes it.
        deferred_bytes: Bytes of physical device memory of freed allocations whose release waits for the end of a stream
            capture, or for a device that could not be synchronized. No other number includes it.
    """

    allocations: int = 0
    bytes: int = 0
    resident_bytes: int = 0
    paused_bytes: int = 0
    backup_bytes: int = 0
    damaged_bytes: int = 0
    resident_peak_bytes: int | None = None
    slack_bytes: int = 0
    deferred_bytes: int = 0

    def __str__(self) -> str:
        names = ("resident", "paused", "backup", *(name for name, field in reversed(_RARE) if getattr(self, field)))
        sizes = [f"{binary_size(getattr(self, f'{name}_bytes'))} {name}" for name in names]
        return ", ".join([counted(self.allocations, "allocation"), *sizes])


@dataclass(frozen=True)
class CallTotals:
    """All pauses, or all resumes, of this process so far.

    Attributes:
        calls: Number of calls that succeeded.
        failures: Number of calls that failed.
        seconds: Seconds in the native part of the successful calls.
        bytes: Bytes of physical device memory that the successful calls released or mapped.
        copied_bytes: Bytes that the successful calls copied to or from backups.
    """

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0
    bytes: int = 0
    copied_bytes: int = 0


@dataclass(frozen=True)
class Stats:
    """The use of managed memory at one moment, which prints as a table.

    Attributes:
        total: Usage of all selected allocations.
        tags: Usage by tag.
        devices: Usage by CUDA ordinal, for devices with allocations and for the selected device. Without a selection,
            devices with a peak are included.
        counters: Counters of the whole process by name: numbers of calls and failures, such as "pauses_total", bytes and
            nanoseconds of the calls, and sizes of what is held now.
        pauses, resumes: Totals of all pauses and resumes of this process so far.
        failed_allocations: Number of allocations of this process that failed so far.
        slack_bytes: Slack of the whole process, see :class:`Usage`.
        stranded_bytes: Free bytes of the whole process, resident or paused, that no allocation can use. They are in segments
            of PyTorch that hold a tensor, in pools that no region uses any more because their idle segments were given back.
            A segment's part is returned when its last tensor is deleted and the cache is emptied. The number is 0 while
            PyTorch records call stacks of C++ functions, because reading its segments then takes seconds.
        host_resident_bytes: Bytes of host memory in use for backups: memory with contents, idle memory of the pool, and
            memory that is being released.
        host_pooled_bytes: Bytes of this host memory that are idle in the pool (``host_memory="pool"``,
            ``reserve_host_memory``).
        guard: Whether guard mode is on.
        guarded_bytes: Bytes of paused addresses at which a guard page of 0xFF bytes is mapped now.
    """

    total: Usage
    tags: Mapping[str, Usage]
    devices: Mapping[int, Usage]
    counters: Mapping[str, int]
    pauses: CallTotals
    resumes: CallTotals
    failed_allocations: int
    slack_bytes: int
    stranded_bytes: int
    host_resident_bytes: int
    host_pooled_bytes: int
    guard: bool
    guarded_bytes: int
    _rows: Sequence[_core.Segment]
    _taken_at: float

    @cached_property
    def allocations(self) -> tuple[Allocation, ...]:
        """The selected allocations at that moment, in order of allocation."""
        return tuple([Allocation(**record) for record in self._records()])

    def _records(self) -> list[dict[str, Any]]:
        """Return the fields of each selected allocation.

        The dicts are literals, because there may be thousands of them.
        """
        return [
            {
                "address": row.address,
                "bytes": row.bytes,
                "reserved_bytes": row.reserved_bytes,
                "backup_bytes": row.backup_bytes,
                "device": row.device,
                "state": _core.STATE_NAMES[row.state],
                "backup": _BACKUPS[row.backup],
                "tag": row.tag,
                "age": self._taken_at - row.allocated_at,
                "state_age": self._taken_at - row.changed_at,
            }
            for row in self._rows
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as dicts, lists, texts and numbers, for JSON.

        The keys are ``format``, ``pid`` and ``time`` (seconds since 1970), ``allocations``, a list with the fields of each
        :class:`Allocation`, and ``total``, ``tags``, ``devices``, ``pauses``, ``resumes`` and ``counters``, with the fields
        above.
        """
        return {
            "format": STATS_FORMAT,
            "pid": os.getpid(),
            "time": time.time() - (time.monotonic() - self._taken_at),
            "allocations": self._records(),
            "total": dict(vars(self.total)),
            "tags": {tag: dict(vars(usage)) for tag, usage in self.tags.items()},
            "devices": {str(device): dict(vars(usage)) for device, usage in self.devices.items()},
            "pauses": dict(vars(self.pauses)),
            "resumes": dict(vars(self.resumes)),
            "counters": dict(self.counters),
        }

    def __str__(self) -> str:
        return _stats_table(self)

    def __repr__(self) -> str:
        return (
            f"Stats({self.total.allocations} allocations, {self.total.resident_bytes} bytes resident, "
            f"{self.total.paused_bytes} paused, tags {list(self.tags)}, devices {list(self.devices)})"
        )


def take_stats(tags: Iterable[str] | None = None, device: int | None = None, stranded_bytes: int = 0) -> Stats:
    """Return the statistics of the allocations of some tags on one device.

    None selects every tag or every device. Rows and counters are read one after the other, so changes by other threads may
    make them differ.
    """
    selected = None if tags is None else tuple(tags)
    return _add_totals(_select(_core.segments(), selected, device), selected, device, stranded_bytes)


def _add_totals(
    rows: list[_core.Segment], selected: tuple[str, ...] | None, device: int | None, stranded_bytes: int = 0
) -> Stats:
    ordinal = _ALL_DEVICES if device is None else device
    usage = [row for tag in (selected if selected is not None else (None,)) for row in _core.usage(tag, ordinal)]
    by_tag: dict[str, Usage] = {}
    by_device: dict[int, list[_core.Usage]] = {} if device is None else {device: []}
    for row in usage:
        if row.tag is None:
            by_device.setdefault(row.device, []).append(row)
        else:
            by_tag[row.tag] = _add_up([row], row.resident_peak_bytes if device is None else None)
    counters = _core.counters()
    devices = {
        number: _add_up(those, those[0].resident_peak_bytes if those and selected is None else None)
        for number, those in sorted(by_device.items())
    }
    peak = _peak_of_all(selected, device, by_tag, devices, counters)
    return Stats(
        total=_add_up([row for row in usage if row.tag is not None], peak),
        tags=by_tag,
        devices=devices,
        counters=counters,
        pauses=_totals(counters, "pause"),
        resumes=_totals(counters, "resume"),
        failed_allocations=counters["failed_allocations_total"],
        slack_bytes=counters["slack_bytes"],
        stranded_bytes=stranded_bytes,
        host_resident_bytes=counters["host_resident_bytes"],
        host_pooled_bytes=counters["host_pooled_bytes"],
        guard=counters["guard"] != 0,
        guarded_bytes=counters["guarded_bytes"],
        _rows=rows,
        _taken_at=time.monotonic(),
    )


def _select(rows: list[_core.Segment], tags: tuple[str, ...] | None, device: int | None) -> list[_core.Segment]:
    if tags is None and device is None:
        return rows
    return [row for row in rows if (tags is None or row.tag in tags) and device in (None, row.device)]


def _add_up(rows: Iterable[_core.Usage], peak: int | None) -> Usage:
    rows = list(rows)
    return Usage(
        allocations=sum(row.allocations for row in rows),
        bytes=sum(row.bytes for row in rows),
        resident_bytes=sum(row.resident_bytes for row in rows),
        paused_bytes=sum(row.paused_bytes for row in rows),
        backup_bytes=sum(row.backup_bytes for row in rows),
        damaged_bytes=sum(row.damaged_bytes for row in rows),
        resident_peak_bytes=peak,
        slack_bytes=sum(row.slack_bytes for row in rows),
        deferred_bytes=sum(row.deferred_bytes for row in rows),
    )


def _peak_of_all(
    tags: tuple[str, ...] | None,
    device: int | None,
    by_tag: Mapping[str, Usage],
    by_device: Mapping[int, Usage],
    counters: Mapping[str, int],
) -> int | None:
    """Return the peak of a selection, or None if there is no single number for it."""
    if tags is None and device is None:
        return counters["resident_peak_bytes"]
    if tags is None and device is not None and device in by_device:
        return by_device[device].resident_peak_bytes
    if device is None and tags is not None and len(tags) == 1 and tags[0] in by_tag:
        return by_tag[tags[0]].resident_peak_bytes
    return None


def _totals(counters: Mapping[str, int], call: str) -> CallTotals:
    return CallTotals(
        calls=counters[f"{call}s_total"],
        failures=counters[f"failed_{call}s_total"],
        seconds=counters[f"{call}_nanoseconds_total"] / _NANOSECONDS,
        bytes=counters[f"{call}_bytes_total"],
        copied_bytes=counters[f"{call}_copied_bytes_total"],
    )


_HEADINGS = ("MiB", "allocations", "resident", "peak", "paused", "backup", "slack", "deferred", "damaged")
#: Columns that are shown only if the total has such bytes, from right to left.
_RARE = (("damaged", "damaged_bytes"), ("deferred", "deferred_bytes"), ("slack", "slack_bytes"))


def _stats_table(stats: Stats) -> str:
    """Return the lines of `print(stats)`, without a line break at the end."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    rows += [_row(f"tag {tag}", usage) for tag, usage in stats.tags.items()]
    rows += [_row(f"device {device}", usage) for device, usage in stats.devices.items()]
    rows.append(_row("total", stats.total))
    for heading, name in _RARE:
        if not getattr(stats.total, name):
            column = rows[0].index(heading)
            rows = [row[:column] + row[column + 1 :] for row in rows]
    lines = table(rows)
    lines += [_calls("pauses", stats.pauses), _calls("resumes", stats.resumes)]
    lines += _remarks(stats)
    return "\n".join(lines)


def _row(title: str, usage: Usage) -> tuple[str, ...]:
    peak = usage.resident_peak_bytes
    sizes = (
        usage.resident_bytes,
        peak,
        usage.paused_bytes,
        usage.backup_bytes,
        usage.slack_bytes,
        usage.deferred_bytes,
        usage.damaged_bytes,
    )
    return title, str(usage.allocations), *map(mebibytes, sizes)


def _calls(name: str, totals: CallTotals) -> str:
    text = f"{name}: {totals.calls}"
    if totals.calls:
        text += f" in {duration(totals.seconds)}, {binary_size(totals.bytes)}, {binary_size(totals.copied_bytes)} copied"
    return text + (f"; {totals.failures} failed" if totals.failures else "")


def _remarks(stats: Stats) -> list[str]:
    lines = []
    if stats.host_resident_bytes:
        pooled = f", {binary_size(stats.host_pooled_bytes)} of it idle in the pool" if stats.host_pooled_bytes else ""
        lines.append(f"host memory for backups: {binary_size(stats.host_resident_bytes)}{pooled}")
    if stats.counters["disk_backup_bytes"]:
        lines.append(f"backup files: {binary_size(stats.counters['disk_backup_bytes'])}")
    if stats.counters["shared_backup_bytes"]:
        held, made = (binary_size(stats.counters[name]) for name in ("shared_backup_bytes", "shared_made_bytes"))
        lines.append(f"shared objects: {held}, {made} of it written by this process")
    if stats.stranded_bytes:
        free = binary_size(stats.stranded_bytes)
        lines.append(f"stranded: {free} of free memory that no allocation can use until the tensors beside it are deleted")
    if stats.failed_allocations:
        lines.append(f"failed allocations: {stats.failed_allocations}")
    if stats.guard:
        lines.append(f"guard mode is on: {binary_size(stats.guarded_bytes)} read as 0xFF")
    return lines
