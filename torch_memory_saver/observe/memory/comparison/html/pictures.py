"""The data of the page's pictures: a bar for each segment, the active-memory timeline, and the numbers of their call stacks.

Bars show the blocks of a segment, with those too small to be seen merged. Held segments come first, then the others by size.

The timeline shows allocations as layers in the order of time, from the recorded history. Its horizontal axis is the number
of the event, as on PyTorch's page memory_viz. Blocks that are live at the end and have no event were there from the
beginning. Small allocations are folded by call stack into layers at the bottom. Sizes of freed memory are as requested.
Sizes of live blocks are as the allocator rounded them.

Each call stack has a number, and small ones share the number of "other call stacks". Frames are texts of a common list,
because stacks share most of theirs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch_memory_saver._stacks import CallStack, Frame, Origin, file_name, fold_native, is_library, title

from ...model import Block, BlockState, Event, Segment
from ..fragmentation import held_bytes

__all__ = ["OTHER", "StackNumbers", "bars", "layers"]

#: The number of all call stacks that have none of their own.
OTHER = 0
#: Number of segments that have a bar.
_MAX_BARS = 120
#: A block smaller than this share of its segment is merged with small neighbours.
_SMALLEST_SHARE = 1 / 500
#: Number of allocations that are drawn one by one: the largest.
_MAX_ALLOCATIONS = 1200
#: Number of call stacks that have a layer of their own for their small allocations. The others share one.
_MAX_LAYERS = 16
#: Number of points in time of a layer.
_SAMPLES = 240
_UNKNOWN = CallStack((), Origin.UNRECORDED)


class StackNumbers:
    """Numbers for call stacks.

    Args:
        leaking: The stacks that are drawn in the colours of leaks.
        numbered: The stacks that get a number of their own, the most important first.
    """

    def __init__(self, leaking: Iterable[CallStack], numbered: Iterable[CallStack]) -> None:
        self._leaking = set(leaking)
        self._numbers = {stack: number for number, stack in enumerate(dict.fromkeys(numbered), OTHER + 1)}
        self._frames: dict[str, int] = {}

    def __getitem__(self, stack: CallStack) -> int:
        return self._numbers.get(stack, OTHER)

    def data(self) -> dict[str, Any]:
        """Return the stacks by number, and the texts of their frames."""
        rows: list[dict[str, Any]] = [
            {"title": "other call stacks", "frames": [], "leak": False, "native": 0, "known": False}
        ]
        rows += [self._row(stack) for stack in self._numbers]
        return {"stacks": rows, "frames": list(self._frames)}

    def _row(self, stack: CallStack) -> dict[str, Any]:
        native = stack.origin is Origin.NATIVE
        frames = fold_native(stack) if native else stack.frames
        return {
            "title": title(stack),
            "frames": [self._frame(frame, native) for frame in frames],
            "leak": stack in self._leaking,
            "native": stack.native_frames,
            "known": bool(stack.frames),
        }

    def _frame(self, frame: Frame, native: bool) -> int:
        text = f"C++ {frame.name}" if native else f"{file_name(frame)}:{frame.line} {frame.name}"
        mark = " " if is_library(frame) or native else "*"
        return self._frames.setdefault(mark + text, len(self._frames))


def bars(segments: Sequence[Segment], numbers: StackNumbers) -> dict[str, Any]:
    """Return the bars of a device's segments.

    Returns:
        "rows": for each segment its bytes, live bytes, state, tag, its held bytes, whether its pool is private, whether it
        is expandable, and its blocks as [offset, bytes, stack, whether it awaits a free, number of blocks]. "folded": how
        many segments have no bar, their bytes and live bytes.
    """
    ordered = sorted(segments, key=_importance)
    folded = ordered[_MAX_BARS:]
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
            for segment in ordered[:_MAX_BARS]
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
    """Return one row for neighbouring blocks.

    Small free blocks between them are drawn as if they were live.
    """
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


class _Allocation:
    """An allocation that lives from event `start` to event `end`, which is exclusive."""

    __slots__ = ("bytes", "end", "stack", "start")

    def __init__(self, start: int, end: int, size: int, stack: CallStack) -> None:
        self.start, self.end, self.bytes, self.stack = start, end, size, stack


def layers(events: Sequence[Event], order: Sequence[Block], numbers: StackNumbers) -> dict[str, Any]:
    """Return the timeline of a device.

    Args:
        events: The history of the device, oldest events first.
        order: The live blocks of the device, in the order of their allocation.
        numbers: The numbers of the call stacks.

    Returns:
        "events": the number of events. "allocations": [start, end, bytes, stack], in order. "layers": the folded
        allocations, with bytes at each of `samples` points. "folded": the number of folded allocations.
    """
    allocations = _allocations(events, order)
    kept = set(heapq.nlargest(_MAX_ALLOCATIONS, range(len(allocations)), key=lambda number: allocations[number].bytes))
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
    own = {stack for stack, _ in weight.most_common(_MAX_LAYERS)}
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
