"""Events as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Device", "Event", "Level", "add_up", "levels_before"]


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
