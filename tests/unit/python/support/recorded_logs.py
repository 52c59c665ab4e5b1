"""Logs of processes that never ran: events in the form in which the core records them."""

from __future__ import annotations

from torch_memory_saver.observe.events import Device, Event, EventLog
from torch_memory_saver.observe.events.log import Level, add_up, levels_before

__all__ = ["GIB", "MIB", "Process"]

MIB, GIB = 1 << 20, 1 << 30
_CAPACITY = 1 << 20


class Process:
    """Records what a process did, in the order of the calls. Times are nanoseconds.

    Args:
        pid: Its number.
        uuid: Of its only GPU; "" if the driver did not say.
        ordinal: Of that GPU in this process.
        total: The GPU's memory.
    """

    def __init__(
        self,
        pid: int,
        *,
        uuid: str = "GPU-a",
        ordinal: int = 0,
        total: int = 8 * GIB,
        boot_id: str = "boot",
        host: str = "node",
        role: str = "engine",
        rank: int | None = None,
    ) -> None:
        self.pid, self.uuid, self.ordinal, self.total = pid, uuid, ordinal, total
        self.boot_id, self.host, self.role, self.rank = boot_id, host, role, rank
        self.events: list[Event] = []
        self.calls = 0

    def allocate(self, at: int, tag: str, size: int) -> None:
        self._changed("allocate", at, tag, size)

    def free(self, at: int, tag: str, size: int) -> None:
        self._changed("free", at, tag, -size)

    def fail(self, at: int, tag: str, size: int) -> None:
        self.events.append(
            Event(
                "allocate",
                began_ns=at,
                ended_ns=at,
                device=self.ordinal,
                tag=tag,
                bytes=size,
                status="OUT_OF_DEVICE_MEMORY",
                driver_result=2,
            )
        )

    def pause(self, at: int, tag: str, size: int, backup: int = 0, ns: int = 100) -> None:
        self._call("pause", at, tag, -size, size, backup, ns)

    def resume(self, at: int, tag: str, size: int, backup: int = 0, ns: int = 100) -> None:
        self._call("resume", at, tag, size, -size, -backup, ns)

    def begin(self, at: int, operation: str) -> None:
        """A call that has not ended."""
        self.calls += 1
        self.events.append(Event("begin", operation, began_ns=at, ended_ns=at, call=self.calls))

    def sample(self, at: int, free: int) -> None:
        self.events.append(
            Event("memory", "pause", began_ns=at, ended_ns=at, device=self.ordinal, bytes=free, total_bytes=self.total)
        )

    def log(self, taken: int, *, exited: bool = False, capacity: int = _CAPACITY) -> EventLog:
        """The log at a moment, from a ring of this capacity."""
        after = add_up(
            Level(event.tag, event.device, event.resident_change, event.paused_change, event.backup_change)
            for event in self.events
            if event.tag is not None
        )
        kept = tuple(self.events[-capacity:])
        return EventLog(
            events=kept,
            before=levels_before(after, kept),
            after=after,
            dropped=len(self.events) - len(kept),
            capacity=capacity,
            taken_ns=taken,
            wall_offset_ns=10**18,
            pid=self.pid,
            rank=self.rank,
            role=self.role,
            host=self.host,
            boot_id=self.boot_id,
            devices=(Device(self.ordinal, self.uuid, self.total),) if self.uuid else (),
            exited=exited,
        )

    def _changed(self, kind: str, at: int, tag: str, change: int) -> None:
        self.events.append(
            Event(kind, began_ns=at, ended_ns=at, device=self.ordinal, tag=tag, bytes=abs(change), resident_change=change)
        )

    def _call(self, operation: str, at: int, tag: str, resident: int, paused: int, backup: int, ns: int) -> None:
        self.calls += 1
        common = {"operation": operation, "call": self.calls, "thread": self.pid}
        self.events += [
            Event("begin", began_ns=at, ended_ns=at, **common),
            Event("phase", phase="turn", began_ns=at, ended_ns=at + ns // 10, **common),
            Event(
                "phase",
                phase="copy",
                began_ns=at + ns // 10,
                ended_ns=at + ns // 2,
                device=self.ordinal,
                bytes=abs(backup),
                **common,
            ),
            Event(
                "move",
                began_ns=at + ns,
                ended_ns=at + ns,
                device=self.ordinal,
                tag=tag,
                allocations=1,
                resident_change=resident,
                paused_change=paused,
                backup_change=backup,
                **common,
            ),
            Event(
                "end", began_ns=at, ended_ns=at + ns, allocations=1, bytes=abs(resident), copied_bytes=abs(backup), **common
            ),
        ]
