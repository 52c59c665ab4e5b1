"""The live bytes of managed memory, from torch's allocator, so that a pause copies only these.

torch keeps freed blocks in its segments for reuse: their contents are dead. Blocks are left out only in segments whose
blocks torch reports correctly: those of its default pool, and of pools that only region() has used. torch reports blocks
with outputs of replayed CUDA graphs as free, so a pool that a capture has used is copied completely, and so is memory that
torch does not list.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.layer import PoolId, TorchCuda
from torch_memory_saver._torch.pools import PoolStore, Tags, selects

__all__ = ["Live", "Sizes", "knows_blocks", "live_finder", "live_ranges", "pool_of"]

#: The core's format: addresses of allocations, and begins and ends of live ranges; sorted 64-bit numbers.
Live = tuple[bytes, bytes]

_DEFAULT_POOL: PoolId = (0, 0)
#: The legacy default stream, which cannot be captured.
_DEFAULT_STREAM = 0
#: In every other state the block may be in use: by a tensor, or by a stream.
_FREE = "inactive"


def pool_of(segment: Mapping[str, Any]) -> PoolId | None:
    """The pool of a segment; None if this torch does not report it."""
    pool = segment.get("segment_pool_id")
    return None if pool is None else (pool[0], pool[1])


def knows_blocks(segment: Mapping[str, Any], thinned: Collection[PoolId], default_stream_only: bool) -> bool:
    """Whether torch reports correctly which blocks of the segment are live. `thinned`: the pools of regions that no capture
    has used. `default_stream_only`: captures may have used any pool, but only on streams other than the default one."""
    pool = pool_of(segment)
    if pool != _DEFAULT_POOL and pool not in thinned:
        return False
    return not default_stream_only or segment.get("stream") == _DEFAULT_STREAM


class Sizes(NamedTuple):
    """The sizes of a managed allocation: bytes requested, and bytes reserved."""

    bytes: int
    reserved_bytes: int


def live_finder(
    torch: TorchCuda | None, store: PoolStore, tags: Tags, every_backup: bool
) -> Callable[[], Live | None] | None:
    """For a pause of `tags`: the function that the core calls for the live bytes after the devices have been synchronized.
    None: everything is live.

    Args:
        every_backup: The pause keeps contents of every allocation, even of those without a backup of their own.
    """
    if torch is None:
        return None
    found = torch

    def find() -> Live | None:
        with collector_stopped:
            return _find_live(found, store, tags, every_backup)

    return find


def _find_live(torch: TorchCuda, store: PoolStore, tags: Tags, every_backup: bool) -> Live | None:
    managed = {
        row.address: Sizes(row.bytes, row.reserved_bytes)
        for row in _core.segments()
        if selects(tags, row.tag) and (every_backup or row.backup != _core.BACKUP_NONE)
    }
    if not managed:
        return None
    segments = torch.segments()
    thinned = store.pools_without_captures(torch, {pool_of(segment) for segment in segments})
    return live_ranges(segments, managed, thinned, default_stream_only=torch.captures_join_regions)


def live_ranges(
    segments: Iterable[Mapping[str, Any]],
    managed: Mapping[int, Sizes],
    thinned: Collection[PoolId],
    default_stream_only: bool = False,
) -> Live:
    """The managed allocations whose free blocks may be left out, and their live ranges, from torch's snapshot.

    Args:
        managed: Allocations by address.
        thinned: The pools that no capture has used.
        default_stream_only: Captures may have used any pool, but only on streams other than the default one.
    """
    addresses, ranges = array("Q"), array("Q")
    for segment in sorted(segments, key=_address_of):
        address = segment["address"]
        sizes = managed.get(address)
        # A segment is one managed allocation. If the sizes differ, the allocation at this address is not torch's.
        if sizes is None or not sizes.bytes <= segment["total_size"] <= sizes.reserved_bytes:
            continue
        if not knows_blocks(segment, thinned, default_stream_only):
            continue
        addresses.append(address)
        end = 0  # of the segment's last range
        for block in segment["blocks"]:  # in order, without gaps
            size = block["size"]
            if block["state"] != _FREE:
                if end == address:
                    ranges[-1] = end = address + size
                else:
                    end = address + size
                    ranges.append(address)
                    ranges.append(end)
            address += size
    return addresses.tobytes(), ranges.tobytes()


def _address_of(segment: Mapping[str, Any]) -> int:
    address: int = segment["address"]
    return address
