"""The arithmetic of memory reports, and the text of their values.

This module is plain Python. `memory` and `graph_report` use it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch_memory_saver._text import mebibytes

__all__ = ["Ranges", "count", "covered_bytes", "part", "peak_bytes", "size"]

_NOT_MEASURED = "not measured"


class Ranges:
    """A set of address ranges, such as the segments of a pool."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Make a set of ranges from pairs of an address and a size in bytes."""
        self._ranges = tuple((address, address + length) for address, length in ranges)

    def __contains__(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._ranges)


def peak_bytes(changes: Iterable[int], at_end: int) -> int:
    """Return the most bytes that were in use at once.

    Args:
        changes: The bytes that each allocation added and each free took away, in their order.
        at_end: The bytes in use after the last change.
    """
    total = most = 0
    for change in changes:
        total += change
        most = max(most, total)
    return at_end - total + most


def covered_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the bytes that lie in any of the ranges of (address, size).

    Bytes in several ranges count once.
    """
    covered = reached = 0
    for address, length in sorted(ranges):
        covered += max(0, address + length - max(address, reached))
        reached = max(reached, address + length)
    return covered


def size(value: int | None) -> str:
    """Return a number of bytes as text, in MiB."""
    return _NOT_MEASURED if value is None else f"{mebibytes(value)} MiB"


def count(value: int | None) -> str:
    """Return a number of things as text."""
    return _NOT_MEASURED if value is None else str(value)


def part(value: float | None) -> str:
    """Return a part of a whole as text, in per cent."""
    return _NOT_MEASURED if value is None else f"{value:.1%}"
