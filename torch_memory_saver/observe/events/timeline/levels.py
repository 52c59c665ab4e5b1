"""The memory that a process held over time, and the calls and failures of the process, from its log.

The functions are pure. Times are nanoseconds of the log's monotonic clock, and never go back, although events of concurrent
threads may be recorded out of order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch_memory_saver.observe.events.log import Event, EventLog, Level

__all__ = [
    "KINDS",
    "Call",
    "Change",
    "Failure",
    "Phase",
    "Sample",
    "calls_of",
    "changes_of",
    "failures_of",
    "samples_of",
]

#: The parts of a level: physical memory, addresses without any, and backups.
KINDS = ("resident", "paused", "backup")


class Change(NamedTuple):
    """A new level: from `time_ns` on, the allocations of a tag on a device hold `bytes` bytes of one kind."""

    time_ns: int
    device: int
    tag: str
    kind: str
    bytes: int


class Phase(NamedTuple):
    """A part of a call, with the fields of :class:`Event`.

    `device` is -1 for a phase of the whole call.
    """

    name: str
    device: int
    began_ns: int
    ended_ns: int
    busy_ns: int
    bytes: int
    status: str


class Call(NamedTuple):
    """A pause, a resume or another call that takes turns with them.

    Attributes:
        finished: Whether the call had ended when the log was taken. If it had not, `ended_ns` is that moment.
        tags: Tags that the call changed, with the devices, as (tag, device).
    """

    operation: str
    began_ns: int
    ended_ns: int
    finished: bool
    allocations: int
    bytes: int
    copied_bytes: int
    unchanged_bytes: int
    status: str
    driver_result: int
    tags: tuple[tuple[str, int], ...]
    phases: tuple[Phase, ...]


class Failure(NamedTuple):
    """An allocation, a free or a repair that failed."""

    time_ns: int
    device: int
    what: str
    tag: str
    bytes: int
    status: str
    driver_result: int


class Sample(NamedTuple):
    """The memory of a device as reported by the driver."""

    time_ns: int
    device: int
    free_bytes: int
    total_bytes: int


def changes_of(log: EventLog) -> Iterator[Change]:
    """Yield every change of a level.

    The first changes give the memory held at the first event. After the exit of the process nothing is held.
    """
    held: dict[tuple[int, str], Level] = {}
    now = log.begin_ns
    for time_ns, level in log.levels():
        now = max(now, time_ns)
        key = (level.device, level.tag)
        before = held.get(key, Level(level.tag, level.device))
        held[key] = level
        yield from _differences(now, before, level)
    if log.exited:
        for level in held.values():
            yield from _differences(max(now, log.taken_ns), level, Level(level.tag, level.device))


def _differences(time_ns: int, before: Level, after: Level) -> Iterator[Change]:
    values = ("resident_bytes", "paused_bytes", "backup_bytes")
    for kind, value in zip(KINDS, values, strict=True):
        size = getattr(after, value)
        if size != getattr(before, value):
            yield Change(time_ns, after.device, after.tag, kind, size)


def calls_of(log: EventLog) -> list[Call]:
    """Return the calls in the order of their begins.

    A call that began before the first event has only the events that are left of it.
    """
    grouped: dict[int, list[Event]] = {}
    for event in log.events:
        if event.call:
            grouped.setdefault(event.call, []).append(event)
    return sorted((_call(log, rows) for rows in grouped.values()), key=lambda call: call.began_ns)


def _call(log: EventLog, rows: list[Event]) -> Call:
    end = next((row for row in rows if row.kind == "end"), None)
    shown = end or rows[0]
    return Call(
        operation=shown.operation,
        began_ns=min(row.began_ns for row in rows),
        ended_ns=end.ended_ns if end else max(log.taken_ns, *(row.ended_ns for row in rows)),
        finished=end is not None,
        allocations=shown.allocations if end else 0,
        bytes=shown.bytes if end else 0,
        copied_bytes=shown.copied_bytes if end else 0,
        unchanged_bytes=shown.unchanged_bytes if end else 0,
        status=shown.status,
        driver_result=shown.driver_result,
        tags=tuple((row.tag, row.device) for row in rows if row.kind == "move" and row.tag is not None),
        phases=tuple(
            Phase(row.phase, row.device, row.began_ns, row.ended_ns, row.busy_ns, row.bytes, row.status)
            for row in rows
            if row.kind == "phase"
        ),
    )


def failures_of(log: EventLog) -> list[Failure]:
    """Return the failures outside of calls."""
    return [
        Failure(row.ended_ns, row.device, row.kind, row.tag or "", row.bytes, row.status, row.driver_result)
        for row in log.events
        if row.kind in ("allocate", "free", "repair") and row.status != "OK"
    ]


def samples_of(log: EventLog) -> list[Sample]:
    """Return the samples of free memory that succeeded."""
    return [
        Sample(row.ended_ns, row.device, row.bytes, row.total_bytes)
        for row in log.events
        if row.kind == "memory" and row.status == "OK"
    ]
