"""Routing this thread's allocations to pools (pool_stock.py), frame by frame, and releasing the pools' memory.

Locks: `_lock` guards the bookkeeping of frames and pools and is never held across a call of torch, because torch's allocator
calls the native core with its own mutex held. Frames are entered and left by their own thread; other threads may only read
them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._saver.arguments import DEFAULT_TAG
from torch_memory_saver._saver.options import RegionOptions
from torch_memory_saver._torch.collector import collector_stopped
from torch_memory_saver._torch.elsewhere import Watch
from torch_memory_saver._torch.entry_room import EntryRoom
from torch_memory_saver._torch.frames import Frame
from torch_memory_saver._torch.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.pool_stock import Key, Pool, PoolStock, Tags, selects
from torch_memory_saver._torch.substitute_pools import SubstitutePools
from torch_memory_saver.errors import InvalidStateError

__all__ = ["Key", "Pool", "PoolStore", "Tags", "may_not_free", "selects", "would_read_stacks"]

logger = logging.getLogger("torch_memory_saver")

_Result = TypeVar("_Result")

#: The uses that torch counts for a pool: one for its object, and one for a routing.
_OBJECT_USES, _ROUTING_USES = 1, 1

#: For each further number of blocks, one more region ends without a look for idle segments of the pool.
_FEW_BLOCKS = 512
#: After this number of looks in a row that found nothing, this number of regions end without one.
_MOST_FRUITLESS, _MOST_UNSEEN = 8, 63


def _may_be_capturing(torch: TorchCuda) -> bool:
    """Whether this thread's current stream is being captured, or this is unknown because the device is lost."""
    try:
        return bool(torch.is_capturing())
    except RuntimeError:
        return True


def would_read_stacks(torch: TorchCuda) -> bool:
    """Whether PyTorch's list of segments takes seconds now, because it records the stacks of C++ functions."""
    from torch_memory_saver.memory.history import may_have_native_frames  # it imports this package's PyTorch layer

    return may_have_native_frames(torch.torch)


def may_not_free(torch: TorchCuda) -> bool:
    """Whether a capture is active, or the device is lost. The native pause, which comes next and checks the same, raises the
    error."""
    try:
        return torch.is_capturing() or bool(_core.counters()["visible_captures"])
    except RuntimeError:
        return True


def _paused_tags(tags: Tags) -> list[str]:
    """Those of the tags with paused memory."""
    return [row.tag for row in _core.usage(None) if row.tag is not None and row.paused_bytes and selects(tags, row.tag)]


