"""Release the memory of pools, and of PyTorch's cache beside them.

The store has the idle pools and the regions of every thread, each with its own state, and decides which memory of both the
end of a region, a pause, a resume and empty_cache() release. PyTorch is called with no lock held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._torch.base.collector import StoppedCollector
from torch_memory_saver._torch.binding.history import may_have_native_frames
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.memory.default_pool import SubstitutePools
from torch_memory_saver._torch.memory.spare_pools import SpareRouting
from torch_memory_saver._torch.pools.fill import has_idle_segment
from torch_memory_saver._torch.pools.idle import IdlePools, TakenPools
from torch_memory_saver._torch.pools.last_scan import LastScan
from torch_memory_saver._torch.pools.retirement import must_not_free, needs_emptying
from torch_memory_saver._torch.records.frames import Frame
from torch_memory_saver._torch.records.pool import OBJECT_USES, Pool
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver._torch.routing.outside_memory import OutsideMemoryMonitor
from torch_memory_saver._torch.routing.regions import Regions, uses_of_object
from torch_memory_saver.errors import TorchMemorySaverError

__all__ = ["PoolStore"]

logger = logging.getLogger("torch_memory_saver")

_Result = TypeVar("_Result")

#: For each further number of blocks, one more region ends without a scan for idle segments of the pool.
_FEW_BLOCKS = 512
#: After this number of scans in a row that found the pool unchanged, this number of regions end without a scan.
_MAX_SCANS_WITHOUT_GROWTH, _MAX_EXITS = 8, 63


def _paused_tags(tags: Tags) -> list[str]:
    """Return the tags with paused memory that `tags` selects."""
    return [row.tag for row in _core.usage(None) if row.tag is not None and row.paused_bytes and selects(tags, row.tag)]


class PoolStore:
    """The memory of the pools of this process, and PyTorch's cache.

    Attributes:
        idle_pools: The pools that no thread uses, and retired pools.
        regions: The frames of every thread, with the pools that they use.
        outside_memory: The monitor of memory that PyTorch allocates outside of every region.
        substitutes: The pools in place of PyTorch's default pool while that is paused.
    """

    def __init__(self) -> None:
        self.idle_pools = IdlePools()
        self.regions = Regions(self.idle_pools)
        self._reset()

    def _reset(self) -> None:
        self._spare_pools: list[list[Pool]] = []  # pools without memory, one of each device, for empty_retired()
        self._rows: dict[str, list[_core.Usage]] = {}  # of each tag, when its last region ended
        self._has_logged_deferred_emptying = False
        self._frees_at_pause: dict[str, dict[int, int]] = {}  # PyTorch's counts, by paused tag and device
        self.outside_memory = OutsideMemoryMonitor()
        self.substitutes = SubstitutePools(self.idle_pools, self.regions)
        self._last_scan = LastScan(self.idle_pools)

    def after_fork_in_child(self) -> None:
        """Forget the parent's pools, which a forked child cannot use."""
        self.idle_pools.after_fork_in_child()
        self.regions.after_fork_in_child()
        self._reset()

    # Entering and leaving regions

    def make_room(self, frame: Frame) -> None:
        """Retire the pools that finalizers left, and give back PyTorch's cache if a region needs room (entry_room.py). To be
        called before it is entered."""
        torch, stack = frame.torch, frame.stack
        if torch is None:
            return
        self.idle_pools.retire_postponed(torch)
        if frame.origin is not None or (stack and frame.managed):
            return
        devices = self.regions.devices()
        devices = devices if len(devices) == 1 else devices_in_use()
        if [device for device in devices if self.regions.room.is_needed(torch, frame.options, device)]:
            self.empty_cache(torch)

    def return_memory(self, frame: Frame) -> None:
        """Release what waits for the end of a frame that has been left: after disable() the memory that was allocated and
        freed inside, and after a region what empty_cache() could not release. If a signal handler raises, a later call
        releases it."""
        torch = frame.torch
        if torch is None:
            return
        if not frame.managed:
            self.idle_pools.retire_postponed(torch)
            self.empty_torch_cache(torch)
        elif self.idle_pools.pending:
            self.idle_pools.retire_postponed(torch)
            self._empty_pending(torch)

    def prepare_threads(self, frame: Frame) -> None:
        """Release the idle segments of a region's tag. To be called inside it, before the first call follows it: this
        thread's pools serve no other thread, which would take as much memory again."""
        torch = frame.torch
        if torch is None or frame.has_threads:
            return
        frame.has_threads = True
        try:
            if frame.managed and not must_not_free(torch) and self.retire_idle_of(torch, (frame.tag,)):
                self.empty_retired(torch)
        except (TorchMemorySaverError, RuntimeError) as error:  # a lost device
            logger.warning("a call was submitted to a thread pool inside %s: idle memory stays: %s", frame, error)

    def return_idle_of(self, frame: Frame, pools: Sequence[Pool]) -> None:
        """Note what a thread's outermost region has taken, and release the idle segments of the pools that were routed since
        its entry. To be called after :meth:`Regions.leave`, with the pools that the frame had."""
        torch = frame.torch
        if torch is None or not frame.managed:
            return
        routed = frame.inner.union(pools) if frame.inner else pools
        outer = frame.stack[-1] if frame.stack else frame.origin
        if outer is not None and not outer.closed:
            self.regions.note_inner(outer, routed)
            return
        rows = _core.usage(frame.tag)
        has_changed = rows != self._rows.get(frame.tag)
        self._rows[frame.tag] = rows
        used = [pool for pool in routed if self._is_due(pool, has_changed or pool.key.options.tag != frame.tag)]
        if not used or may_have_native_frames(torch.torch):
            return
        in_use = _core.active_devices()
        taken = TakenPools(self.idle_pools, [pool for pool in used if in_use >> pool.device & 1])
        idle: list[Pool] = _core.within(StoppedCollector(), _core.within, taken, self._scan_taken, torch, taken)
        tags = {pool.key.options.tag for pool in used}
        retired = self.idle_pools.retired_of(tags)
        if not torch.routing_spares_cache:  # an emptying costs PyTorch's own cache
            retired = _core.within(StoppedCollector(), self._with_idle_segment, torch, retired)
        if (idle or retired) and not must_not_free(torch):
            if self.idle_pools.retire_idle(torch, idle) or retired:
                self.empty_retired(torch)
            gone = {pool.id for pool in idle if pool.memory_pool is None and not pool.live}
            self.idle_pools.forget(gone)

    def _scan_taken(self, torch: TorchCuda, taken: TakenPools) -> list[Pool]:
        return [pool for pool in list(taken.pools) if self._scan(torch, pool)]

    def _scan(self, torch: TorchCuda, pool: Pool) -> bool:
        """Note what a region has taken of a pool that it has used. Return whether to retire the pool."""
        before = pool.bytes
        should_retire = self.idle_pools.should_retire(torch, pool)
        self.regions.room.note(pool.key, pool.bytes - before)
        return should_retire

    def _with_idle_segment(self, torch: TorchCuda, pools: list[Pool]) -> list[Pool]:
        """Scan those of the retired pools that are due. Return the ones with a segment without a tensor."""
        return [pool for pool in pools if self._is_due(pool, False) and has_idle_segment(pool.scan(torch))]

    @staticmethod
    def _is_due(pool: Pool, may_have_grown: bool) -> bool:
        """Return whether to scan a pool for idle segments when a region ends. A scan reads PyTorch's list of the pool's
        blocks. So regions that allocate nothing seldom scan a pool with many blocks, or one that does not grow."""
        pool.exits_since_scan += 1
        wait = pool.blocks // _FEW_BLOCKS if pool.scans_without_growth < _MAX_SCANS_WITHOUT_GROWTH else _MAX_EXITS
        return may_have_grown or pool.exits_since_scan > wait

    def note_pause(self, torch: TorchCuda, tags: Tags) -> None:
        """Record how many blocks PyTorch has freed. To be called after a pause that has left memory of the tags paused."""
        frees = {device: torch.count_frees(device) for device in devices_in_use()}
        for tag in _paused_tags(tags):
            self._frees_at_pause.setdefault(tag, frees)

    def may_have_died_while_paused(self, torch: TorchCuda, tags: Tags) -> bool:
        """Return whether tensors in paused memory of the tags may have been deleted since its first pause, because PyTorch
        has freed blocks since then. To be called once, before the memory is resumed."""
        frees = {device: torch.count_frees(device) for device in devices_in_use()}
        before = [self._frees_at_pause.pop(tag, None) for tag in _paused_tags(tags)]
        return any(counts != frees for counts in before)

    # Emptying caches

    def empty_cache(self, torch: TorchCuda) -> None:
        """Release segments without a tensor: those of torch's default pool, and of this package's pools by the rule of
        :func:`is_worth_retiring`.

        This thread's own routings are suspended during the call, and their pools replaced. Devices on which another
        thread is in a region keep PyTorch's own cache until the last thread leaves.
        """
        if not torch.is_capturing():
            self.empty_cache_with(torch, lambda: self.empty_torch_cache(torch))

    def empty_cache_with(self, torch: TorchCuda, empty_torch_cache: Callable[[], _Result]) -> _Result:
        """Release memory as :meth:`empty_cache` does, with a function that empties PyTorch's cache. Return its result."""
        result: _Result = _core.within(StoppedCollector(), self._empty_cache, torch, empty_torch_cache)
        return result

    def _empty_cache(self, torch: TorchCuda, empty_torch_cache: Callable[[], _Result]) -> _Result:
        in_use = self.idle_pools.begin_emptying(torch)
        result = empty_torch_cache()  # first: PyTorch waits for the streams that used deleted tensors
        has_retired = self._last_scan.retire_idle(torch, in_use)
        if self._replace_own(torch, None) or has_retired:
            empty_torch_cache()
        return result

    def retire_idle_of(self, torch: TorchCuda, tags: Tags) -> bool:
        """Retire idle pools of the tags, and those of this thread's frames, if worth it. Return whether to empty PyTorch."""
        self.idle_pools.retire_postponed(torch)
        retired = self.idle_pools.retire_idle(torch, self.idle_pools.select(tags))
        return self._replace_own(torch, tags) or retired

    def _replace_own(self, torch: TorchCuda, tags: Tags) -> bool:
        """Replace this thread's pools of the tags (None: and of disable()) if worth it. Return whether to empty PyTorch."""
        own = [
            each
            for each in self.regions.stack()
            if each.pools and (selects(tags, each.tag) if each.managed else tags is None)
        ]
        devices = {pool.device for frame in own for pool in frame.pools}
        releasable = {device for device in devices if torch.releasable_bytes(device)}
        replaced: list[bool] = []

        def visit(frame: Frame) -> None:
            if frame in own:
                replaced.append(self._replace_pools(torch, frame, releasable))

        if releasable:
            _core.within(self.regions.routing_suspended(torch, visit), bool)
        return any(replaced) and needs_emptying(torch)

    def _replace_pools(self, torch: TorchCuda, frame: Frame, devices: Collection[int]) -> bool:
        """Retire the pools of a suspended frame that are worth it, and replace them by others. Return whether there were
        any."""
        replaced = False
        for index, pool in enumerate(frame.pools):
            if pool.device in devices and self.idle_pools.should_retire(torch, pool):
                frame.pools[index] = self.idle_pools.check_out(torch, pool.key)
                self.idle_pools.retire(torch, pool)
                replaced = True
        return replaced

    def pools_to_empty(self, torch: TorchCuda, segments: Mapping[PoolId, list[dict[str, Any]]]) -> set[PoolId]:
        """Return the pools whose idle segments :meth:`empty_cache` of this thread would release now.

        Args:
            torch: PyTorch.
            segments: PyTorch's segments by pool.
        """
        frames = [frame for frame in self.regions.stack() if frame.managed]
        candidates = [(pool, OBJECT_USES) for pool in self.idle_pools.select()]
        candidates += [(pool, uses_of_object(frame)) for frame in frames for pool in frame.pools]
        found = {
            pool.id
            for pool, uses in candidates
            if pool.id in segments and self.idle_pools.should_retire(torch, pool, uses, segments[pool.id])
        }
        return found | self.idle_pools.retired_pools()

    def empty_retired(self, torch: TorchCuda) -> None:
        """Release the segments without a tensor of retired pools. Before PyTorch 2.13 its own cache stays, because pools
        without memory are routed during the call, on every device. Since 2.13 only the end of a pool's object spares it."""
        if not torch.routing_spares_cache:
            self.empty_torch_cache(torch)
            return
        if any(frame.routed for frame in self.regions.stack()):
            torch.empty_cache()
            return
        _core.within(SpareRouting(self.idle_pools, self.regions, self._spare_pools, torch), torch.empty_cache)
        if self.idle_pools.pending:
            self._empty_pending(torch)

    def empty_torch_cache(self, torch: TorchCuda) -> None:
        """Call torch.cuda.empty_cache() with this thread's routings suspended. Devices with routings of other threads stay
        pending."""
        _core.within(self.regions.routing_suspended(torch), self.empty_torch_cache_now, torch)

    def empty_torch_cache_now(self, torch: TorchCuda) -> None:
        """Empty the cache as :meth:`empty_torch_cache` does. This thread must route nothing."""
        self.regions.close_ended()
        kept = self._devices_that_keep_cache(torch)
        self.idle_pools.pending |= kept
        emptied = self.idle_pools.pending - kept
        _core.within(self.substitutes.suspended(torch), torch.empty_cache)
        self.idle_pools.pending -= emptied

    def log_deferred_emptying(self) -> None:
        """Log once that PyTorch's cache was not emptied because another thread is inside a region."""
        frame = self.regions.routed_by_others()
        if frame is None or not self.idle_pools.pending or self._has_logged_deferred_emptying:
            return
        self._has_logged_deferred_emptying = True
        logger.warning(
            "empty_cache() has released idle managed memory, but PyTorch's cache outside of regions is only released when "
            "another thread leaves %s. PyTorch does not release that cache while a thread is inside a region, even if an "
            "allocation is out of memory. Leave regions as soon as the allocations are made. (Logged once.)",
            frame,
        )

    def _empty_pending(self, torch: TorchCuda) -> None:
        due = self.idle_pools.pending - self._devices_that_keep_cache(torch)
        if due and not torch.is_capturing():
            self.empty_torch_cache_now(torch)

    def _devices_that_keep_cache(self, torch: TorchCuda) -> set[int]:
        """Return the devices whose cache cannot be emptied, because a thread routes a pool there. Empty since PyTorch
        2.13."""
        return self.regions.routed_devices() if torch.routing_spares_cache else set()
