"""Events as plain data, and the log of this process at one moment.

The log contains everything that a reader in another process must know about this one. Any thread may call. This module has
no lock: the native core copies its ring of events under a lock of its own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_memory_saver import _core
from torch_memory_saver._files import default_role, own_rank
from torch_memory_saver._text import counted, mebibytes, printable, table
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["Device", "Event", "EventLog", "Level", "add_up", "events", "levels_before", "sample_free_memory"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: Number of comparisons of the two clocks. The fastest comparison is used.
_CLOCK_COMPARISONS = 16
#: Number of events that are printed.
_PRINTED = 20


@dataclass(frozen=True)
class EventLog:
    """The latest events of a process.

    Attributes:
        events: Events in the order in which they were recorded: by their ends, except for concurrent events.
        before: Levels of each tag on each device before the first event. The changes of the events lead from `before` to
            `after`, even if earlier events were dropped.
        after: Levels of each tag on each device after the last event.
        dropped: Number of earlier events that the ring has overwritten.
        capacity: Number of events that the ring keeps.
        taken_ns: Time at which the log was taken, on the clock of the events.
        wall_offset_ns: Nanoseconds to add to a time of an event to get nanoseconds since 1970.
        pid: Id of the process.
        rank: Rank in torch.distributed, or else from ``RANK``; None without either.
        role: Title or program of the process.
        host: Name of the machine.
        boot_id: Boot id of the machine's kernel; "" if it is unknown. Times of processes with the same boot id can be
            compared directly.
        devices: Devices that events and levels name.
        exited: Whether the log was taken at the exit of the process, so that it is complete.
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

    def __str__(self) -> str:
        rows = [("event", "tag", "device", "MiB", "ms", "seconds ago")]
        for event in self.events[-_PRINTED:]:
            failed = "" if event.status == "OK" else f": {event.status}"
            size, took = event.bytes or event.resident_change, event.ended_ns - event.began_ns
            rows.append(
                (
                    f"{event.operation} {event.phase or event.kind}{failed}".strip(),
                    printable(event.tag or ""),
                    str(event.device) if event.device >= 0 else "",
                    mebibytes(size) if size else "",
                    f"{took / 1e6:.3f}" if took else "",
                    f"{(self.taken_ns - event.ended_ns) / 1e9:.3f}",
                )
            )
        title = f"{counted(len(self.events), 'event')} of {printable(self.role)} (process {self.pid})"
        return "\n".join([f"{title}, the latest {len(rows) - 1}:", *table(rows, left=2)])

    @property
    def begin_ns(self) -> int:
        """The time from which the log knows the levels.

        This is the begin of the first event. If earlier events were dropped, it is the end of the first event, when that
        event was recorded, because dropped events may lie inside it.
        """
        if self.dropped and self.events:
            return self.events[0].ended_ns
        return min((event.began_ns for event in self.events), default=self.taken_ns)

    def levels(self) -> Iterator[tuple[int, Level]]:
        """Yield the levels over time, as (time in nanoseconds, level).

        The levels before the first event come first, at :attr:`begin_ns`. Then there is one level for each change.
        """
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
    """One event of a process.

    Times are nanoseconds of the monotonic clock, which all processes of a machine share.

    Attributes:
        kind: "allocate", "free", "begin" and "end" (of a pause or resume; "end" has its duration), "phase" (a part of one),
            "move" (what a pause or resume changed for one tag on one device), "repair" (an attempt to release the memory of
            a damaged allocation), or "memory" (the free memory of a device, see :func:`sample_free_memory`).
        operation: "pause", "resume" or another call that takes turns with them; "" for events outside of such calls.
        phase: "turn" (waits for another pause or resume), "synchronize", "plan" (finds what is to be copied, reserves host
            memory), "create" and "map" (physical memory), "copy", "unmap", "discard" (backups that are no longer needed) or
            "wait" (for memory that others hold). "" for other kinds.
        began_ns: Time at which the event began.
        ended_ns: Time at which the event ended; equal to `began_ns` for an event without a duration.
        busy_ns: Time spent inside a phase that alternates with another one; 0 for other events.
        call: Number of the pause or resume that the event belongs to, from 1 on; 0 for none.
        thread: Number that the kernel gives the thread.
        device: CUDA ordinal; -1 for none. A phase without a device concerns the whole call. Devices work in parallel, and
            phases of one device may overlap.
        tag: Tag of the allocations; None for none.
        address: Address of the allocation.
        allocations: Number of allocations of a "move", an "end" or a phase.
        bytes: Requested bytes for "allocate" and "free", released or mapped bytes for "end", mapped or copied bytes for a
            phase, free bytes of the device for "memory".
        copied_bytes: Bytes copied to or from backups, for "end".
        unchanged_bytes: Bytes that a pause did not copy, because retained backups have them already, for "end".
        total_bytes: Total bytes of the device, for "memory".
        resident_change: Change of the physical memory of the tag on the device, in bytes.
        paused_change: Change of the tag's reserved addresses without physical memory on the device, in bytes.
        backup_change: Change of the tag's backups of the device, in host memory, on disk or in shared objects, in bytes.
        status: "OK", or the code of the failure, such as "OUT_OF_DEVICE_MEMORY".
        driver_result: CUresult of the driver call that failed.
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
    unchanged_bytes: int = 0
    total_bytes: int = 0
    resident_change: int = 0
    paused_change: int = 0
    backup_change: int = 0
    status: str = "OK"
    driver_result: int = 0


@dataclass(frozen=True)
class Level:
    """The memory that the allocations of one tag on one device hold at one moment.

    Attributes:
        tag: Tag of the allocations.
        device: CUDA ordinal.
        resident_bytes: Bytes of physical memory that is mapped.
        paused_bytes: Bytes of reserved addresses without physical memory.
        backup_bytes: Bytes of backups in host memory, on disk or in shared objects.
    """

    tag: str
    device: int
    resident_bytes: int = 0
    paused_bytes: int = 0
    backup_bytes: int = 0

    def after(self, resident: int, paused: int, backup: int) -> Level:
        """Return the level after a change."""
        return Level(
            self.tag, self.device, self.resident_bytes + resident, self.paused_bytes + paused, self.backup_bytes + backup
        )


@dataclass(frozen=True)
class Device:
    """A device of a process.

    Attributes:
        device: CUDA ordinal in that process.
        uuid: UUID such as "GPU-5d5ba0d6-...", which is the same in every process of the machine; "" if the driver did not
            report it.
        total_bytes: Size of the device's memory; 0 if the driver did not report it.
    """

    device: int
    uuid: str = ""
    total_bytes: int = 0


def events() -> EventLog:
    """Return the latest events of this process.

    The function waits for no other work. While another thread pauses or resumes, the log has the "begin" of that call
    without an "end". The ring is not emptied. In a forked child the log has only the child's own events.
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
    """Set whether each pause and resume from now on records the free memory of its devices.

    The memory is recorded before and after the call. Each sample costs one driver call. Sampling is off by default, and
    ``TMS_DEBUG=events`` turns it on.
    """
    _core.set_event_samples(bool(on))


