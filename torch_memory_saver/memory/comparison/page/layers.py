"""The active-memory timeline of a device: allocations as layers in the order of time, from the recorded history.

The horizontal axis is the number of the event, as on PyTorch's page memory_viz. Blocks that are live at the end and
have no event were there from the beginning. Small allocations are folded by call stack into layers at the bottom.

Owns what is drawn of the history. Sizes of freed memory are as requested, those of live blocks as the allocator rounded
them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch_memory_saver._stacks import CallStack, Origin

from ...model import Block, Event
from .shared import StackNumbers

__all__ = ["layers"]

#: So many allocations are drawn one by one, the largest.
_MOST_ALLOCATIONS = 1200
#: So many call stacks have a layer of their own for their small allocations; the others share one.
_MOST_LAYERS = 16
#: Points of time of a layer.
_SAMPLES = 240

_UNKNOWN = CallStack((), Origin.UNRECORDED)


class _Allocation:
    """From event `start` to event `end`, exclusive."""

    __slots__ = ("bytes", "end", "stack", "start")

    def __init__(self, start: int, end: int, size: int, stack: CallStack) -> None:
        self.start, self.end, self.bytes, self.stack = start, end, size, stack


def layers(events: Sequence[Event], order: Sequence[Block], numbers: StackNumbers) -> dict[str, Any]:
    """The timeline of a device.

    Args:
        events: Its history, oldest first.
        order: Its live blocks, in the order of their allocation.
        numbers: Of the call stacks.

    Returns:
        "events": their number. "allocations": [start, end, bytes, stack], in order. "layers": the folded ones, with bytes at
        each of `samples` points. "folded": how many allocations these have.
    """
    allocations = _allocations(events, order)
    kept = set(heapq.nlargest(_MOST_ALLOCATIONS, range(len(allocations)), key=lambda number: allocations[number].bytes))
    folded = [one for number, one in enumerate(allocations) if number not in kept]
    return {
        "events": len(events),
        "allocations": [
            [one.start, one.end, one.bytes, numbers[one.stack]] for number, one in enumerate(allocations) if number in kept
        ],
        "layers": _layers(folded, max(len(events), 1), numbers),
        "folded": len(folded),
    }


def _allocations(events: Sequence[Event], order: Sequence[Block]) -> list[_Allocation]:
    live = {block.address: block for block in order}
    end = max(len(events), 1)
    begun: dict[int, _Allocation] = {}
    early: list[_Allocation] = []
    recorded: list[_Allocation] = []
    for number, event in enumerate(events):
        if event.action == "alloc":
            begun[event.address] = _Allocation(number, end, event.bytes, event.stack)
            recorded.append(begun[event.address])
        elif event.action in ("free_completed", "free"):
            found = begun.pop(event.address, None)
            if found is None:
                early.append(_Allocation(0, number, event.bytes, _UNKNOWN))
            else:
                found.end = number
    for address, allocation in begun.items():
        if address in live:
            allocation.bytes = live[address].bytes
    present = [_Allocation(0, end, block.bytes, block.stack) for block in order if block.address not in begun]
    return present + early + recorded


def _layers(folded: Sequence[_Allocation], end: int, numbers: StackNumbers) -> list[dict[str, Any]]:
    weight: Counter[int] = Counter()
    for one in folded:
        weight[numbers[one.stack]] += one.bytes
    own = {stack for stack, _ in weight.most_common(_MOST_LAYERS)}
    changes: dict[int, list[int]] = {}
    for one in folded:
        number = numbers[one.stack]
        change = changes.setdefault(number if number in own else 0, [0] * (_SAMPLES + 1))
        change[_sample(one.start, end)] += one.bytes
        change[_sample(one.end, end)] -= one.bytes
    rows = []
    for stack, change in changes.items():
        values, total = [], 0
        for difference in change[:_SAMPLES]:
            total += difference
            values.append(total)
        rows.append({"stack": stack, "values": values})
    return sorted(rows, key=lambda row: -int(row["values"][-1]))


def _sample(event: int, end: int) -> int:
    return event * _SAMPLES // end