class PoolStore(PoolStock):
    """Every pool of the process and every frame of every thread."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._reset()

    def _reset(self) -> None:
        self._reset_stock()
        self._pause_ended = threading.Condition(self._lock)
        self._frames: dict[int, Frame] = {}  # frames with pools, by id()
        self._pending: set[int] = set()  # devices whose cache is to be emptied when the last thread leaves its region
        self._spare_pools: list[list[Pool]] = []  # pools without memory, one of each device, for empty_retired()
        self._pauses: list[tuple[int, Tags]] = []  # running pauses: thread and tags
        self._entered: set[str] = set()  # tags of regions and captures that began since the last pause of the tag
        self._devices: Sequence[int] = ()  # all visible devices, once they are known
        self.room = EntryRoom()
        self._rows: dict[str, list[_core.Usage]] = {}  # of each tag, when its last region ended
        self._has_logged_put_off = False
        self._frees_at_pause: dict[str, dict[int, int]] = {}  # PyTorch's counts, by paused tag and device
        self.single_device = False
        self.watch = Watch()
        self.substitutes = SubstitutePools(self)

    after_fork_in_child = _reset

    # Entering and leaving

    def stack(self) -> list[Frame]:
        """This thread's frames, outermost first."""
        try:
            stack: list[Frame] = self._local.stack
        except AttributeError:
            stack = self._local.stack = []
        return stack

    def enter(self, torch: TorchCuda | None, options: RegionOptions) -> Frame:
        """Routes this thread's allocations to a pool on every visible device, because it may use any of them inside. This
        creates no context. Without torch it only records the frame."""
        stack = self.stack()
        frame = Frame(torch, options, stack)
        if torch is None:
            stack.append(frame)
            return frame
        if self._doomed:
            self.retire_doomed(torch)
        devices = self._devices_to_route(torch)
        if not stack or not options.managed:
            self._make_room(torch, options, devices)
        outer = stack[-1] if stack and not torch.last_routed_wins else None
        try:
            with self._lock:
                if options.managed and self._pauses:
                    self._wait_for_pauses(options.tag)
                if torch.routes_every_thread:
                    self._check_alone(frame)
                self._frames[id(frame)] = frame
                self._entered.add(options.tag)
            self._check_out_all(torch, frame, devices)
            if _may_be_capturing(torch):
                self._strike_off(frame.pools)
            if outer is not None:
                self._end_routing(torch, outer)
            self._begin_routing(torch, frame)
            stack.append(frame)
            self._settle_autograd(torch)
        except BaseException:
            # A signal handler may raise at any time, even after the last step.
            if stack and stack[-1] is frame:
                stack.pop()
            self._settle_autograd(torch)
            self._end_routing(torch, frame)
            if outer is not None:
                self._begin_routing(torch, outer)
            self._discard(frame)
            raise
        return frame

    def _check_alone(self, frame: Frame) -> None:
        """If torch routes all threads, one thread would allocate from another's pool. The caller holds the lock."""
        if any(other.thread != frame.thread for other in self._frames.values()):
            raise InvalidStateError(
                f"another thread is inside a region, and PyTorch before 2.8 cannot tell threads apart: enter "
                f"region(tag={frame.tag!r}) after it has left",
                operation="region",
                tag=frame.tag,
            )

    def leave(self, frame: Frame) -> list[Frame]:
        """Ends only this frame. Returns the later frames of its thread, which stay; the last is in force."""
        if frame.closed:
            return []
        stack = frame.stack
        later = stack[stack.index(frame) + 1 :]
        stack.remove(frame)
        frame.closed = True
        torch = frame.torch
        emptied_by: TorchCuda | None = None
        if torch is not None:
            if frame.thread == threading.get_ident():
                self._settle_autograd(torch)
            if _may_be_capturing(torch):
                self._strike_off(frame.pools)
            self._end_routing(torch, frame)
            if not frame.managed:
                for pool in frame.pools:
                    self._note_disabled(torch, pool)
                    self.retire(torch, pool)
                frame.pools = []
                emptied_by = torch
            self._discard(frame)
        inner = stack[-1] if stack else None
        if inner is not None and inner.torch is not None and not inner.routed and frame.thread == threading.get_ident():
            self._begin_routing(inner.torch, inner)
        if emptied_by is not None:
            self.empty_torch_cache(emptied_by)
        elif self._pending and torch is not None:
            self._empty_pending(torch)
        return later

    def _make_room(self, torch: TorchCuda, options: RegionOptions, devices: Sequence[int]) -> None:
        """Returns PyTorch's cache if a region that is about to be entered needs room (entry_room.py)."""
        needed = False
        for device in devices if len(devices) == 1 else devices_in_use():
            needed |= self.room.is_needed(torch, options, device)
        if needed:
            self.empty_cache(torch)

    def return_idle_of(self, frame: Frame, pools: Sequence[Pool]) -> None:
        """To be called after :meth:`leave`, with the pools that the frame had. At the end of a thread's outermost region,
        notes what it has taken, and releases the idle segments of the pools that were routed since its entry."""
        torch = frame.torch
        if torch is None or not frame.managed:
            return
        if frame.stack:
            frame.stack[-1].inner.update(pools, frame.inner)
            return
        frame.inner.update(pools)
        rows = _core.usage(frame.tag)
        has_changed = rows != self._rows.get(frame.tag)
        self._rows[frame.tag] = rows
        used = [pool for pool in frame.inner if self._is_due(pool, has_changed or pool.key.options.tag != frame.tag)]
        if not used or would_read_stacks(torch):
            return
        in_use = _core.active_devices()
        with collector_stopped:
            idle = [pool for pool in used if in_use >> pool.device & 1 and self._look(torch, pool)]
        tags = {pool.key.options.tag for pool in used}
        with self._lock:
            has_retired = any(key.options.tag in tags for key in self._retired.values())
        if (idle or has_retired) and not may_not_free(torch):
            self.retire_idle(torch, idle)
            self.empty_retired(torch)
            with self._lock:
                self._forget({pool.id for pool in idle if pool.memory_pool is None and not pool.live})

    def _look(self, torch: TorchCuda, pool: Pool) -> bool:
        """Whether to retire a pool that a region has used, of which it notes what it has taken."""
        before = pool.bytes
        should_retire = self.should_retire(torch, pool)
        self.room.note(pool.key, pool.bytes - before)
        return should_retire

    @staticmethod
    def _is_due(pool: Pool, may_have_grown: bool) -> bool:
        """Whether to look for idle segments of a pool when a region ends. A look takes PyTorch's list of the pool's blocks.
        So the regions that allocate nothing look seldom at a pool with many blocks, or where looks find nothing."""
        pool.unseen += 1
        wait = pool.blocks // _FEW_BLOCKS if pool.fruitless < _MOST_FRUITLESS else _MOST_UNSEEN
        return may_have_grown or pool.unseen > wait

    def _note_disabled(self, torch: TorchCuda, pool: Pool) -> None:
        """Notes what a disable() has taken, whose pool is about to be retired."""
        if _core.active_devices() >> pool.device & 1:
            self.room.note(pool.key, sum(segment["total_size"] for segment in torch.segments(pool.id)))

    def _settle_autograd(self, torch: TorchCuda) -> None:
        """Makes backward() run on the calling thread inside regions. On torch's own threads gradients would be outside every
        region."""
        stack = self.stack()
        inside = bool(stack) and (stack[-1].torch is not None or any(frame.torch is not None for frame in stack))
        before: bool | None = getattr(self._local, "autograd_threads", None)
        if inside and before is None:
            self._local.autograd_threads = torch.autograd_threads()
            torch.set_autograd_threads(False)
        elif not inside and before is not None:
            self._local.autograd_threads = None
            torch.set_autograd_threads(before)

    def _devices_to_route(self, torch: TorchCuda) -> Sequence[int]:
        if torch.routes_every_thread:
            return (torch.current_device(),)
        if not self._devices:
            self._devices = range(_core.device_count())
            self.single_device = len(self._devices) == 1
        return self._devices

    def pause_entry(self, tags: Tags) -> tuple[int, Tags]:
        """The argument of :meth:`begin_pause` and :meth:`end_pause` for a pause by this thread."""
        return (threading.get_ident(), tags)

    def begin_pause(self, entry: tuple[int, Tags]) -> None:
        """From now on other threads that enter a region of the tags wait.

        Raises:
            InvalidStateError: Another thread is inside a region of one of the tags: it would allocate paused memory.
        """
        thread, tags = entry
        with self._lock:
            for frame in self._frames.values():
                if frame.managed and frame.thread != thread and selects(tags, frame.tag):
                    raise InvalidStateError(
                        f"another thread is inside region(tag={frame.tag!r}): pause that tag after it has left the region",
                        operation="pause",
                        tag=frame.tag,
                    )
            self._pauses.append(entry)

    def end_pause(self, entry: tuple[int, Tags]) -> None:
        """Regions may be entered again. Also accepts a pause that has not begun, because a signal handler may raise at any
        time."""
        with self._lock:
            if entry in self._pauses:
                self._pauses.remove(entry)
            self._pause_ended.notify_all()

    def note_pause(self, torch: TorchCuda, tags: Tags) -> None:
        """To be called after a pause that has left memory of the tags paused."""
        frees = {device: torch.count_frees(device) for device in devices_in_use()}
        for tag in _paused_tags(tags):
            self._frees_at_pause.setdefault(tag, frees)

    def may_have_died_while_paused(self, torch: TorchCuda, tags: Tags) -> bool:
        """Whether tensors in paused memory of the tags may have been deleted since its first pause, because PyTorch has
        freed blocks since then. To be called once, before the memory is resumed."""
        frees = {device: torch.count_frees(device) for device in devices_in_use()}
        before = [self._frees_at_pause.pop(tag, None) for tag in _paused_tags(tags)]
        return any(counts != frees for counts in before)

    def note_entered(self, tag: str) -> None:
        """Count a capture with memory of the tag as a region, for :meth:`take_entered`."""
        with self._lock:
            self._entered.add(tag)

    def take_entered(self, tags: Tags) -> bool:
        """Return whether PyTorch may have allocated memory of `tags` since the last call for them: a region was entered or
        is open."""
        with self._lock:
            entered = {tag for tag in self._entered if selects(tags, tag)}
            self._entered -= entered - {frame.tag for frame in self._frames.values()}
        return bool(entered)

    def _wait_for_pauses(self, tag: str) -> None:
        """Waits while another thread pauses the tag: a region would get memory that is about to be released. The caller
        holds the lock."""
        thread = threading.get_ident()
        while any(owner != thread and selects(tags, tag) for owner, tags in self._pauses):
            self._pause_ended.wait()

    def _begin_routing(self, torch: TorchCuda, frame: Frame) -> None:
        """Routes this thread's allocations to the frame's pools. Does nothing if they already are."""
        if frame.routed:
            return
        begun: list[Pool] = []
        try:
            for pool in frame.pools:
                torch.begin_routing(pool.key.device, pool.id)
                begun.append(pool)
        except BaseException:
            for pool in reversed(begun):
                torch.end_routing(pool.device, pool.id)
                torch.release_pool(pool.device, pool.id)
            raise
        frame.routed = True

    def _end_routing(self, torch: TorchCuda, frame: Frame) -> None:
        """Undoes :meth:`_begin_routing`, from any thread. Does nothing if the frame is not routed."""
        if not frame.routed:
            return
        frame.routed = False
        for pool in reversed(frame.pools):
            torch.end_routing(pool.key.device, pool.id)
            torch.release_pool(pool.key.device, pool.id)

    def _discard(self, frame: Frame) -> None:
        """Removes the frame. Its pools become idle; those of a disable() that failed to begin are to be retired."""
        with self._lock:
            self._frames.pop(id(frame), None)
            for pool in frame.pools:
                if pool.key.options.managed:
                    self._idle.setdefault(pool.key, []).append(pool)
                else:
                    self._doomed.append(pool)
        frame.pools = []

    # Captures

    def pools_without_captures(self, torch: TorchCuda, listed: Collection[PoolId | None]) -> frozenset[PoolId]:
        """The pools in torch's list that only regions have used, including retired ones.

        A graph may have been captured into such a pool by its id: it counts as one of the pool's uses then.
        """
        with self._lock:
            self._forget(set(self._retired) - set(listed))
            alive = [(pool, _OBJECT_USES) for pools in self._idle.values() for pool in pools]
            for frame in self._frames.values():
                uses = _OBJECT_USES + (_ROUTING_USES if frame.routed else 0)
                alive += [(pool, uses) for pool in frame.pools]
        self._strike_off([pool for pool, uses in alive if torch.uses_of(pool.memory_pool) > uses])
        with self._lock:
            return frozenset(self._uncaptured)

    # Releasing memory

    def empty_cache(self, torch: TorchCuda) -> None:
        """Releases segments without a tensor: those of torch's default pool, and of this package's pools by the rule of
        :func:`is_worth_retiring`.

        This thread's own routings are suspended meanwhile, and their pools replaced. Devices on which another thread is in a
        region keep PyTorch's own cache until the last thread leaves.
        """
        if not torch.is_capturing():
            self.empty_cache_with(torch, lambda: self.empty_torch_cache(torch))

    def empty_cache_with(self, torch: TorchCuda, empty_torch_cache: Callable[[], _Result]) -> _Result:
        """The same with a function that empties PyTorch's own cache, whose result is returned."""
        self.retire_idle_of(torch, None)
        result = empty_torch_cache()
        if self.retire_idle_of(torch, None):  # PyTorch has waited for the streams that used deleted tensors
            self.empty_retired(torch)
        return result

    def retire_idle_of(self, torch: TorchCuda, tags: Tags) -> bool:
        """Retires pools of the tags that are worth it: idle ones, and those of this thread's frames, which get others.
        Returns whether there were any."""
        self.retire_doomed(torch)
        retired = self.retire_idle(torch, self.idle_pools(tags))
        own = [frame for frame in self.stack() if frame.managed and frame.pools and selects(tags, frame.tag)]
        devices = {device for frame in own for device in {pool.device for pool in frame.pools}}
        releasable = {device for device in devices if torch.releasable_bytes(device)}
        if not releasable:
            return retired
        replaced = False

        def visit(frame: Frame) -> None:
            nonlocal replaced
            if frame in own:
                replaced |= self._replace_pools(torch, frame, releasable)

        with self.routing_suspended(torch, visit):
            pass
        return retired or replaced

    def _replace_pools(self, torch: TorchCuda, frame: Frame, devices: Collection[int]) -> bool:
        """Retires the pools of a suspended frame that are worth it, and replaces them by others. Returns whether there were
        any."""
        replaced = False
        for index, pool in enumerate(frame.pools):
            if pool.device in devices and self.should_retire(torch, pool):
                frame.pools[index] = self.check_out(torch, pool.key)
                self.retire(torch, pool)
                replaced = True
        return replaced

    def pools_to_empty(self, torch: TorchCuda, segments: Mapping[PoolId, list[dict[str, Any]]]) -> set[PoolId]:
        """Return the pools whose idle segments :meth:`empty_cache` of this thread would release now.

        Args:
            torch: PyTorch.
            segments: PyTorch's segments by pool.
        """
        frames = [frame for frame in self.stack() if frame.managed]
        candidates = [(pool, _OBJECT_USES) for pool in self.idle_pools()]
        candidates += [(pool, _OBJECT_USES + _ROUTING_USES * frame.routed) for frame in frames for pool in frame.pools]
        found = {
            pool.id
            for pool, uses in candidates
            if pool.id in segments and self.should_retire(torch, pool, uses, segments[pool.id])
        }
        return found | self.retired_pools()

    def empty_retired(self, torch: TorchCuda) -> None:
        """Releases the segments without a tensor of retired pools, and nothing else: PyTorch's own cache stays.

        PyTorch keeps its own cache while a pool is routed on the device, on any thread, and releases what retired pools
        hold. So pools without memory are routed meanwhile, on every device.
        """
        if torch.routes_every_thread:
            self.empty_torch_cache(torch)
            return
        if any(frame.routed for frame in self.stack()):
            torch.empty_cache()
            return
        frame = Frame(torch, RegionOptions.disabled(DEFAULT_TAG), [])
        with self._lock:
            if self._spare_pools:
                frame.pools = self._spare_pools.pop()
        if not frame.pools:
            frame.pools = [self.make_pool(torch, Key(frame.options, device)) for device in self._devices_to_route(torch)]
        try:
            with self._lock:
                self._frames[id(frame)] = frame
            self._begin_routing(torch, frame)
            torch.empty_cache()
        finally:
            self._end_routing(torch, frame)
            with self._lock:
                self._frames.pop(id(frame), None)
                self._spare_pools.append(frame.pools)
        if self._pending:
            self._empty_pending(torch)

    def empty_torch_cache(self, torch: TorchCuda) -> None:
        """torch.cuda.empty_cache(), with this thread's routings suspended. Devices with routings of other threads stay
        pending."""
        with self.routing_suspended(torch):
            self.empty_torch_cache_now(torch)

    def empty_torch_cache_now(self, torch: TorchCuda) -> None:
        """The same while this thread routes nothing."""
        with self._lock:
            self._pending |= self._routed_devices()
        with self.substitutes.suspended(torch):
            torch.empty_cache()

    def log_put_off(self) -> None:
        """Logs once that PyTorch's cache was not emptied because another thread is inside a region."""
        thread = threading.get_ident()
        with self._lock:
            frames = [frame for frame in self._frames.values() if frame.thread != thread and frame.routed]
            if not frames or not self._pending or self._has_logged_put_off:
                return
            self._has_logged_put_off = True
        logger.warning(
            "empty_cache() has returned idle managed memory, but what PyTorch caches outside of regions is returned when "
            "another thread leaves %s: PyTorch returns nothing of it while a thread is inside a region, also not to an "
            "allocation that is out of memory. Leave regions as soon as the allocations are made. (Logged once.)",
            frames[0],
        )

    def _empty_pending(self, torch: TorchCuda) -> None:
        with self._lock:
            due = self._pending - self._routed_devices()
            self._pending -= due
        if due and not torch.is_capturing():
            with self.substitutes.suspended(torch):
                torch.empty_cache()

    def _routed_devices(self) -> set[int]:
        """The devices on which any thread routes a pool. The caller holds the lock."""
        return {pool.device for frame in self._frames.values() if frame.routed for pool in frame.pools}

    def is_any_routed(self) -> bool:
        """Return whether a thread is inside a region, or inside disable(), that routes allocations."""
        return bool(self._frames)

    def is_any_routed_by_others(self) -> bool:
        """Return whether another thread is inside a region, or inside disable(), that routes allocations."""
        thread = threading.get_ident()
        with self._lock:
            return any(frame.thread != thread for frame in self._frames.values())

    @contextlib.contextmanager
    def routing_suspended(self, torch: TorchCuda, visit: Callable[[Frame], None] | None = None) -> Iterator[None]:
        """Inside, this thread routes nothing. `visit` is called for each of its frames and may replace their pools."""
        frames = [frame for frame in self.stack() if frame.pools]
        routed = [frame for frame in frames if frame.routed]
        try:
            for frame in reversed(routed):
                self._end_routing(torch, frame)
            for frame in frames:
                if visit is not None:
                    visit(frame)
            yield
        finally:
            for frame in routed:
                self._begin_routing(torch, frame)

    def give_away(self, torch: TorchCuda, matches: Callable[[Key], bool]) -> list[Any]:
        """Retires the idle pools with matching keys and returns their MemPools. The caller's reference may keep a pool
        alive."""
        with self._lock:
            keys = [key for key in self._idle if matches(key)]
            taken = [pool for key in keys for pool in self._idle.pop(key)]
        self._strike_off(taken)  # a program that has the object may capture into the pool
        memory_pools = [pool.memory_pool for pool in taken]
        for pool in taken:
            self.retire(torch, pool)
        return memory_pools
