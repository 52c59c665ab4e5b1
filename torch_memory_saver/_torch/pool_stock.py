"""PyTorch memory pools with this package's allocator: one for each entry of a region, by options and device.

A pool is *idle* (in the stock, not in use), *routed* (allocations of one thread come from it), or *retired* (torch releases
its segments as they empty). A pool can be routed by one thread at a time. While its object lives, none of its segments is
released to the driver. Destroying the object while a pool is routed on any thread ends the process, so the reference to each
object is leaked until :meth:`PoolStock.retire` drops it.

A pool that may hold paused memory must not be entered, because torch would allocate from its free blocks. Each pool records
the number of pauses of its tag when it was last entered. If there were more since, and memory of the tag is still paused,
the pool stays idle.

Free blocks of a pool that no stream capture has used are dead (live.py). The stock keeps the ids of these pools, including
retired ones until torch has released their memory, and removes a pool permanently once a capture may have used it.

Lock: `_lock` guards the bookkeeping below and is never held across a call of torch, because torch's allocator calls the
native core with its own mutex held. pools.py, which routes what is checked out here, uses the same lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._saver.options import RegionOptions
from torch_memory_saver._torch.frames import Frame
from torch_memory_saver._torch.layer import PoolId, TorchCuda

__all__ = ["Key", "Pool", "PoolStock", "Tags", "selects"]

#: A selection of tags: None is every tag.
Tags = tuple[str, ...] | None

#: The maximum number of retired pools that are recorded, for programs that never pause.
_MOST_RETIRED = 10_000


class Key(NamedTuple):
    """The key of an idle pool: the region's options and the device. Its fields are read by name. It is a tuple, because
    every entry of a region looks up one for each device."""

    options: RegionOptions
    device: int


def selects(tags: Tags, tag: str) -> bool:
    """Whether a pause or resume of `tags` selects `tag`."""
    return tags is None or tag in tags


class Pool:
    """One torch.cuda.MemPool with its key and state."""

    __slots__ = ("epoch", "id", "key", "memory_pool")

    def __init__(self, memory_pool: Any, key: Key) -> None:
        self.memory_pool = memory_pool
        self.id: PoolId = memory_pool.id
        self.key = key
        self.epoch = 0  # number of pauses of the tag when this pool was last entered

    @property
    def device(self) -> int:
        return self.key.device


class PoolStock:
    """The idle and retired pools of the process."""

    def _reset_stock(self) -> None:
        """Resets the state to that of a process without pools: at the start, and in a forked child, where torch cannot use
        them."""
        # Reentrant, because any allocation may run the garbage collector, and so a finalizer that enters a region.
        self._lock = threading.RLock()
        self._idle: dict[Key, list[Pool]] = {}
        self._doomed: deque[Pool] = deque()  # to be retired at the next opportunity; appended to without the lock
        self._uncaptured: set[PoolId] = set()  # pools of regions that no capture has used
        self._retired: set[PoolId] = set()  # the retired ones of these

    def _check_out_all(self, torch: TorchCuda, frame: Frame, devices: Sequence[int]) -> None:
        """Assigns a pool of each device to a new frame."""
        options = frame.options
        if options.managed and len(devices) > 1:
            info = _core.tag_info(options.tag)
            if not info.paused:
                with self._lock:  # once for all devices, so that an entry stays cheap with many
                    for device in devices:
                        idle = self._idle.get(Key(options, device))
                        if not idle:
                            break
                        pool = idle.pop()
                        pool.epoch = info.epoch
                        frame.pools.append(pool)
                devices = devices[len(frame.pools) :]
        for device in devices:
            frame.pools.append(self.check_out(torch, Key(options, device)))

    def check_out(self, torch: TorchCuda, key: Key) -> Pool:
        """A pool that is not in use and does not allocate from paused memory: an idle one, or a new one."""
        if not key.options.managed:
            return self.make_pool(torch, key)
        info = _core.tag_info(key.options.tag)
        suspects: list[Pool] = []
        with self._lock:
            idle = self._idle.get(key)
            if idle:
                if not info.paused:
                    pool = idle.pop()
                    pool.epoch = info.epoch
                    return pool
                for pool in reversed(idle):
                    if pool.epoch == info.epoch:
                        idle.remove(pool)
                        return pool
                suspects, self._idle[key] = idle, []
        # An empty pool has no paused memory.
        empty = next((pool for pool in suspects if not torch.segments(pool.id)), None)
        if suspects:
            with self._lock:
                self._idle.setdefault(key, []).extend(pool for pool in suspects if pool is not empty)
        if empty is not None:
            pool = empty
        else:
            pool = self.make_pool(torch, key)
            self.note_uncaptured(pool)
        pool.epoch = info.epoch
        return pool

    def note_uncaptured(self, pool: Pool) -> None:
        """Record that no capture uses a new pool: its free blocks are dead."""
        with self._lock:
            self._uncaptured.add(pool.id)

    def check_in(self, pool: Pool) -> None:
        """Makes the pool idle again."""
        with self._lock:
            self._idle.setdefault(pool.key, []).append(pool)

    def make_pool(self, torch: TorchCuda, key: Key) -> Pool:
        """A new pool. Its reference is leaked until it is retired."""
        return Pool(torch.make_pool(key.device, key.options.managed), key)

    def retire(self, torch: TorchCuda, pool: Pool) -> None:
        """Retires a pool that is not routed: torch releases its segments at an emptying after their last tensor is gone."""
        with self._lock:
            if pool.id in self._uncaptured:
                if len(self._retired) == _MOST_RETIRED:
                    self._forget(set(self._retired))
                self._retired.add(pool.id)
        torch.give_up(pool)

    def retire_later(self, pool: Pool) -> None:
        """For finalizers, which may run even while the lock is held."""
        self._doomed.append(pool)

    def retire_doomed(self, torch: TorchCuda) -> None:
        """Retires the pools that finalizers left."""
        while self._doomed:
            self.retire(torch, self._doomed.popleft())

    def retired_pools(self) -> frozenset[PoolId]:
        """Retired pools whose memory torch may still hold, and releases when its cache is emptied."""
        with self._lock:
            return frozenset(self._retired)

    def _strike_off(self, pools: Iterable[Pool]) -> None:
        with self._lock:
            self._forget({pool.id for pool in pools})

    def _forget(self, pools: set[PoolId]) -> None:
        self._uncaptured -= pools
        self._retired -= pools

    def retire_idle(self, torch: TorchCuda, tags: Tags) -> bool:
        """Retires the idle pools of `tags` that hold a segment without tensors. Returns whether there were any."""
        with self._lock:
            taken = [pool for key, pools in self._idle.items() if selects(tags, key.options.tag) for pool in pools]
            for key in [key for key in self._idle if selects(tags, key.options.tag)]:
                del self._idle[key]
        retired = False
        # Most pools of an unused device are empty; this check is cheaper than a snapshot of each.
        devices = {device for device in {pool.device for pool in taken} if torch.releasable_bytes(device)}
        for pool in taken:
            if pool.device in devices and self.has_idle_segment(torch, pool):
                self.retire(torch, pool)
                retired = True
            else:
                self.check_in(pool)
        return retired

    @staticmethod
    def has_idle_segment(torch: TorchCuda, pool: Pool) -> bool:
        return torch.gives_back(torch.segments(pool.id))

    def idle_pools(self, tags: Tags = None) -> list[Pool]:
        """The idle pools of the tags, at this moment."""
        with self._lock:
            return [pool for key, pools in self._idle.items() if selects(tags, key.options.tag) for pool in pools]