#: Devices that were queried, by ordinal. Their properties do not change during a process.
_devices: dict[int, Device] = {}


def add_up(levels: Iterable[Level]) -> tuple[Level, ...]:
    """Return one level for each tag and device, sorted by device and tag, without levels that hold nothing."""
    sums: dict[tuple[int, str], Level] = {}
    for level in levels:
        key = (level.device, level.tag)
        before = sums.get(key, Level(level.tag, level.device))
        sums[key] = before.after(level.resident_bytes, level.paused_bytes, level.backup_bytes)
    return tuple(
        sums[key] for key in sorted(sums) if sums[key].resident_bytes or sums[key].paused_bytes or sums[key].backup_bytes
    )


def levels_before(after: Iterable[Level], events: Iterable[Event]) -> tuple[Level, ...]:
    """Return the levels before the first of the events, computed from the levels after the last event."""
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
        unchanged_bytes=row.unchanged_bytes,
        total_bytes=row.total_bytes,
        resident_change=row.resident_change,
        paused_change=row.paused_change,
        backup_change=row.backup_change,
        status=row.status_name,
        driver_result=row.driver_result,
    )


def _devices_of(rows: Iterable[Event], levels: Iterable[Level]) -> tuple[Device, ...]:
    """Return the devices that the rows and levels name.

    The driver was in use for each of them, so the query loads nothing.
    """
    named = {row.device for row in rows} | {level.device for level in levels}
    return tuple(_device(ordinal) for ordinal in sorted(named) if ordinal >= 0)


def _device(ordinal: int) -> Device:
    if ordinal not in _devices:
        try:
            info = _core.device_info(ordinal)
        except TorchMemorySaverError:  # for example after the driver's exit: the UUID is unknown
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
