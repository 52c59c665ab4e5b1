"""Divide the bytes of storages into objects of the shared store. Every process divides equal storages in the same way.

A pause cuts blocks in this way as well (``csrc/backup/content.c``), so that the objects of a published storage are those of
its pause: pieces of at most 64 MiB that begin and end at a vector of the kernel, and have at least 256 KiB. All other bytes
are packed one after the other, those of each device alone. A pack is an object of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .tensors import VECTOR, StorageShape

__all__ = ["MAX_BYTES", "MIN_BYTES", "Pack", "Piece", "Plan", "plan"]

#: The sizes of an object.
MAX_BYTES, MIN_BYTES = 64 << 20, 256 << 10


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some bytes of a storage."""

    storage: int
    offset: int
    bytes: int


@dataclasses.dataclass
class Pack:
    """Pieces of a device that are too small to be objects, and lie in one without gaps."""

    device: int
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    used: int = 0

    @property
    def bytes(self) -> int:
        """Size of the object. The bytes after the pieces are zeros."""
        return max(MIN_BYTES, -(-self.used // VECTOR) * VECTOR)


@dataclasses.dataclass
class Plan:
    """The objects of a model: first `pieces`, then `packs`."""

    pieces: list[Piece]
    packs: list[Pack]


def plan(shapes: Sequence[StorageShape]) -> Plan:
    """Return the objects that storages are cut into."""
    made = Plan([], [])
    filling: dict[int, Pack] = {}
    for index, shape in enumerate(shapes):
        offset = 0
        while offset < shape.bytes:
            size = min(shape.bytes - offset, MAX_BYTES)
            if shape.aligned and size >= MIN_BYTES:
                size -= size % VECTOR
                made.pieces.append(Piece(index, offset, size))
            else:
                _pack(made, filling, shape.device, Piece(index, offset, size))
            offset += size
    return made


def _pack(made: Plan, filling: dict[int, Pack], device: int, piece: Piece) -> None:
    pack = filling.get(device)
    if pack is None or pack.used + piece.bytes > MAX_BYTES:
        pack = filling[device] = Pack(device)
        made.packs.append(pack)
    pack.pieces.append(piece)
    pack.used += piece.bytes
