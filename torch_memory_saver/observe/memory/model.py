"""The model of a memory snapshot: plain frozen values, which snapshot_reader.py makes from a file.

PyTorch's words: a *segment* is memory that PyTorch got from the driver (*reserved*); a *block* is a part of it that a
tensor has (*allocated*), that waits for another stream (*awaiting free*), or that is cached (*inactive*). A block is
*live* if it is not inactive. Bytes are those of the allocator, rounded up as it rounds them, so those of live blocks
add up to what PyTorch calls active, and to what it calls allocated where nothing awaits a free.

The module owns no file and no policy. It needs no PyTorch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch_memory_saver._stacks import CallStack, Frame, Origin

__all__ = ["Block", "BlockState", "CallStack", "Event", "Frame", "ManagedSegment", "Origin", "Segment", "Snapshot"]


class BlockState(enum.Enum):
    """The state of a block.

    PyTorch's names of the states differ between its releases.
    """

    ALLOCATED = "allocated"
    AWAITING_FREE = "awaiting free"
    INACTIVE = "inactive"


class Block(NamedTuple):
    """A part of a segment.

    Attributes:
        address: The device address.
        bytes: The size, as the allocator rounded it.
        requested_bytes: The size that the program requested; `bytes` where PyTorch does not report it.
        state: The state of the block.
        stack: The call stack that allocated the block. An inactive block has none.
    """

    address: int
    bytes: int
    requested_bytes: int
    state: BlockState
    stack: CallStack

    @property
    def live(self) -> bool:
        """Whether the block is allocated or waits for its free."""
        return self.state is not BlockState.INACTIVE


@dataclass(frozen=True)
class Segment:
    """Memory that PyTorch allocated from the driver.

    Attributes:
        address: The device address.
        bytes: The size.
        device: The CUDA ordinal.
        pool: The id of its memory pool; (0, 0) is the default pool.
        blocks: Its blocks, by address.
        piece_bytes: The size of the pieces in which an expandable segment is mapped and given back. 0 for an ordinary
            segment, which is given back as a whole.
        state: The state as in torch_memory_saver.reports.Allocation, such as "active" or "paused"; "" if the snapshot does
            not say.
        tag: The tag of torch_memory_saver, or "".
    """

    address: int
    bytes: int
    device: int
    pool: tuple[int, int]
    blocks: tuple[Block, ...]
    piece_bytes: int = 0
    state: str = ""
    tag: str = ""

    @property
    def live_bytes(self) -> int:
        """The bytes of the segment's live blocks."""
        return sum(block.bytes for block in self.blocks if block.live)

    @property
    def paused(self) -> bool:
        """Whether the segment holds no device memory now."""
        return self.state == "paused"


class Event(NamedTuple):
    """One entry of PyTorch's recorded history.

    Attributes:
        action: PyTorch's name, such as "alloc", "free_requested" or "free_completed".
        address: The device address; 0 where PyTorch gives none.
        bytes: The requested size.
        stack: The call stack of the event.
    """

    action: str
    address: int
    bytes: int
    stack: CallStack


class ManagedSegment(NamedTuple):
    """An allocation that torch_memory_saver managed when the snapshot was taken."""

    address: int
    bytes: int
    device: int
    state: str
    tag: str


@dataclass(frozen=True)
class Snapshot:
    """The memory of one process at one moment.

    Attributes:
        source: The file that it was read from; "" if none.
        segments: Every segment of every device, by device and address.
        events: The recorded history of each device, oldest first, by its ordinal.
        managed: The allocations that torch_memory_saver managed.
        role: The role of the process, such as "trainer"; "" if the snapshot does not say.
        rank: The rank of the process, or None.
        pid: The process id, or None.
        tag: The name that the program has given to the moment.
        step: The number of the moment, or None.
        pausing: The tags of the pause before which the snapshot was taken; () for a pause of every tag. None if the snapshot
            was not taken before a pause, or does not say.
        time_ns: When the snapshot was taken, in nanoseconds since 1970; 0 if the snapshot does not say.
        history_enabled: Whether PyTorch recorded stacks; None if the snapshot does not say.
        started_ns: When the process imported the code that takes snapshots, like `time_ns`. It differs between processes of
            two runs with one id.
    """

    source: str
    segments: tuple[Segment, ...]
    events: dict[int, tuple[Event, ...]]
    managed: tuple[ManagedSegment, ...] = ()
    role: str = ""
    rank: int | None = None
    pid: int | None = None
    tag: str = ""
    step: int | None = None
    pausing: tuple[str, ...] | None = None
    time_ns: int = 0
    history_enabled: bool | None = None
    started_ns: int = 0

    @property
    def devices(self) -> tuple[int, ...]:
        """The ordinals of the devices that have segments."""
        return tuple(sorted({segment.device for segment in self.segments}))

    def segments_of(self, device: int) -> tuple[Segment, ...]:
        """Return the segments of one device."""
        return tuple(segment for segment in self.segments if segment.device == device)

    def live_blocks(self, device: int) -> Iterator[Block]:
        """Yield the live blocks of one device, by address."""
        return (block for segment in self.segments if segment.device == device for block in segment.blocks if block.live)
