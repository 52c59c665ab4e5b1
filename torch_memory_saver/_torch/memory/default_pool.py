"""PyTorch's default pool while its memory is paused (``TMS_INIT_ENABLE``): other pools take its place, and what they cannot
cover is shown in the report and logged once.

PyTorch hands out free blocks of its default pool although their segments are paused, and a tensor that is deleted during the
pause adds such a block. So before a pause of memory of the default pool, the allocations of every thread on that device are
routed to a *substitute*: a new pool whose memory is made as that of the default pool. It is managed as well, and
resident until the next pause, which puts a new substitute in its place. Once no memory of the default pool is
paused, the routing ends and the substitute is retired.

A substitute begins only where its routing stays below all others, because PyTorch allocates from the pool that is routed
last: regions and captures that begin later take precedence, and this thread's own regions are routed again. So it does not
begin while another thread is in a region or a capture is active, nor with a PyTorch before 2.11. The pause then reports the
bytes that PyTorch may hand out.

PyTorch returns no cached memory while a pool is routed. :meth:`SubstitutePools.suspended` ends the routing for that moment.
Its caching is off then, so that allocations of other threads go to cudaMalloc. Two things remain: memory that a program
takes with ``caching_allocator_alloc`` at that moment may be a paused block; and the routing of a MemPool that another thread
has begun with ``use_mem_pool`` before the pause, or before the emptying, gives way to the substitute.

Before 2.13 (pytorch pull request 181830) PyTorch ends the process when a MemPool is destroyed while another pool of its
device is routed. So with these releases a MemPool that the program drops is kept until the last substitute has ended.

Any thread may call. The calls that change something hold the gate of captures, and no other lock, while they call torch. A
signal handler may raise anywhere: the next call repeats what is missing.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._patches import is_replaced, replace
from torch_memory_saver._text import binary_size
from torch_memory_saver._torch.base.collector import StoppedCollector
from torch_memory_saver._torch.binding.captures import capture_gate
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL, PoolId, TorchCuda, drop_reference, leak_reference, pool_of
from torch_memory_saver._torch.pools.fill import has_idle_segment
from torch_memory_saver._torch.pools.idle import IdlePools
from torch_memory_saver._torch.pools.retirement import must_not_free
from torch_memory_saver._torch.records.frames import Pause
from torch_memory_saver._torch.records.pool import Key, Pool
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver._torch.routing.regions import Regions
from torch_memory_saver.errors import InvalidStateError
from torch_memory_saver.options import DEFAULT_TAG, RegionOptions

__all__ = ["DefaultPool", "SubstitutePools"]

logger = logging.getLogger("torch_memory_saver")

#: PyTorch's errors for a routing that is begun twice, and for one that is ended without having begun.
_ROUTED, _NOT_ROUTED = "already recording to mempool_id", "not currently recording to mempool_id"


class DefaultPool:
    """The number of the default pool, and whether it was logged. Any thread may call."""

    def __init__(self, substitutes: SubstitutePools) -> None:
        self._substitutes = substitutes
        self._warned = False

    def prepare(self, torch: TorchCuda, tags: Tags) -> int:
        """Prepare a pause of `tags` that is about to begin. Return the paused bytes that torch may hand out nevertheless."""
        with StoppedCollector():
            segments = torch.segments()
        free = self._free_bytes(segments, tags)
        covered = self._substitutes.begin(torch, free)
        return sum(size for device, size in free.items() if device not in covered)

    def _free_bytes(self, segments: list[dict[str, Any]], tags: Tags) -> Counter[int]:
        """Return the bytes of free blocks that the pause takes away from torch, by device. A device where it takes none away
        but segments without a free block has 0: a tensor that is deleted becomes one."""
        managed = {row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and selects(tags, row.tag)}
        free: Counter[int] = Counter()
        for segment in segments:
            if segment["address"] in managed and pool_of(segment) == self._substitutes.target(segment["device"]):
                free[segment["device"]] += _free_blocks(segment)
        return free

    def warn_once(self, reusable: int) -> None:
        """Log what :meth:`prepare` has returned, after the pause, once."""
        if reusable and not self._warned:
            self._warned = True
            logger.warning(
                "%s of the memory that this pause releases are free blocks of PyTorch's default pool. A tensor that "
                "PyTorch places there before the resume causes an illegal memory access. The pool cannot be replaced "
                "during the pause, because another thread is inside a region, or PyTorch is older than 2.11. Allocate "
                "inside disable() until the resume. (Logged once. reusable_bytes of the report has the number of each "
                "pause.)",
                binary_size(reusable),
            )


def _free_blocks(segment: dict[str, Any]) -> int:
    return sum(int(block["size"]) for block in segment["blocks"] if block["state"] == "inactive")


class SubstitutePools:
    """The substitutes of this process, by device. A device has several only while one replaces another: the last is used."""

    def __init__(self, idle_pools: IdlePools, regions: Regions) -> None:
        self._idle_pools = idle_pools
        self._regions = regions
        self._pools: dict[int, list[Pool]] = {}
        self._is_suspended = False
        self._kept: list[Any] = []  # the program's MemPools that it has dropped
        self._finalize: Callable[[Any], None] | None = None  # MemPool's own finaliser

    def target(self, device: int) -> PoolId:
        """Return the pool from which PyTorch serves allocations that nothing else routes."""
        pools = self._pools.get(device)
        return pools[-1].id if pools else DEFAULT_POOL

    def begin(self, torch: TorchCuda, devices: Iterable[int]) -> frozenset[int]:
        """Begin a new substitute on each of the devices, before a pause of memory of their :meth:`target`. Return the
        devices that have one."""
        wanted = frozenset(devices)
        if not wanted or not torch.last_routed_wins or torch.captures_join_regions:
            return frozenset()
        with self._alone(torch) as alone:
            if not alone:
                return frozenset()
            if torch.routing_spares_cache:  # since 2.13 a MemPool may end while another pool is routed
                self._keep_dropped_pools(torch)
            self._repair(torch)
            with self._regions.routing_suspended(torch):
                for device in wanted:
                    pools = self._pools.setdefault(device, [])
                    self._add(torch, device, pools)
                    self._retire(torch, pools, keep=1)
        return wanted

    def settle(self, torch: TorchCuda) -> None:
        """End the substitutes of devices where no memory of the default pool is paused. To be called after each pause and
        resume, and when a pending resume has ended."""
        if not self._pools and not self._kept:
            return
        with capture_gate.held():
            self._repair(torch)
            paused = {row.address for row in _core.segments() if row.state != _core.STATE_ACTIVE}
            needed = {
                segment["device"]
                for segment in torch.segments()
                if segment["address"] in paused and pool_of(segment) == DEFAULT_POOL
            }
            for device in self._pools.keys() - needed:
                self._retire(torch, self._pools[device], keep=0)
                del self._pools[device]
            if not self._pools and not self._regions.is_any_routed() and not must_not_free(torch):
                while self._kept:
                    memory_pool = self._kept.pop()
                    if self._finalize is not None:  # Python calls __del__ once
                        self._finalize(memory_pool)
                    drop_reference(memory_pool)
                    del memory_pool

    @contextlib.contextmanager
    def suspended(self, torch: TorchCuda) -> Iterator[None]:
        """Suspend the routing to substitutes inside, so that PyTorch's cache can be emptied. Substitutes with idle segments
        are retired and replaced. Does nothing where :meth:`begin` would not begin one. This thread routes nothing."""
        if not self._pools:
            yield
            return
        with self._alone(torch) as alone:
            if not alone:
                yield
                return
            try:
                self._is_suspended = True
                torch.set_caching(False)
                for pools in self._pools.values():
                    for pool in pools:
                        _end_routing(torch, pool)
                    if any(has_idle_segment(torch.segments(pool.id)) for pool in pools):
                        self._retire(torch, pools, keep=0)
                yield
            finally:
                self._repair(torch)

    def _repair(self, torch: TorchCuda) -> None:
        """End a suspension."""
        if not self._is_suspended:
            return
        for device, pools in self._pools.items():
            if pools:
                _begin_routing(torch, pools[-1])
            else:
                self._add(torch, device, pools)
        torch.set_caching(True)
        self._is_suspended = False

    @contextlib.contextmanager
    def _alone(self, torch: TorchCuda) -> Iterator[bool]:
        """Inside, no other thread enters a region or begins a capture. Yields whether none is in a region or captures."""
        regions = self._regions
        entry = Pause(regions.stack(), None, only_waits=True)  # calls in regions of other tags go on
        with capture_gate.held():
            try:
                yield not must_not_free(torch) and _holds_regions(regions, entry)
            finally:
                regions.end_pause(entry)

    def _add(self, torch: TorchCuda, device: int, pools: list[Pool]) -> None:
        pool = self._idle_pools.make_pool(torch, Key(RegionOptions.disabled(DEFAULT_TAG), device))
        self._idle_pools.note_uncaptured(pool)
        pools.append(pool)
        _begin_routing(torch, pool)

    def _retire(self, torch: TorchCuda, pools: list[Pool], keep: int) -> None:
        """Retire the oldest pools of a device, but for `keep`."""
        while len(pools) > keep:
            _end_routing(torch, pools[0])
            self._idle_pools.retire(torch, pools.pop(0))

    def _keep_dropped_pools(self, torch: TorchCuda) -> None:
        """Keep MemPools that the program drops, from now on, for as long as there is a substitute."""
        pool_class = torch.torch.cuda.MemPool
        if is_replaced(pool_class, "__del__"):
            return
        finalize: Callable[[Any], None] | None = getattr(pool_class, "__del__", None)
        self._finalize = finalize

        def __del__(memory_pool: Any) -> None:
            if self._pools and torch.uses_of(memory_pool) == 1:  # with another use its end does nothing
                leak_reference(memory_pool)  # also through the end of the process
                self._kept.append(memory_pool)
            elif finalize is not None:
                finalize(memory_pool)

        replace("torch.cuda.MemPool.__del__", pool_class, "__del__", __del__)


def _begin_routing(torch: TorchCuda, pool: Pool) -> None:
    try:
        torch.begin_routing_of_all_threads(pool.device, pool.id)
    except RuntimeError as error:
        if _ROUTED not in str(error):
            raise


def _end_routing(torch: TorchCuda, pool: Pool) -> None:
    try:
        torch.end_routing(pool.device, pool.id)
    except RuntimeError as error:
        if _NOT_ROUTED not in str(error):
            raise
        return
    torch.release_pool(pool.device, pool.id)


def _holds_regions(regions: Regions, entry: Pause) -> bool:
    """Keep other threads from entering regions until `regions.end_pause(entry)`. Return whether none is in one now."""
    try:
        regions.begin_pause(entry, 0.0)
    except InvalidStateError:
        return False
    return not regions.is_any_routed_by_others()
