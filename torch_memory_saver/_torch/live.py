"""The live bytes of managed memory, from torch's allocator, so that a pause copies only these.

torch keeps freed blocks in its segments for reuse: their contents are dead. Blocks are left out only in segments whose
blocks torch reports correctly: those of its default pool, and of pools that only region() has used. torch reports blocks
with outputs of replayed CUDA graphs as free, so a pool that a capture has used is copied completely, and so is memory that
torch does not list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.layer import PoolId, TorchCuda
from torch_memory_saver._torch.pools import PoolStore, Tags

__all__ = ["Live", "live_finder", "pools_with_known_blocks"]

#: The core's format: addresses of allocations, and begins and ends of live ranges; sorted 64-bit numbers.
Live = tuple[bytes, bytes]

_DEFAULT_POOL: PoolId = (0, 0)


def _pool_of(segment: Mapping[str, Any]) -> PoolId | None:
    """The pool of a segment; None if this torch does not report it."""
    pool = segment.get("segment_pool_id")
    return None if pool is None else (pool[0], pool[1])


def pools_with_known_blocks(torch: TorchCuda, store: PoolStore, segments: Iterable[Mapping[str, Any]]) -> frozenset[PoolId]:
    """The pools of which torch reports correctly which blocks are live."""
    return store.pools_without_captures(torch, {_pool_of(segment) for segment in segments}) | {_DEFAULT_POOL}


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
        with collector_stopped():
            return _find_live(found, store, tags, every_backup)

    return find


def _find_live(torch: TorchCuda, store: PoolStore, tags: Tags, every_backup: bool) -> Live | None:
    kept = _core.kept_allocations(tags, every_backup)
    if not kept:
        return None
    segments = torch.segments()
    known = pools_with_known_blocks(torch, store, segments)
    return _core.live_ranges(segments, kept, known, torch.captures_join_regions)
