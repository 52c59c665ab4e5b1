"""The model's knowledge of an allocation: its contents, where they are, and the effect of a pause and a resume on them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from model_machine import GRANULARITY, MIB, POISON, Span

from torch_memory_saver import _core

BACKUPS = (_core.BACKUP_NONE, _core.BACKUP_PINNED, _core.BACKUP_MMAP, _core.BACKUP_DISK)
BACKUP_NAMES = dict(zip(BACKUPS, ("none", "pinned", "mmap", "disk"), strict=True))
STATE_NAMES = ("ACTIVE", "PAUSING", "PAUSED", "RESUMING", "DAMAGED", "REPAIRING")
ACTIVE, PAUSED, DAMAGED = _core.STATE_ACTIVE, _core.STATE_PAUSED, _core.STATE_DAMAGED
ON_HOST = (_core.BACKUP_PINNED, _core.BACKUP_MMAP)
DEVICES = 2

Tags = tuple[str, ...] | None

_POISON: dict[int, bytes] = {}
#: Of idle host memory; TMS_HOST_POOL_LIMIT_MB, which the core reads once.
pool_limit = int(os.environ.get("TMS_HOST_POOL_LIMIT_MB") or 1 << 30) * MIB
#: Tags that this process has ever allocated with: the core remembers them.
used_tags: set[str] = set()


def poison(size: int) -> bytes:
    """The contents of new physical memory on the simulated GPU."""
    if size not in _POISON:
        if len(_POISON) > 64:
            _POISON.clear()
        _POISON[size] = bytes([POISON]) * size
    return _POISON[size]


def selects(tags: Tags, tag: str) -> bool:
    return tags is None or tag in tags


Ranges = list[tuple[int, int]]


@dataclass
class PauseChoice:
    """The options of a pause: where contents go instead of the region's setting, and the live bytes of some allocations."""

    backup: int | None = None
    live: dict[int, Ranges] | None = None  # by address; of others everything is
    preserves: bool = False  # what `live` has of memory without a backup is kept

    def kind(self, allocation: Allocation) -> int:
        if self.backup is None and self.preserves and allocation.backup == _core.BACKUP_NONE:
            return _core.BACKUP_PINNED if allocation.address in (self.live or {}) else _core.BACKUP_NONE
        return self.kind_without_preserving(allocation)

    def kind_without_preserving(self, allocation: Allocation) -> int:
        return allocation.backup if self.backup is None else self.backup

    def kept(self, allocation: Allocation) -> Ranges:
        """What the pause keeps of it."""
        kind = self.kind(allocation)
        if kind == _core.BACKUP_NONE:
            return []
        if self.live is not None and allocation.address in self.live:
            return merged(self.live[allocation.address])
        return [(0, allocation.size)]

    def copied(self, allocation: Allocation) -> int:
        return total(self.kept(allocation))


@dataclass
class ResumeChoice:
    host_policy: int = _core.HOST_DEFAULT
    zero: bool = False
    guard: bool = False

    def source(self, allocation: Allocation) -> int:
        """Where the contents of an allocation that it resumes are from."""
        all_that_was_live = allocation.saved != _core.BACKUP_NONE and not allocation.only_preserved
        if all_that_was_live or allocation.kept == [(0, allocation.size)]:
            return _core.CONTENTS_RESTORED
        if self.zero:
            return _core.CONTENTS_ZEROED
        return _core.CONTENTS_GUARD if self.guard else _core.CONTENTS_UNDEFINED

    def new_memory(self, size: int) -> bytes:
        """What it holds after the resume where no contents are restored."""
        if self.zero:
            return bytes(size)
        return bytes([_core.GUARD_BYTE]) * size if self.guard else poison(size)


def total(ranges: Ranges) -> int:
    return sum(end - begin for begin, end in ranges)


def merged(ranges: Ranges) -> Ranges:
    """Without the empty ones, and touching ones as one."""
    result: Ranges = []
    for begin, end in ranges:
        if result and result[-1][1] == begin and begin < end:
            result[-1] = (result[-1][0], end)
        elif begin < end:
            result.append((begin, end))
    return result


