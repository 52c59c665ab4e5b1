"""PyTorch memory pools with this package's allocator: one for each entry of a region, by options and device.

A pool is *idle* (not in use), *routed* (allocations of one thread come from it), or *retired* (torch releases
its segments as they empty, see :mod:`.retirement`). A pool can be routed by one thread at a time. While its object lives,
none of its segments is released to the driver. A retired pool is never allocated from again.

A pool that may hold paused memory must not be entered, because torch would allocate from its free blocks. Each pool records
the number of pauses of its tag when it was last entered. If there were more since, and memory of the tag is still paused,
the pool stays idle.

Free blocks of a pool that no stream capture has used are dead (live_blocks.py). IdlePools lists these pools, including
retired ones until torch has released their memory, and removes a pool permanently once a capture may have used it.

PyTorch does not number its blocks: a tensor may have the place of a deleted one that was there at the last pause. But only
regions allocate from a pool that no capture has used. So while none has entered it since that pause, each tensor in its
memory was there (:meth:`IdlePools.has_tensors_of_last_pause`).

Lock: `lock` guards the idle pools, and the frames of regions (routing/regions.py). It is never held across a call of torch,
because torch's allocator calls the native core with its own mutex held. The tables of retired pools and of pools without
captures change by single operations, without it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._torch.base.steps import SingleUseScope
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda
from torch_memory_saver._torch.pools.fill import has_idle_segment, is_worth_retiring, measure_fill
from torch_memory_saver._torch.pools.retirement import before_emptying, needs_emptying, retire
from torch_memory_saver._torch.records.pool import OBJECT_USES, Key, Pool
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver.options import RegionOptions

__all__ = ["IdlePools", "TakenPools"]

#: The maximum number of retired pools that are recorded, for programs that never pause.
_MAX_RETIRED = 10_000


class IdlePools:
    """The idle and retired pools of the process.

    Attributes:
        lock: Guards the idle pools, and the frames that get pools here.
        pending: Devices whose cache is to be emptied when the last thread leaves its region.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Reset the state to that of a process without pools: at the start, and in a forked child, where torch cannot use
        them."""
        # Reentrant, because any allocation may run the garbage collector, and so a finalizer that enters a region.
        self.lock = threading.RLock()
        self._idle: dict[Key, list[Pool]] = {}
        self._postponed: list[Pool] = []  # to be retired at the next opportunity; appended to without the lock
        self._uncaptured: dict[PoolId, Pool] = {}  # pools of regions that no capture has used
        self._retired: dict[PoolId, Pool] = {}  # retired pools whose memory PyTorch may still hold
        self.pending: set[int] = set()

    after_fork_in_child = _reset

    def take_idle(self, options: RegionOptions, devices: Sequence[int], pools: list[Pool]) -> None:
        """Append an idle pool of each device to a list, until there is none. The caller holds the lock."""
        info = _core.tag_info(options.tag)
        for device in devices:
            if not self._take_fitting(Key(options, device), info, pools):
                return

    def take_back(self, pools: list[Pool]) -> None:
        """Make the pools of a list idle, but have those of a disable() retired, and empty the list. The caller holds the
        lock. May be repeated."""
        while pools:
            key = pools[0].key
            if key.options.managed:
                _core.move(pools, self._idle.setdefault(key, []), 0)
            else:
                self.pending.add(key.device)  # to be emptied later, if a signal handler prevents it now
                _core.move(pools, self._postponed, 0)

    def check_out(self, torch: TorchCuda, key: Key) -> Pool:
        """Return a pool that is not in use and does not allocate from paused memory: an idle one, or a new one."""
        pools: list[Pool] = []
        self.check_out_to(torch, key, pools)
        return pools[0]

    def check_out_to(self, torch: TorchCuda, key: Key, pools: list[Pool]) -> None:
        """Append such a pool to a list, so that a signal handler that raises does not lose it."""
        if not key.options.managed:
            pools.append(self.make_pool(torch, key))
            return
        info = _core.tag_info(key.options.tag)
        before = len(pools)
        _core.within(self.lock, self._take_fitting, key, info, pools)
        if len(pools) == before and info.paused:
            # An empty pool has no paused memory.
            for pool in self.select((key.options.tag,)):
                if pool.key == key and len(pools) == before and not torch.segments(pool.id):
                    _core.within(self.lock, self._take_one, pool, pools)
        if len(pools) == before:
            made = self.make_pool(torch, key)
            self.note_uncaptured(made)
            pools.append(made)
        pools[-1].epoch = info.epoch
        pools[-1].idle_at_scan = 0

    def _take_fitting(self, key: Key, info: _core.TagInfo, pools: list[Pool]) -> bool:
        """Append an idle pool that certainly has no paused memory. Return whether there is one. The caller holds the
        lock."""
        idle = self._idle.get(key)
        if not idle:
            return False
        index = -1
        if info.paused:
            current = [pool for pool in idle if pool.epoch == info.epoch]
            if not current:
                return False
            index = idle.index(current[-1])
        _core.move(idle, pools, index)
        pools[-1].epoch = info.epoch
        pools[-1].idle_at_scan = 0
        return True

    def _take_one(self, pool: Pool, pools: list[Pool]) -> None:
        """Append the pool, if it is still idle. The caller holds the lock."""
        idle = self._idle.get(pool.key, [])
        if pool in idle:
            _core.move(idle, pools, idle.index(pool))

    def note_uncaptured(self, pool: Pool) -> None:
        """Record that no capture uses a new pool: its free blocks are dead."""
        self._uncaptured[pool.id] = pool

    def check_in(self, pool: Pool) -> None:
        """Make the pool idle again."""
        _core.within(self.lock, self._put_back, [pool])

    def _put_back(self, pools: list[Pool]) -> None:
        """Make the last pool of a list idle, and remove it from the list. The caller holds the lock."""
        _core.move(pools, self._idle.setdefault(pools[-1].key, []))

    def make_pool(self, torch: TorchCuda, key: Key) -> Pool:
        """Return a new pool. Its reference is leaked until it is retired."""
        return Pool(torch.make_pool(key.device, key.options.managed), key)

    def retire(self, torch: TorchCuda, pool: Pool) -> None:
        """Retire a pool that is not routed: torch releases its segments at an emptying after their last tensor is gone."""
        if pool.key.options.managed or pool.id in self._uncaptured:
            if len(self._retired) >= _MAX_RETIRED:
                self._forget_gone(torch)
            if len(self._retired) >= _MAX_RETIRED:
                self.forget(set(self._retired))
            self._retired[pool.id] = pool
        retire(torch, pool)

    def retire_later(self, pool: Pool) -> None:
        """Mark a pool to be retired later. For finalizers, which may run even while the lock is held."""
        self._postponed.append(pool)

    def retire_postponed(self, torch: TorchCuda) -> None:
        """Retire the pools that finalizers and disable() left."""
        if not self._postponed:  # the usual case
            return
        claimed = _ClaimedPools(self._postponed)
        _core.within(claimed, self._retire_claimed, torch, claimed.pools)

    def _retire_claimed(self, torch: TorchCuda, pools: list[Pool]) -> None:
        while pools:
            self.retire(torch, pools[0])
            pools.pop(0)

    def begin_emptying(self, torch: TorchCuda) -> int:
        """Prepare an emptying of PyTorch's cache. Return the mask of the devices in use."""
        in_use = _core.active_devices()
        for prepare in before_emptying:
            prepare(in_use)
        self.retire_postponed(torch)
        return in_use

    def retired_pools(self) -> frozenset[PoolId]:
        """Return the retired pools whose memory torch may still hold. torch releases it when its cache is emptied."""
        return frozenset(self._retired)

    def note_captured(self, torch: TorchCuda, pools: Iterable[Pool]) -> None:
        """Record that captures may have used the pools."""
        captured = {pool.id for pool in pools}
        for pool in captured:
            self._uncaptured.pop(pool, None)
        torch.ordinary_pools -= captured

    def uncaptured_pools(self) -> frozenset[PoolId]:
        """Return the pools of regions that no capture has used, including retired ones."""
        return frozenset(self._uncaptured)

    def retired_of(self, tags: Collection[str]) -> list[Pool]:
        """Return the retired pools of the tags."""
        return [pool for pool in list(self._retired.values()) if pool.key.options.tag in tags]

    def forget(self, pools: Collection[PoolId]) -> None:
        """Forget retired pools."""
        for pool in pools:
            self._uncaptured.pop(pool, None)
            self._retired.pop(pool, None)

    def forget_unlisted(self, listed: Collection[PoolId | None]) -> list[Pool]:
        """Forget the retired pools that are not in torch's list, and return the idle pools. The caller holds the lock."""
        self.forget(set(self._retired) - set(listed))
        return [pool for pools in self._idle.values() for pool in pools]

    def _forget_gone(self, torch: TorchCuda) -> list[dict[str, Any]]:
        """Forget the retired pools whose memory PyTorch has released. Return PyTorch's segments."""
        known = set(self._retired)
        segments = torch.segments()
        listed = {tuple(segment.get("segment_pool_id", ())) for segment in segments}
        self.forget(known - listed)
        return segments

    def stranded_bytes(self, torch: TorchCuda, tag: str | None = None, device: int | None = None) -> int:
        """Return the free bytes in partly used segments of retired pools, paused or not, which nothing can use until the
        last tensor of their segment is deleted. Takes no snapshot if no pool is retired.

        Args:
            torch: PyTorch.
            tag: The tag of the pools. None: pools of every tag.
            device: The device of the pools. None: pools of every device.
        """
        if not self._retired:
            return 0
        segments = self._forget_gone(torch)
        pools = {
            pool.id
            for pool in list(self._retired.values())
            if tag in (None, pool.key.options.tag) and device in (None, pool.device)
        }
        return measure_fill([segment for segment in segments if tuple(segment.get("segment_pool_id", ())) in pools]).free

    def has_tensors_of_last_pause(self, torch: TorchCuda, allocation: _core.Segment) -> bool:
        """Return whether every tensor in a resident allocation with a backup was there at the last pause of its tag. False
        if this is unknown: a region has entered the pool since, or not only regions allocate from the pool."""
        tag, device = allocation.tag, allocation.device
        epoch = _core.tag_info(tag).epoch
        pools = [pool for pool in list(self._uncaptured.values()) if pool.key.options.managed and pool.device == device]
        return any(
            pool.had_segment_at(torch, allocation.address, epoch)
            for pool in pools
            if pool.key.options.tag == tag and pool.epoch < epoch and torch.uses_of(pool.memory_pool) <= OBJECT_USES
        )

    def retire_idle(self, torch: TorchCuda, pools: Iterable[Pool]) -> bool:
        """Retire those of the idle pools that are worth it. Return whether an emptying is needed to release their memory.
        Pools that have come into use are skipped."""
        # Most pools of an unused device are empty; this check is cheaper than a snapshot of each.
        pools = list(pools)
        devices = {device for device in {pool.device for pool in pools} if torch.releasable_bytes(device)}
        taken = TakenPools(self, [pool for pool in pools if pool.device in devices])
        return _core.within(taken, self.retire_taken, torch, taken)

    def retire_taken(
        self, torch: TorchCuda, taken: TakenPools, by_pool: Mapping[PoolId, list[dict[str, Any]]] | None = None
    ) -> bool:
        """Retire those of the taken pools that are worth it. Return whether an emptying is needed to release their memory.

        Args:
            torch: PyTorch.
            taken: The pools.
            by_pool: PyTorch's segments by pool; None: asks PyTorch for those of each pool.
        """
        retired = False
        for pool in list(taken.pools):
            if self.should_retire(torch, pool, segments=None if by_pool is None else by_pool.get(pool.id, [])):
                _core.move(taken.pools, self._postponed, taken.pools.index(pool))
                retired = True
        self.retire_postponed(torch)
        return retired and needs_emptying(torch)

    def should_retire(
        self,
        torch: TorchCuda,
        pool: Pool,
        uses: int = OBJECT_USES,
        segments: list[dict[str, Any]] | None = None,
    ) -> bool:
        """Return whether a pool is to be retired. A pool that a captured graph uses never is: replays use blocks that
        PyTorch shows as free.

        Args:
            torch: PyTorch.
            pool: The pool.
            uses: How many uses PyTorch counts without graphs.
            segments: PyTorch's segments of the pool; None: asks PyTorch.
        """
        if torch.uses_of(pool.memory_pool) > uses:
            return False
        if torch.captures_join_regions and pool.id not in self._uncaptured:
            return False
        if segments is None:
            segments = pool.scan(torch)
        if not [row for row in segments if not row["active_size"]] or not has_idle_segment(segments):
            return False
        fill = measure_fill(segments)
        pool.live = fill.live
        stranded = 0
        if fill.live and fill.idle > fill.free:
            stranded = self.stranded_bytes(torch, pool.key.options.tag, pool.device)
        return is_worth_retiring(fill, stranded)

    def select(self, tags: Tags = None) -> list[Pool]:
        """Return the idle pools of the tags, at this moment."""
        return [pool for key, pools in list(self._idle.items()) if selects(tags, key.options.tag) for pool in list(pools)]

    def give_away(self, torch: TorchCuda, matches: Callable[[Key], bool]) -> list[Any]:
        """Retire the idle pools with matching keys and return their MemPools. The caller's reference may keep a pool
        alive."""
        taken = _core.within(self.lock, self._take_matching, matches)
        self.note_captured(torch, taken)  # a program that has the object may capture into the pool
        memory_pools = [pool.memory_pool for pool in taken]
        for pool in taken:
            self.retire(torch, pool)
        return memory_pools

    def _take_matching(self, matches: Callable[[Key], bool]) -> list[Pool]:
        """Remove the idle pools with matching keys, and return them. The caller holds the lock."""
        keys = [key for key in self._idle if matches(key)]
        return [pool for key in keys for pool in self._idle.pop(key)]


