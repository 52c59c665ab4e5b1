"""One allocation of a scenario: its contents, and where they are."""

from __future__ import annotations

import ctypes
import functools
import random
from dataclasses import dataclass

from torch_memory_saver import _core as core

NONE, PINNED, MMAP, DISK = core.BACKUP_NONE, core.BACKUP_PINNED, core.BACKUP_MMAP, core.BACKUP_DISK
SHARED = core.BACKUP_SHARED
ON_HOST = (PINNED, MMAP)
ACTIVE, PAUSING, PAUSED = core.STATE_ACTIVE, core.STATE_PAUSING, core.STATE_PAUSED
RESUMING, DAMAGED, REPAIRING = core.STATE_RESUMING, core.STATE_DAMAGED, core.STATE_REPAIRING
STATE_NAMES = {ACTIVE: "ACTIVE", PAUSING: "PAUSING", PAUSED: "PAUSED"}
STATE_NAMES |= {RESUMING: "RESUMING", DAMAGED: "DAMAGED", REPAIRING: "REPAIRING"}

DEVICES, DEVICE_MEMORY = 2, 512 << 20
GRANULARITY = GUARD_PAGE = 2 << 20  # of the simulated GPU


#: A prime: no chunk of a copy has the same bytes as another one.
_PERIOD = 65_537


@functools.lru_cache(maxsize=64)
def pattern(seed: int, size: int) -> bytes:
    return (random.Random(seed).randbytes(_PERIOD) * (size // _PERIOD + 1))[:size]


@dataclass
class Block:
    """One allocation. `known`: its contents must be `data`, wherever they are now, in all `ranges`."""

    address: int
    size: int
    tag: str
    kind: int
    device: int
    data: bytes
    known: bool = True
    #: Offsets of the known contents, [begin, end).
    ranges: tuple[tuple[int, int], ...] = ()
    #: The live part: a pause with live bytes keeps only that.
    live: tuple[tuple[int, int], ...] | None = None
    paused: bool = False
    #: Where the contents are; where the last pause was to put them, and whether it asked which bytes are live.
    stored: int = NONE
    chosen: tuple[int, bool] = (NONE, False)
    #: The byte with which the last resume was to fill memory without contents.
    filler: int | None = None
    #: The contents of the last backup in host memory.
    saved: bytes | None = None
    #: It shares a handle with others.
    in_run: bool = False

    def __post_init__(self) -> None:
        self.stored, self.chosen, self.ranges = self.kind, (self.kind, False), ((0, self.size),)

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, self.size)
        self.data, self.known, self.ranges = data, True, ((0, self.size),)

    def becomes_paused(self) -> None:
        kind, thinned = self.chosen
        self.paused, self.stored = True, kind
        self.known &= kind != NONE
        if kind != NONE and thinned and self.live is not None:
            self.ranges = self.live
        if kind in ON_HOST:
            self.saved = self.data

    def becomes_active(self) -> None:
        self.paused = False
        if self.filler is None or (self.known and self.ranges == ((0, self.size),)):
            return
        whole = bytearray([self.filler]) * self.size
        for begin, end in self.ranges if self.known else ():
            whole[begin:end] = self.data[begin:end]
        self.data, self.known, self.ranges = bytes(whole), True, ((0, self.size),)
