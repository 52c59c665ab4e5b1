"""Events as plain data, and the log of this process at one moment, with what a reader of other processes must know about it.

Any thread may call. Nothing is locked here. The native core copies its ring of events under a lock of its own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_memory_saver import _core
from torch_memory_saver._files import default_role, own_rank
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["Device", "Event", "EventLog", "Level", "add_up", "events", "levels_before", "sample_free_memory"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: How often the two clocks are compared. The comparison that took least counts.
_CLOCK_COMPARISONS = 16


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


@dataclass(frozen=True)
class Event:
    """One event. Times are nanoseconds of the monotonic clock, which all processes of a machine share.

    Attributes:
        kind: "allocate", "free", "begin" and "end" (of a pause or resume; "end" has its duration), "phase" (a part of one),
            "move" (what a pause or resume changed for one tag on one device), "repair" (an attempt to release the memory of
            a damaged allocation), or "memory" (the free memory of a device, see :func:`sample_free_memory`).
        operation: "pause", "resume" or another call that has their turn; "" for events outside these.
        phase: "turn" (waits for another pause or resume), "synchronize", "plan" (finds what is to be copied, reserves host
            memory), "create" and "map" (physical memory), "copy", "unmap", "discard" (backups that are no longer needed) or
            "wait" (for memory that others hold). "" for other kinds.
        began_ns: When it began.
        ended_ns: When it ended; the same for an event without a duration.
        busy_ns: Of a phase that alternates with another one: the time inside it. 0 for others.
        call: The number of the pause or resume that it belongs to, from 1 on; 0 for none.
        thread: The kernel's number of the thread.
        device: CUDA ordinal; -1 for none. A phase without a device concerns the whole call. Devices work in parallel, and
            phases of one device may overlap.
        tag: Of the allocations; None for none.
        address: Of the allocation.
        allocations: Their number: of a "move", an "end" or a phase.
        bytes: "allocate" and "free": as requested. "end": released or mapped. A phase: mapped or copied. "memory": free.
        copied_bytes: "end": copied to or from backups.
        total_bytes: "memory": of the device.
        resident_change: By how much the physical memory of the tag on the device changed.
        paused_change: The same for reserved addresses without physical memory.
        backup_change: The same for backups, in host memory or on disk.
        status: "OK", or the code of the failure, such as "OUT_OF_DEVICE_MEMORY".
        driver_result: The CUresult of the driver call that failed.
    """

    kind: str
    operation: str = ""
    phase: str = ""
    began_ns: int = 0
    ended_ns: int = 0
    busy_ns: int = 0
    call: int = 0
    thread: int = 0
    device: int = -1
    tag: str | None = None
    address: int = 0
    allocations: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    total_bytes: int = 0
    resident_change: int = 0
    paused_change: int = 0
    backup_change: int = 0
    status: str = "OK"
    driver_result: int = 0


@dataclass(frozen=True)
class Level:
    """What the allocations of one tag on one device hold at one moment.

    Attributes:
        tag: Of the allocations.
        device: CUDA ordinal.
        resident_bytes: Physical memory that is mapped.
        paused_bytes: Reserved addresses without physical memory.
        backup_bytes: In host memory or on disk.
    """

    tag: str
    device: int
    resident_bytes: int = 0
    paused_bytes: int = 0
    backup_bytes: int = 0

    def after(self, resident: int, paused: int, backup: int) -> Level:
        """The level after a change."""
        return Level(
            self.tag, self.device, self.resident_bytes + resident, self.paused_bytes + paused, self.backup_bytes + backup
        )


@dataclass(frozen=True)
class Device:
    """A device of a process.

    Attributes:
        device: CUDA ordinal in that process.
        uuid: Such as "GPU-5d5ba0d6-...", by which every process of the machine knows it; "" if the driver did not say.
        total_bytes: Of its memory; 0 if the driver did not say.
    """

    device: int
    uuid: str = ""
    total_bytes: int = 0


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


#: The devices that were asked for, by ordinal. What they are does not change during a process.
_devices: dict[int, Device] = {}


def add_up(levels: Iterable[Level]) -> tuple[Level, ...]:
    """One level for each tag and device, sorted by device and tag; without those that hold nothing."""
    sums: dict[tuple[int, str], Level] = {}
    for level in levels:
        key = (level.device, level.tag)
        before = sums.get(key, Level(level.tag, level.device))
        sums[key] = before.after(level.resident_bytes, level.paused_bytes, level.backup_bytes)
    return tuple(
        sums[key] for key in sorted(sums) if sums[key].resident_bytes or sums[key].paused_bytes or sums[key].backup_bytes
    )


def levels_before(after: Iterable[Level], events: Iterable[Event]) -> tuple[Level, ...]:
    """The levels before the first of the events, from those after the last."""
    undone = (
        Level(event.tag, event.device, -event.resident_change, -event.paused_change, -event.backup_change)
        for event in events
        if event.tag is not None
    )
    return add_up((*after, *undone))


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
