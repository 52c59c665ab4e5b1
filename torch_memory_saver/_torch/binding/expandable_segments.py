"""PyTorch's expandable segments, cut into the pieces that PyTorch has mapped one by one.

PyTorch lists a range of an expandable segment that is mapped without gaps as one segment. Each piece of it (2 or 20 MiB)
that is managed is an allocation of its own. Everywhere else in this package, a segment is one managed allocation or ordinary
memory. So the list, with its blocks, is cut at the borders of managed allocations.

This module has no state. Any thread may call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from torch_memory_saver import _core

__all__ = ["cut"]


def cut(segments: list[dict[str, Any]], rows: Iterable[_core.Segment]) -> list[dict[str, Any]]:
    """Return the segments of a snapshot. Expandable ones are cut at the borders of the managed allocations `rows`."""
    spans = sorted((row.address, row.address + row.reserved_bytes) for row in rows)
    return [piece for segment in segments for piece in _pieces(segment, spans)]


def _pieces(segment: dict[str, Any], spans: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    if not segment.get("is_expandable"):
        yield segment
        return
    borders = list(_borders(segment["address"], segment["address"] + segment["total_size"], spans))
    if len(borders) == 2:
        yield segment
        return
    blocks = _Blocks(segment)
    for begin, end in pairwise(borders):
        inside = blocks.take(end)
        yield segment | {
            "address": begin,
            "total_size": end - begin,
            "allocated_size": sum(block["size"] for block in inside if block["state"] == "active_allocated"),
            "active_size": sum(block["size"] for block in inside if block["state"] != "inactive"),
            "requested_size": sum(block.get("requested_size", 0) for block in inside),
            "blocks": inside,
        }


def _borders(begin: int, end: int, spans: list[tuple[int, int]]) -> Iterator[int]:
    """Return the borders of spans from `begin` to `end`, both of which are included, in order."""
    yield begin
    last = begin
    for span in spans[max(0, bisect_right(spans, (begin, 0)) - 1) :]:
        if span[0] >= end:
            break
        for border in span:
            if last < border < end:
                yield border
                last = border
    yield end


class _Blocks:
    """The blocks of a segment, in order. A block that does not fit is cut."""

    def __init__(self, segment: dict[str, Any]) -> None:
        self._blocks = iter(segment["blocks"])
        self._address = segment["address"]
        self._rest: dict[str, Any] | None = None

    def take(self, end: int) -> list[dict[str, Any]]:
        """Return the blocks up to an address."""
        taken: list[dict[str, Any]] = []
        while self._address < end:
            block = self._rest or next(self._blocks, None)
            self._rest = None
            if block is None:
                break
            if self._address + block["size"] > end:
                block, self._rest = self._halves(block, end - self._address)
            taken.append(block)
            self._address += block["size"]
        return taken

    def _halves(self, block: dict[str, Any], size: int) -> tuple[dict[str, Any], dict[str, Any]]:
        requested = block.get("requested_size", 0)
        first = {"address": self._address, "size": size, "requested_size": min(requested, size)}
        second = {
            "address": self._address + size,
            "size": block["size"] - size,
            "requested_size": max(0, requested - size),
        }
        return block | first, block | second
