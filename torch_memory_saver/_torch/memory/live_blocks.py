"""List the live blocks of PyTorch's allocator in managed memory: before a pause, which copies only these, and at the begin
of a resume, for check_fresh().

torch keeps freed blocks in its segments for reuse: their contents are dead. Blocks are left out only in segments whose
blocks torch reports correctly: those of its default pool, and of pools that only region() has used. torch reports blocks
with outputs of replayed CUDA graphs as free, so a pool that a capture has used is copied completely, and so is memory that
torch does not list.

A block that is allocated after a resume reuses memory that the resume has filled, and may never be written: it is no
leftover of the pause. PyTorch does not number its blocks, so a block counts as the one that was live then if it has the
same address and size. A block that was freed and allocated again at the same place cannot be distinguished from it.

Owns the record of resumes, which exists for memory that was resumed while guard mode was on. Any thread may call. There is
no lock, because each change of the record is one call of C code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._torch.base.collector import StoppedCollector
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL, PoolId, TorchCuda
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.records.tags import Tags, selects

__all__ = ["Live", "ManagedBlock", "ResumedBlocks", "live_finder", "managed_blocks", "pools_with_known_blocks"]

#: The core's format: addresses of allocations, begins and ends of live ranges, and, if each range is one block, the end of
#: what the program requested of each; sorted 64-bit numbers.
Live = tuple[bytes, bytes] | tuple[bytes, bytes, bytes]

#: Address and size of a block.
_Place = tuple[int, int]

#: States in which no tensor has the block: cached, or freed and waiting for another stream.
_FREED = ("inactive", "active_pending_free", "active_awaiting_free")


def _pool_of(segment: Mapping[str, Any]) -> PoolId | None:
    """Return the pool of a segment; None if this torch does not report it."""
    pool = segment.get("segment_pool_id")
    return None if pool is None else (pool[0], pool[1])


def pools_with_known_blocks(torch: TorchCuda, store: PoolStore, segments: Iterable[Mapping[str, Any]]) -> frozenset[PoolId]:
    """Return the pools whose live blocks torch reports correctly."""
    return store.regions.pools_without_captures(torch, {_pool_of(segment) for segment in segments}) | {DEFAULT_POOL}


def live_finder(
    torch: TorchCuda | None, store: PoolStore, tags: Tags, every_backup: bool
) -> Callable[[], Live | None] | None:
    """Return the function that the core calls in a pause of `tags` for the live bytes, after the devices have been
    synchronized. None: everything is live.

    Args:
        every_backup: Whether the pause keeps the contents of every allocation, even of those without a backup of their own.
    """
    if torch is None:
        return None
    found = torch

    def find() -> Live | None:
        with StoppedCollector():
            return _find_live(found, store, tags, every_backup)

    return find


def _find_live(torch: TorchCuda, store: PoolStore, tags: Tags, every_backup: bool) -> Live | None:
    kept = _core.kept_allocations(tags, every_backup)
    if not kept:
        return None
    segments = torch.segments()
    known = pools_with_known_blocks(torch, store, segments)
    return _core.live_ranges(segments, kept, known, torch.captures_join_regions)


class _Block(NamedTuple):
    """One block of a segment, as PyTorch's snapshot describes it."""

    place: _Place
    requested: int  # the bytes that the program requested; the size if this release does not say
    live: bool
    frames: Any  # of its allocation; None: not recorded


def _walk(segment: Mapping[str, Any]) -> Iterator[_Block]:
    """Return the blocks of a segment, which lie in order and without gaps."""
    address = segment["address"]
    for block in segment["blocks"]:
        size = block["size"]
        yield _Block(
            (address, size), block.get("requested_size", size), block["state"] not in _FREED, block.get("frames") or None
        )
        address += size


class ResumedBlocks:
    """The blocks of one process that were live when the resume of their memory began."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        #: The live blocks by the address and the size of their segment.
        self._live: dict[_Place, frozenset[_Place]] = {}

    after_fork_in_child = _reset

    def note(self, torch: TorchCuda | None, tags: Tags) -> None:
        """Record the live blocks of paused memory of the tags. To be called when their resume begins with guard mode on."""
        if torch is None:
            return
        rows = _core.segments()
        waiting = {row.address for row in rows if row.state != _core.STATE_ACTIVE and selects(tags, row.tag)}
        if not waiting:
            return
        found = {
            (segment["address"], segment["total_size"]): frozenset(block.place for block in _walk(segment) if block.live)
            for segment in torch.segments()
            if segment["address"] in waiting
        }
        self._live.update(found)
        kept = {row.address for row in rows} - waiting
        for place in list(self._live):
            if place not in found and place[0] not in kept:
                self._live.pop(place, None)  # another thread may have been first

    def live_in(self, segment: Mapping[str, Any]) -> frozenset[_Place] | None:
        """Return the blocks of a segment of PyTorch's snapshot that were live when its resume began. None if that resume was
        not recorded, because torch was not in use or a caller of the C functions made it."""
        return self._live.get((segment["address"], segment["total_size"]))


class ManagedBlock(NamedTuple):
    """A block that a segment of PyTorch's holds, or a managed allocation that PyTorch does not know."""

    address: int
    bytes: int  # as the program requested it
    allocation: _core.Segment
    frames: Any  # of its allocation, as PyTorch reports them; None: not recorded
    is_new: bool  # allocated since the resume began
    of_graphs: bool  # PyTorch does not know whether it is live


def managed_blocks(
    torch: TorchCuda | None, store: PoolStore, resumed: ResumedBlocks, rows: Iterable[_core.Segment]
) -> list[ManagedBlock]:
    """Return the live blocks of managed allocations, in order, and all blocks of pools that captures have used."""
    allocations = {row.address: row for row in rows}
    segments = [] if torch is None else [each for each in torch.segments() if each["address"] in allocations]
    pools = frozenset() if torch is None else pools_with_known_blocks(torch, store, segments)
    blocks: list[ManagedBlock] = []
    for segment in segments:
        row = allocations[segment["address"]]
        if not row.bytes <= segment["total_size"] <= row.reserved_bytes:
            continue  # the allocation at this address is not torch's
        del allocations[segment["address"]]
        known = torch is not None and _core.knows_blocks(segment, pools, torch.captures_join_regions)
        before = resumed.live_in(segment) if known else None
        for block in _walk(segment):
            if not block.live and known:
                continue
            address, size = block.place
            is_new = before is not None and block.place not in before
            # PyTorch has forgotten the requested size of a free block.
            requested = min(block.requested if block.live else size, row.address + row.bytes - address)
            if requested > 0:
                blocks.append(ManagedBlock(address, requested, row, block.frames, is_new, not known))
    blocks += [ManagedBlock(row.address, row.bytes, row, None, False, False) for row in allocations.values()]
    return sorted(blocks, key=lambda block: block.address)
