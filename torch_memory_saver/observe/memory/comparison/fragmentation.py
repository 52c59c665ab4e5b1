"""Reserved memory of a device that is not in use, and the reasons why it cannot be given back.

PyTorch gives a segment back to the driver at once, or one piece of an expandable segment: a *unit*. A unit without a live
byte is *cached*, and releasing the cache frees it. A unit that few live bytes keep is *held*: its free bytes cannot be given
back. Held bytes are fragmentation. Paused segments hold no device memory, and are counted apart.

The module owns these words, the figures of a device, and the thresholds of a finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch_memory_saver._stacks import CallStack

from ..model import Block, BlockState, Segment, Snapshot
from .processes import Process, Series

__all__ = [
    "HELD_SHARE",
    "DeviceUsage",
    "Fragmentation",
    "Holder",
    "Unit",
    "device_usages",
    "find_fragmentation",
    "held_bytes",
    "units",
]

#: A unit is held by few live bytes if less than this share of it is live.
HELD_SHARE = 0.25
#: Held bytes are a finding if they are at least this share of the reserved bytes.
_FOUND_SHARE = 0.1
#: Neither held bytes nor growth is a finding below this size, because PyTorch reserves 20 MiB at once for a tensor of 2 MiB.
_FOUND_BYTES = 32 << 20
#: Unused memory that grew in every interval is a finding if there are at least this many intervals.
_FOUND_INTERVALS = 2
#: Number of stacks that are named because they hold segments.
_NAMED_HOLDERS = 5


@dataclass(frozen=True)
class DeviceUsage:
    """A process's memory on one device, in bytes, with one value for each moment.

    Attributes:
        process: The process.
        device: The CUDA ordinal.
        moments: The numbers of the moments that have a snapshot of it.
        reserved: Bytes of all segments.
        allocated: Bytes of allocated blocks.
        awaiting_free: Bytes of blocks that are freed and wait for another stream.
        cached: Bytes of resident segments without a live block, and of such pieces of expandable segments.
        held: Free bytes of resident segments of which less than a quarter is live, and of such pieces of expandable
            segments.
        held_segments: Number of the segments and pieces that `held` counts.
        held_pieces: Number of the pieces among them.
        paused: Bytes of segments that torch_memory_saver has paused.
        unused: Reserved minus allocated, without paused segments.
    """

    process: Process
    device: int
    moments: tuple[int, ...]
    reserved: tuple[int, ...]
    allocated: tuple[int, ...]
    awaiting_free: tuple[int, ...]
    cached: tuple[int, ...]
    held: tuple[int, ...]
    held_segments: tuple[int, ...]
    held_pieces: tuple[int, ...]
    paused: tuple[int, ...]
    unused: tuple[int, ...]

    @property
    def unused_grows(self) -> bool:
        """Whether reserved minus allocated grew in every interval, and enough to be a finding."""
        grew = all(before < after for before, after in pairwise(self.unused))
        enough = self.unused[-1] - self.unused[0] >= _FOUND_BYTES
        return grew and enough and len(self.unused) > _FOUND_INTERVALS

    @property
    def is_held(self) -> bool:
        """Whether the held bytes of the last moment are enough to be a finding."""
        return self.held[-1] >= max(_FOUND_BYTES, _FOUND_SHARE * self.reserved[-1])


@dataclass(frozen=True)
class Holder:
    """A call stack whose live blocks keep segments.

    Attributes:
        stack: The call stack that allocated the blocks.
        bytes: The total size of the blocks.
        blocks: The number of blocks.
        segments: The number of held segments, or pieces of expandable ones, that they lie in.
        held: The free bytes of these segments. A segment that two stacks hold together counts for both.
    """

    stack: CallStack
    bytes: int
    blocks: int
    segments: int
    held: int


@dataclass(frozen=True)
class Fragmentation:
    """A device of a process whose unused memory is a finding.

    Attributes:
        usage: The figures of the device. `usage.is_held` and `usage.unused_grows` show which of them are the finding.
        holders: The stacks that hold most, at the last moment.
    """

    usage: DeviceUsage
    holders: tuple[Holder, ...]


def device_usages(series: Series) -> Iterator[DeviceUsage]:
    """Yield the figures of each device of a process."""
    for device in series.devices:
        rows = [_usage(snapshot, device) for snapshot in series.snapshots]
        yield DeviceUsage(
            series.process, device, series.moments, **{name: tuple(row[name] for row in rows) for name in rows[0]}
        )


def find_fragmentation(series: Series, usage: DeviceUsage) -> Fragmentation | None:
    """Return the finding about one device of a process, or None."""
    if not usage.is_held and not usage.unused_grows:
        return None
    return Fragmentation(usage, _holders(_held(series.snapshots[-1].segments_of(usage.device))))


class Unit(NamedTuple):
    """Memory that PyTorch gives back to the driver at once: a segment, or a piece of an expandable one.

    Attributes:
        bytes: The size of the unit.
        live: The live blocks that lie in the unit, at least in part, each with its bytes in the unit.
        is_piece: Whether it is a piece of an expandable segment.
    """

    bytes: int
    live: tuple[tuple[Block, int], ...]
    is_piece: bool

    @property
    def live_bytes(self) -> int:
        """The live bytes in the unit."""
        return sum(size for _, size in self.live)

    @property
    def free_bytes(self) -> int:
        """The bytes of the unit that are not live."""
        return self.bytes - self.live_bytes

    @property
    def cached(self) -> bool:
        """Whether nothing in the unit is live."""
        return not self.live

    @property
    def held(self) -> bool:
        """Whether few live bytes keep the unit."""
        return 0 < self.live_bytes < HELD_SHARE * self.bytes


def units(segments: Iterable[Segment]) -> Iterator[Unit]:
    """Yield the units of resident segments, by address.

    Paused segments hold no device memory, so they have no units.
    """
    for segment in segments:
        if not segment.paused:
            yield from _units(segment)


def held_bytes(segment: Segment) -> int:
    """Return the free bytes of a segment that cannot be given back, because few live bytes keep them."""
    return sum(unit.free_bytes for unit in units([segment]) if unit.held)


def _usage(snapshot: Snapshot, device: int) -> dict[str, int]:
    segments = snapshot.segments_of(device)
    resident = [segment for segment in segments if not segment.paused]
    parts = list(units(segments))
    held = [part for part in parts if part.held]
    return {
        "reserved": sum(segment.bytes for segment in segments),
        "allocated": _bytes_of(segments, BlockState.ALLOCATED),
        "awaiting_free": _bytes_of(segments, BlockState.AWAITING_FREE),
        "cached": sum(part.bytes for part in parts if part.cached),
        "held": sum(part.free_bytes for part in held),
        "held_segments": len(held),
        "held_pieces": sum(part.is_piece for part in held),
        "paused": sum(segment.bytes for segment in segments if segment.paused),
        "unused": sum(segment.bytes for segment in resident) - _bytes_of(resident, BlockState.ALLOCATED),
    }


def _bytes_of(segments: Sequence[Segment], state: BlockState) -> int:
    return sum(block.bytes for segment in segments for block in segment.blocks if block.state is state)


def _held(segments: Sequence[Segment]) -> list[Unit]:
    return [part for part in units(segments) if part.held]


def _holders(held: Sequence[Unit]) -> tuple[Holder, ...]:
    blocks: dict[CallStack, dict[int, Block]] = {}
    number: Counter[CallStack] = Counter()
    free: Counter[CallStack] = Counter()
    for part in held:
        for block, _ in part.live:
            blocks.setdefault(block.stack, {})[block.address] = block
        for stack in {block.stack for block, _ in part.live}:
            number[stack] += 1
            free[stack] += part.free_bytes
    return tuple(
        Holder(stack, sum(block.bytes for block in blocks[stack].values()), len(blocks[stack]), number[stack], size)
        for stack, size in free.most_common(_NAMED_HOLDERS)
    )


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
