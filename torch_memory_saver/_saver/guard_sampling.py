"""How much of device memory still holds the fill pattern of guard mode: samples of pieces of it, by one call of the core.

A piece is looked at in parts, each from its first byte to its last. A part counts as unwritten if every byte of it is the
pattern: a single byte of that value is in most data. A sample has a few short parts, the first at the begin of the piece,
the last at its end, and the others evenly between. A whole piece has many parts, without gaps.

Pieces may overlap: no byte is copied twice. Owns no state. Any thread.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["PARTS", "PART_BYTES", "Piece", "Sampled", "sample"]

#: A sample's parts, and the bytes of each: enough to meet one missing shard of eight, little enough for 10 000 blocks.
PARTS = 8
PART_BYTES = 64
#: Parts begin at multiples of this number, so that they hold whole numbers.
_ALIGNMENT = 16
#: A whole piece is divided into so many parts at most, of so many bytes at least.
_WHOLE_PARTS = 1024
_WHOLE_PART_BYTES = 4096
#: The bytes that one call of the core copies at most: it needs so much pinned host memory.
_CALL_BYTES = 256 << 20

#: The first byte, and the one after the last.
_Range = tuple[int, int]
#: Counts the bytes of the fill pattern in ranges that are in order and do not overlap; None: not resident any more.
Count = Callable[[bytes], Sequence[int | None]]


class Piece(NamedTuple):
    """Device memory to be looked at. `whole`: from end to end."""

    address: int
    bytes: int
    whole: bool


class Sampled(NamedTuple):
    """What was found of a piece, in bytes. `unwritten`: of parts that hold the pattern from end to end."""

    looked_at: int
    unwritten: int


def sample(pieces: Sequence[Piece], count: Count) -> tuple[list[Sampled | None], int]:
    """Looks at the pieces. Returns what was found of each, None for those that are not resident any more, and the bytes that
    were copied."""
    parts = [[*_parts(piece)] for piece in pieces]
    counts = _Counts(itertools.chain.from_iterable(parts), count)
    return [counts.of(each) for each in parts], counts.copied


def _parts(piece: Piece) -> Iterator[_Range]:
    begin, end = piece.address, piece.address + piece.bytes
    if piece.whole:
        size = max(_WHOLE_PART_BYTES, -(-piece.bytes // _WHOLE_PARTS))
        starts: Iterable[int] = range(begin, end, size)
    elif piece.bytes <= PARTS * PART_BYTES:
        size, starts = PART_BYTES, range(begin, end, PART_BYTES)
    else:
        size, last = PART_BYTES, piece.bytes - PART_BYTES
        inner = (begin + number * last // (PARTS - 1) // _ALIGNMENT * _ALIGNMENT for number in range(PARTS - 1))
        starts = (*inner, begin + last)
    return ((start, min(start + size, end)) for start in starts)


class _Counts:
    """The counts of ranges that may overlap."""

    def __init__(self, ranges: Iterable[_Range], count: Count) -> None:
        apart = [*_apart(ranges)]
        self._begins = [begin for begin, _ in apart]
        self._counts: list[int | None] = []
        self.copied = 0
        for call in _calls(apart):
            self._counts += count(array("Q", itertools.chain.from_iterable(call)).tobytes())
        self._sizes = [end - begin for begin, end in apart]
        self.copied = sum(size for size, number in zip(self._sizes, self._counts, strict=True) if number is not None)

    def of(self, parts: Iterable[_Range]) -> Sampled | None:
        looked_at = unwritten = 0
        for begin, end in parts:
            found = 0
            for index in range(bisect.bisect_left(self._begins, begin), bisect.bisect_left(self._begins, end)):
                number = self._counts[index]
                if number is None:
                    return None
                found += number
            looked_at += end - begin
            unwritten += end - begin if found == end - begin else 0
        return Sampled(looked_at, unwritten)


def _apart(ranges: Iterable[_Range]) -> Iterator[_Range]:
    """The same bytes in ranges that do not overlap, cut where one of the given ranges begins or ends, and not too long for a
    call."""
    depth: dict[int, int] = {}
    for begin, end in ranges:
        depth[begin] = depth.get(begin, 0) + 1
        depth[end] = depth.get(end, 0) - 1
    inside = 0
    for begin, end in itertools.pairwise(sorted(depth)):
        inside += depth[begin]
        if inside:
            yield from ((start, min(start + _CALL_BYTES, end)) for start in range(begin, end, _CALL_BYTES))


def _calls(ranges: Sequence[_Range]) -> Iterator[Sequence[_Range]]:
    """The ranges of each call: at least one call is made, which checks what all of them need."""
    first = size = 0
    for number, (begin, end) in enumerate(ranges):
        if size + end - begin > _CALL_BYTES and size:
            yield ranges[first:number]
            first, size = number, 0
        size += end - begin
    yield ranges[first:]
