"""The use of managed memory at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_memory_saver import _core

__all__ = ["Allocation", "PreservedBlock", "Stats", "TagUsage", "take_stats"]

_STATES = {
    _core.STATE_ACTIVE: "active",
    _core.STATE_PAUSING: "pausing",
    _core.STATE_PAUSED: "paused",
    _core.STATE_RESUMING: "resuming",
    _core.STATE_DAMAGED: "damaged",
    _core.STATE_REPAIRING: "repairing",
}
_BACKUPS = {number: name for name, number in _core.BACKUP_KINDS.items()}


@dataclass(frozen=True)
class Allocation:
    """One managed allocation. In PyTorch this is a segment of its allocator, which may hold several tensors.

    Attributes:
        address: Of the first byte, on the device.
        bytes: Requested size.
        reserved_bytes: Of the address range, and of physical memory while it is resident.
        backup_bytes: Held in a backup now.
        device: CUDA ordinal.
        state: "active", "pausing", "paused", "resuming", "damaged" or "repairing" (damaged, and a call is retrying the
            release).
        backup: "none", "pinned", "mmap" or "disk".
        tag: The region's.
    """

    address: int
    bytes: int
    reserved_bytes: int
    backup_bytes: int
    device: int
    state: str
    backup: str
    tag: str


@dataclass(frozen=True)
class PreservedBlock:
    """A storage that keeps its contents through pauses of memory without a backup.

    Attributes:
        address: Of the first byte, on the device.
        bytes: Its size.
        device: CUDA ordinal.
        tag: Of the memory that it lies in.
    """

    address: int
    bytes: int
    device: int
    tag: str


@dataclass(frozen=True)
class TagUsage:
    """The allocations of one tag, or of all tags.

    Damaged ones count in ``allocations`` and ``bytes``, but neither as resident nor as paused, because their memory cannot
    be used. The counter ``resident_bytes`` of :class:`Stats` includes memory that is still mapped.

    Attributes:
        allocations: Their number, in every state.
        bytes: Requested size.
        resident_bytes: Physical device memory of those that are active, pausing or repairing.
        paused_bytes: Physical device memory that a resume maps for those that are paused or resuming.
        backup_bytes: Held in backups now.
    """

    allocations: int = 0
    bytes: int = 0
    resident_bytes: int = 0
    paused_bytes: int = 0
    backup_bytes: int = 0


@dataclass(frozen=True)
class Stats:
    """The current use of managed memory.

    Attributes:
        total: Every allocation.
        tags: By tag.
        allocations: Each, in order of allocation.
        counters: The core's counters by name: see ``tms_counters_t`` in ``tms.h``.
        host_resident_bytes: Host memory in use for backups: memory with contents, idle memory of the pool, and memory that
            is being released.
        host_pooled_bytes: The part of it that is idle in the pool (``host_memory="pool"``, ``reserve_host_memory``).
        guard: Whether guard mode is on.
        guarded_bytes: Paused addresses that show a page of 0xFF bytes now.
    """

    total: TagUsage
    tags: Mapping[str, TagUsage]
    allocations: tuple[Allocation, ...]
    counters: Mapping[str, int]
    host_resident_bytes: int = 0
    host_pooled_bytes: int = 0
    guard: bool = False
    guarded_bytes: int = 0


def take_stats() -> Stats:
    """Takes a snapshot. Rows and counters are read one after the other, so changes by other threads may make them differ."""
    allocations = tuple(
        Allocation(
            address=row.address,
            bytes=row.bytes,
            reserved_bytes=row.reserved_bytes,
            backup_bytes=row.backup_bytes,
            device=row.device,
            state=_STATES.get(row.state, str(row.state)),
            backup=_BACKUPS.get(row.backup, str(row.backup)),
            tag=row.tag,
        )
        for row in _core.segments()
    )
    tags: dict[str, list[Allocation]] = {}
    for allocation in allocations:
        tags.setdefault(allocation.tag, []).append(allocation)
    counters = _core.counters()
    return Stats(
        total=_sum_up(allocations),
        tags={tag: _sum_up(rows) for tag, rows in tags.items()},
        allocations=allocations,
        counters=counters,
        host_resident_bytes=counters["host_resident_bytes"],
        host_pooled_bytes=counters["host_pooled_bytes"],
        guard=counters["guard"] != 0,
        guarded_bytes=counters["guarded_bytes"],
    )


def _sum_up(rows: tuple[Allocation, ...] | list[Allocation]) -> TagUsage:
    # Memory is mapped while a pause copies it. An unfinished resume does not count as resident.
    resident = sum(row.reserved_bytes for row in rows if row.state in ("active", "pausing", "repairing"))
    return TagUsage(
        allocations=len(rows),
        bytes=sum(row.bytes for row in rows),
        resident_bytes=resident,
        paused_bytes=sum(row.reserved_bytes for row in rows if row.state in ("paused", "resuming")),
        backup_bytes=sum(row.backup_bytes for row in rows),
    )