class _ClaimedPools(SingleUseScope):
    """A context manager inside which this thread alone has the pools of a shared list: two threads must not retire one pool.

    Attributes:
        pools: The pools. Pools that are still in this list at the end return to the shared list.
    """

    def __init__(self, shared: list[Pool]) -> None:
        self._shared = shared
        self.pools: list[Pool] = []

    def _begin(self) -> None:
        with contextlib.suppress(IndexError):  # another thread has taken the last one since
            while self._shared:
                _core.move(self._shared, self.pools, 0)

    def _end(self) -> None:
        while self.pools:
            _core.move(self.pools, self._shared, 0)


class TakenPools(SingleUseScope):
    """A context manager inside which the caller uses those of the given pools that were idle.

    Attributes:
        pools: The pools in use. Pools that are still in this list at the end become idle again.
    """

    def __init__(self, idle_pools: IdlePools, wanted: Sequence[Pool]) -> None:
        self._idle_pools = idle_pools
        self._wanted = wanted
        self.pools: list[Pool] = []

    def _begin(self) -> None:
        for pool in self._wanted:
            _core.within(self._idle_pools.lock, self._idle_pools._take_one, pool, self.pools)

    def _end(self) -> None:
        while self.pools:
            _core.within(self._idle_pools.lock, self._idle_pools._put_back, self.pools)
