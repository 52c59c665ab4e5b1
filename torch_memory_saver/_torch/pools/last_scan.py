"""The scan of ``empty_cache()`` for idle segments in the pools of regions, and the check whether a scan is needed.

PyTorch lists the segments of a pool block by block, which takes milliseconds for thousands of tensors. Its counters of a
device take microseconds, but count all pools together. After PyTorch has emptied its own cache, the releasable bytes of a
device (``TorchCuda.releasable_bytes``) are the idle segments of pools whose object lives: idle pools of regions, and
*other* pools, such as those of CUDA graphs and of the program.

An idle pool gets no allocations, so its idle bytes only grow. The idle bytes that a scan has left in it
(``Pool.idle_at_scan``) are therefore a lower bound. The bound of a pool that was entered since is 0. If the releasable bytes
are not more than these bounds and the idle bytes of the other pools together, each bound is exact: no idle pool has changed,
and none is scanned. The other pools are listed one by one, and only if the bounds alone do not suffice.

The rule that keeps a pool (``is_worth_retiring``) also depends on the bytes that retired pools strand. They decrease only
when managed memory is freed. So a bound counts only while the core has counted no further free (``Pool.frees_at_scan``).

PyTorch counts free parts of its expandable segments as releasable. While its default pool has such parts, each call scans.

Any thread may call. A scan takes the pools that it examines out of use (``TakenPools``). The table of other pools changes by
single operations of a dict. PyTorch is called without any lock.
"""

from __future__ import annotations

from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.history import may_have_native_frames
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL, PoolId, TorchCuda, pool_of
from torch_memory_saver._torch.pools.fill import measure_fill
from torch_memory_saver._torch.pools.idle import IdlePools, TakenPools
from torch_memory_saver._torch.records.pool import OBJECT_USES, Pool

__all__ = ["LastScan"]

_Segments = list[dict[str, Any]]


class LastScan:
    """The last scan of the idle pools of the process."""

    def __init__(self, idle_pools: IdlePools) -> None:
        self._idle_pools = idle_pools
        self._others: dict[int, list[PoolId]] = {}  # by device: the other pools with idle segments

    def retire_idle(self, torch: TorchCuda, in_use: int) -> bool:
        """Retire the idle pools that are worth it, on those devices of the mask `in_use` where a pool may have changed since
        the last scan. Return whether an emptying is needed to release their memory. To be called after PyTorch has emptied
        its own cache."""
        by_device: dict[int, list[Pool]] = {}
        for pool in self._idle_pools.select():
            if in_use >> pool.device & 1:
                by_device.setdefault(pool.device, []).append(pool)
        changed = [device for device, pools in by_device.items() if self._has_changed(torch, device, pools)]
        if not changed:
            return False
        taken = TakenPools(self._idle_pools, [pool for device in changed for pool in by_device[device]])
        return _core.within(taken, self._scan, torch, changed, taken)

    def _has_changed(self, torch: TorchCuda, device: int, pools: list[Pool]) -> bool:
        """Return whether one of the device's idle pools may have more idle segments than at the last scan."""
        unexplained = torch.releasable_bytes(device)
        bounded = [pool for pool in pools if pool.idle_at_scan] if unexplained else []
        if bounded:
            frees = _managed_frees()
            counted = [pool for pool in bounded if pool.frees_at_scan == frees and _has_no_graph(torch, pool)]
            unexplained -= sum([pool.idle_at_scan for pool in counted])
        if unexplained > 0:
            own = {pool.id for pool in pools}
            others = [other for other in self._others.get(device, ()) if other not in own]
            unexplained -= sum([_idle_bytes(torch.segments(other), device) for other in others])
        return unexplained > 0

    def _scan(self, torch: TorchCuda, devices: list[int], taken: TakenPools) -> bool:
        """Retire the taken pools that are worth it, and record the idle bytes of the others. Return whether an emptying is
        needed."""
        frees = _managed_frees()
        by_pool = _list_segments(torch, taken.pools)
        scanned = {DEFAULT_POOL, *(pool.id for pool in taken.pools)}
        has_retired = self._idle_pools.retire_taken(torch, taken, by_pool)
        for pool in list(taken.pools):
            pool.idle_at_scan, pool.frees_at_scan = _idle_bytes(by_pool.get(pool.id, []), pool.device), frees
        for device in devices:
            others = by_pool.keys() - scanned
            self._others[device] = [other for other in others if _idle_bytes(by_pool[other], device)]
        return has_retired


def _managed_frees() -> int:
    return _core.counters()["frees_total"]


def _list_segments(torch: TorchCuda, pools: list[Pool]) -> dict[PoolId, _Segments]:
    """Return PyTorch's segments by pool: those of every pool, or only of the given ones if the list may read call stacks."""
    if may_have_native_frames(torch.torch):
        return {pool.id: torch.segments(pool.id) for pool in pools}
    by_pool: dict[PoolId, _Segments] = {}
    for segment in torch.segments():
        by_pool.setdefault(pool_of(segment), []).append(segment)
    return by_pool


def _has_no_graph(torch: TorchCuda, pool: Pool) -> bool:
    """Return whether no graph was captured into the pool, which may have used its idle segments."""
    return torch.uses_of(pool.memory_pool) <= OBJECT_USES


def _idle_bytes(segments: _Segments, device: int) -> int:
    return measure_fill([segment for segment in segments if segment["device"] == device]).idle
