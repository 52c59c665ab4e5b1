"""How much managed memory ``empty_cache()`` would return now, for messages about a lack of memory.

Any thread, also inside PyTorch's observer. Takes PyTorch's list of segments, and no lock while it does.
"""

from __future__ import annotations

from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.layer import PoolId, TorchCuda
from torch_memory_saver._torch.pools import PoolStore

__all__ = ["count_idle_bytes"]

_DEFAULT_POOL: PoolId = (0, 0)


def count_idle_bytes(torch: TorchCuda, store: PoolStore, device: int) -> int:
    """Return the bytes of the device in resident managed segments without a tensor that ``empty_cache()`` of this thread
    would return: those of pools that it retires, of retired pools, and of PyTorch's default pool."""
    active = {row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and row.device == device}
    by_pool: dict[PoolId, list[dict[str, Any]]] = {}
    for segment in torch.segments():
        if segment["address"] in active:
            by_pool.setdefault(tuple(segment.get("segment_pool_id", _DEFAULT_POOL)), []).append(segment)
    returned = store.pools_to_empty(torch, by_pool) | {_DEFAULT_POOL}
    return sum(
        int(segment["total_size"])
        for pool, segments in by_pool.items()
        if pool in returned
        for segment in segments
        if not segment["active_size"]
    )
