"""What PyTorch gives back to the driver at once: a segment, or one piece of an expandable segment.

A unit without a live byte is *cached*: releasing the cache frees it. One that few live bytes keep is *held*: its free
bytes cannot be given back.

Owns these two words and the threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..model import Block, Segment

__all__ = ["HELD_SHARE", "Unit", "held_bytes", "units"]

#: A unit is held by few live bytes if less than this share of it is live.
HELD_SHARE = 0.25


class Unit(NamedTuple):
    """A segment, or a piece of one.

    Attributes:
        bytes: The size.
        live: The live blocks that lie in it, at least in part, each with its bytes in it.
        is_piece: Whether it is a piece of an expandable segment.
    """

    bytes: int
    live: tuple[tuple[Block, int], ...]
    is_piece: bool

    @property
    def live_bytes(self) -> int:
        """The live bytes in it."""
        return sum(size for _, size in self.live)

    @property
    def free_bytes(self) -> int:
        """The other bytes."""
        return self.bytes - self.live_bytes

    @property
    def cached(self) -> bool:
        """Whether nothing in it is live."""
        return not self.live

    @property
    def held(self) -> bool:
        """Whether few live bytes keep it."""
        return 0 < self.live_bytes < HELD_SHARE * self.bytes


def units(segments: Iterable[Segment]) -> Iterator[Unit]:
    """The units of resident segments, by address. Paused segments hold no device memory, and have none."""
    for segment in segments:
        if not segment.paused:
            yield from _units(segment)


def held_bytes(segment: Segment) -> int:
    """The free bytes of a segment that cannot be given back, because few live bytes keep them."""
    return sum(unit.free_bytes for unit in units([segment]) if unit.held)


def _units(segment: Segment) -> Iterator[Unit]:
    live = [block for block in segment.blocks if block.live]
    end = segment.address + segment.bytes
    first = 0
    for begin in range(segment.address, end, segment.piece_bytes or segment.bytes or 1):
        stop = min(begin + (segment.piece_bytes or segment.bytes), end)
        inside = []
        while first < len(live) and live[first].address < stop:
            block = live[first]
            block_end = block.address + block.bytes
            inside.append((block, min(block_end, stop) - max(block.address, begin)))
            if block_end > stop:  # its rest lies in the next piece
                break
            first += 1
        yield Unit(stop - begin, tuple(inside), segment.piece_bytes > 0)