@dataclass(eq=False)
class Allocation:
    name: int
    address: int
    size: int
    device: int
    tag: str
    backup: int
    contents: bytes | None  # what it holds, or held when it was paused; None: lost
    policy: int = _core.HOST_DEFAULT
    runs: bool = True  # it may be in a run with others
    state: int = ACTIVE
    buffer: int = 0  # bytes of its host buffer
    buffer_kind: int = _core.BACKUP_NONE  # of the last one
    saved: int = _core.BACKUP_NONE  # where its contents are, or are retained
    kept: Ranges = field(default_factory=list)  # of them, if saved
    copy: bytes | None = None  # the contents that `kept` are parts of, if they are in host memory
    file: bool = False
    only_preserved: bool = False  # of them
    source: int = _core.CONTENTS_OWN  # where its contents are from
    guarded: bool | None = False  # whether its addresses show the guard page; None: unknown, after failures
    range: Span | None = None  # the reservation that it lies in
    run: Span | None = None  # while it holds memory: the addresses of its handle
    resumed: bool = False  # at least once

    @property
    def reserved(self) -> int:
        return -(-self.size // GRANULARITY) * GRANULARITY

    @property
    def span(self) -> Span:
        return Span(self.address, self.reserved)

    @property
    def whole_copy(self) -> bytes | None:
        return self.copy if self.kept == [(0, self.size)] else None

    def __repr__(self) -> str:
        return f"#{self.name}"

    def described(self) -> str:
        return (
            f"#{self.name} at {self.address:#x}: {self.size} bytes on device {self.device}, tag {self.tag!r}, "
            f"backup {BACKUP_NAMES[self.backup]}, {STATE_NAMES[self.state]}"
        )

    def row(self) -> tuple[int, int, int, int, int, int, int, str, int]:
        """The expected row of _core.segments()."""
        held = total(self.kept) if self.saved else self.size * self.file
        sizes = (self.size, self.reserved, held if self.state in (ACTIVE, PAUSED) else 0)
        return (self.address, *sizes, self.device, self.state, self.backup, self.tag, self.source)

    def becomes_paused(self, state: int, choice: PauseChoice) -> bool:
        """Whether its host buffer, if it had one, is another one now, or none."""
        self.state, self.saved, self.kept = state, choice.kind(self), choice.kept(self)
        self.only_preserved = self.saved != choice.kind_without_preserving(self)
        on_host, bytes_kept = self.saved in ON_HOST, total(self.kept)
        self.copy = self.contents if on_host else None
        if self.saved == _core.BACKUP_NONE:
            self.contents = None
        to_disk = self.saved == _core.BACKUP_DISK and bytes_kept > 0
        self.file = to_disk or (self.file and self.backup == _core.BACKUP_DISK)
        if on_host and 0 < bytes_kept <= self.buffer and self.buffer_kind == self.saved:
            return False
        self.buffer, self.buffer_kind = bytes_kept if on_host else 0, self.saved
        return True

    def becomes_active(self, choice: ResumeChoice, process_policy: int) -> bool:
        """Whether its host buffer has gone."""
        self.state = ACTIVE
        self.guarded = False
        self.source = choice.source(self)
        new = choice.new_memory(self.size)
        if self.contents is None:
            self.contents = new
        elif self.kept != [(0, self.size)]:
            whole = bytearray(new)
            for begin, end in self.kept:
                whole[begin:end] = self.contents[begin:end]
            self.contents = bytes(whole)
        retains = (choice.host_policy or self.policy or process_policy) == _core.HOST_RETAIN
        if retains and self.saved == _core.BACKUP_DISK and self.file:
            return False
        self.file = self.file and self.backup == _core.BACKUP_DISK
        if retains and self.saved in ON_HOST:
            return False
        self.loses_backup()
        return True

    def gives_up(self) -> None:
        """It was paused when a pause with backup="discard" selected it: its backup has gone. A damaged one loses the
        contents only."""
        if self.saved == _core.BACKUP_NONE:
            return
        self.contents, self.only_preserved = None, False
        if self.state == PAUSED:
            self.buffer, self.file = 0, False
        self.loses_contents_of_backup()

    def loses_backup(self) -> None:
        self.buffer = 0
        self.loses_contents_of_backup()

    def loses_contents_of_backup(self) -> None:
        self.saved, self.kept, self.copy = _core.BACKUP_NONE, [], None


@dataclass(eq=False)
class View:
    """A HostBuffer that the test holds on to."""

    buffer: Any
    owner: Allocation | None  # whose backup it still is
    address: int
    buffer_bytes: int
    contents: bytes | None
