"""The events of this process at one moment, with what a reader of other processes must know about it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_memory_saver import _core
from torch_memory_saver._files import default_role, own_rank
from torch_memory_saver.errors import TorchMemorySaverError
from torch_memory_saver.events.model import Device, Event, Level, add_up, levels_before

__all__ = ["EventLog", "events", "sample_free_memory"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: How often the two clocks are compared. The comparison that took least counts.
_CLOCK_COMPARISONS = 16
#: The devices that were asked for, by ordinal. What they are does not change during a process.
_devices: dict[int, Device] = {}


@dataclass(frozen=True)
class EventLog:
    """The latest events of a process.

    Attributes:
        events: In the order in which they were recorded: by their ends, except for concurrent ones.
        before: What each tag held on each device before the first of the events. The changes of the events lead from there
            to `after`, also where earlier events were dropped.
        after: What each tag held after the last of them.
        dropped: Earlier events that the ring has overwritten.
        capacity: How many events the ring keeps.
        taken_ns: When the log was taken, on the clock of the events.
        wall_offset_ns: What to add to times of the events for nanoseconds since 1970.
        pid: Of the process.
        rank: In torch.distributed, else from ``RANK``; None without either.
        role: The process's title or program.
        host: The machine's name.
        boot_id: Of its kernel. Times of processes with the same one can be compared directly. "" where it is unknown.
        devices: Those that events and levels name.
        exited: Whether it was taken at the exit of the process, so that nothing comes after it.
    """

    events: tuple[Event, ...]
    before: tuple[Level, ...]
    after: tuple[Level, ...]
    dropped: int
    capacity: int
    taken_ns: int
    wall_offset_ns: int
    pid: int
    rank: int | None
    role: str
    host: str
    boot_id: str
    devices: tuple[Device, ...] = ()
    exited: bool = False

    @property
    def begin_ns(self) -> int:
        """From when on the log knows the levels: the begin of the first event. Where earlier ones were dropped it is its
        end, when it was recorded, because what was dropped may lie inside it."""
        if self.dropped and self.events:
            return self.events[0].ended_ns
        return min((event.began_ns for event in self.events), default=self.taken_ns)

    def levels(self) -> Iterator[tuple[int, Level]]:
        """The levels over time, as (time in nanoseconds, level): those before the first event, at :attr:`begin_ns`, then one
        for each change."""
        begin = self.begin_ns
        now: dict[tuple[int, str], Level] = {}
        for level in self.before:
            now[level.device, level.tag] = level
            yield begin, level
        for event in self.events:
            if event.tag is None or not (event.resident_change or event.paused_change or event.backup_change):
                continue
            key = (event.device, event.tag)
            level = now.get(key, Level(event.tag, event.device))
            now[key] = level.after(event.resident_change, event.paused_change, event.backup_change)
            yield event.ended_ns, now[key]


def events() -> EventLog:
    """The latest events of this process.

    No work is waited for: it also works while another thread pauses or resumes, whose "begin" is then without an "end". The
    ring is not emptied. In a forked child it has the child's own events only.
    """
    copy = _core.events()
    rows = tuple(_event_of(row) for row in copy.events)
    after = add_up(Level(*row) for row in copy.levels)
    return EventLog(
        events=rows,
        before=levels_before(after, rows),
        after=after,
        dropped=copy.recorded - len(rows),
        capacity=copy.capacity,
        taken_ns=time.monotonic_ns(),
        wall_offset_ns=_wall_offset(),
        pid=os.getpid(),
        rank=own_rank(),
        role=default_role(),
        host=socket.gethostname(),
        boot_id=_boot_id(),
        devices=_devices_of(rows, after),
    )


def sample_free_memory(on: bool = True) -> None:
    """Whether each pause and resume from now on records the free memory of its devices, before and after it. Costs a driver
    call for each. Off by default; ``TMS_DEBUG=events`` turns it on."""
    _core.set_event_samples(bool(on))


def _event_of(row: _core.Event) -> Event:
    return Event(
        kind=row.kind,
        operation=row.operation,
        phase=row.phase,
        began_ns=row.began,
        ended_ns=row.ended,
        busy_ns=row.busy,
        call=row.call,
        thread=row.thread,
        device=row.device,
        tag=row.tag,
        address=row.address,
        allocations=row.allocations,
        bytes=row.bytes,
        copied_bytes=row.copied_bytes,
        total_bytes=row.total_bytes,
        resident_change=row.resident_change,
        paused_change=row.paused_change,
        backup_change=row.backup_change,
        status=row.status_name,
        driver_result=row.driver_result,
    )


def _devices_of(rows: Iterable[Event], levels: Iterable[Level]) -> tuple[Device, ...]:
    """The devices that the rows name. The driver was in use for each, so asking it loads nothing."""
    named = {row.device for row in rows} | {level.device for level in levels}
    return tuple(_device(ordinal) for ordinal in sorted(named) if ordinal >= 0)


def _device(ordinal: int) -> Device:
    if ordinal not in _devices:
        try:
            info = _core.device_info(ordinal)
        except TorchMemorySaverError:  # such as at exit, after the driver's: the log says that it is unknown
            return Device(ordinal)
        _devices[ordinal] = Device(ordinal, info.uuid, info.total_bytes)
    return _devices[ordinal]


def _wall_offset() -> int:
    comparisons = []
    for _ in range(_CLOCK_COMPARISONS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        comparisons.append((after - before, wall - (before + after) // 2))
    return min(comparisons)[1]


def _boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # no /proc: such processes are not merged by the clock
        return ""
