"""A bar a segment: its blocks, with those too small to be seen merged.

Owns what is shown of a device's segments. Held segments come first, then the others by size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model import Block, BlockState, Segment
from ..units import held_bytes
from .shared import OTHER, StackNumbers

__all__ = ["bars"]

#: So many segments have a bar.
_MOST_BARS = 120
#: A block smaller than this share of its segment is merged with small neighbours.
_SMALLEST_SHARE = 1 / 500


def bars(segments: Sequence[Segment], numbers: StackNumbers) -> dict[str, Any]:
    """The bars of a device's segments.

    Returns:
        "rows": of each segment its bytes, live bytes, state, tag, its held bytes, whether its pool is private, whether it is
        expandable, and its blocks as [offset, bytes, stack, whether it awaits a free, number of blocks].
        "folded": how many segments have no bar, their bytes and live bytes.
    """
    ordered = sorted(segments, key=_importance)
    folded = ordered[_MOST_BARS:]
    return {
        "rows": [
            {
                "bytes": segment.bytes,
                "live": segment.live_bytes,
                "state": segment.state,
                "tag": segment.tag,
                "held": held_bytes(segment),
                "private": segment.pool != (0, 0),
                "expandable": segment.piece_bytes > 0,
                "blocks": _blocks(segment, numbers),
            }
            for segment in ordered[:_MOST_BARS]
        ],
        "folded": [len(folded), sum(one.bytes for one in folded), sum(one.live_bytes for one in folded)],
    }


def _importance(segment: Segment) -> tuple[int, int, int]:
    return -held_bytes(segment), -segment.bytes, segment.address


def _blocks(segment: Segment, numbers: StackNumbers) -> list[list[int]]:
    smallest = segment.bytes * _SMALLEST_SHARE
    rows: list[list[int]] = []
    run: list[Block] = []
    for block in segment.blocks:
        small = block.bytes < smallest
        if small and block.live:
            run.append(block)
        elif not small:
            rows += _merged(run, segment, numbers)
            run = []
            if block.live:
                rows += _merged([block], segment, numbers)
    return rows + _merged(run, segment, numbers)


def _merged(run: Sequence[Block], segment: Segment, numbers: StackNumbers) -> list[list[int]]:
    """One row for neighbouring blocks; small free ones between them are drawn as if they were live."""
    if not run:
        return []
    stacks = {numbers[block.stack] for block in run}
    end = run[-1].address + run[-1].bytes
    return [
        [
            run[0].address - segment.address,
            end - run[0].address,
            stacks.pop() if len(stacks) == 1 else OTHER,
            int(all(block.state is BlockState.AWAITING_FREE for block in run)),
            len(run),
        ]
    ]
