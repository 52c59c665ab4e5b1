"""Routing this thread's allocations to pools (pools/stock.py), frame by frame, and releasing the pools' memory.

Locks: `_lock` guards the bookkeeping of frames and pools and is never held across a call of torch, because torch's allocator
calls the native core with its own mutex held. Frames are entered and left by their own thread; other threads may only read
them, but a pause ends the routing of frames that follow others (routing/router.py).
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from torch_memory_saver import _core
from torch_memory_saver._text import warn_once
from torch_memory_saver._torch.base.collector import collector_stopped
from torch_memory_saver._torch.binding.history import may_have_native_frames
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.memory.default_pool import SubstitutePools
from torch_memory_saver._torch.pools.fill import has_idle_segment
from torch_memory_saver._torch.pools.last_look import LastLook
from torch_memory_saver._torch.pools.retirement import may_not_free, needs_emptying
from torch_memory_saver._torch.pools.stock import PoolStock, TakenPools
from torch_memory_saver._torch.records.frames import Frame, Pause, Stack, ThreadLife
from torch_memory_saver._torch.records.pool import OBJECT_USES, Key, Pool
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver._torch.routing.admission import Admission
from torch_memory_saver._torch.routing.elsewhere import Watch
from torch_memory_saver._torch.routing.entry_room import EntryRoom
from torch_memory_saver._torch.routing.router import Router
from torch_memory_saver._torch.routing.suspension import SpareRouting, Suspension
from torch_memory_saver.errors import InvalidStateError, TorchMemorySaverError
from torch_memory_saver.options import RegionOptions

__all__ = ["Key", "Pool", "PoolStore", "Tags", "may_not_free", "selects"]

logger = logging.getLogger("torch_memory_saver")

_Result = TypeVar("_Result")

#: The uses that torch counts for a routing, beside that of the pool's object.
_ROUTING_USES = 1

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


def _paused_tags(tags: Tags) -> list[str]:
    """Return the tags with paused memory that `tags` selects."""
    return [row.tag for row in _core.usage(None) if row.tag is not None and row.paused_bytes and selects(tags, row.tag)]


class PoolStore(PoolStock):
    """Every pool of the process and every frame of every thread."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._reset()

    def _reset(self) -> None:
        self._reset_stock()
        self._admission = Admission()
        self.router = Router()
        self._pending: set[int] = set()  # devices whose cache is to be emptied when the last thread leaves its region
        self._spare_pools: list[list[Pool]] = []  # pools without memory, one of each device, for empty_retired()
        self._entered: set[str] = set()  # tags of regions and captures that began since the last pause of the tag
        self._devices: Sequence[int] = ()  # all visible devices, once they are known
        self.room = EntryRoom()
        self._rows: dict[str, list[_core.Usage]] = {}  # of each tag, when its last region ended
        self._has_logged_put_off = False
        self._frees_at_pause: dict[str, dict[int, int]] = {}  # PyTorch's counts, by paused tag and device
        self.single_device = False
        self.watch = Watch()
        self.substitutes = SubstitutePools(self)
        self.last_look = LastLook(self)

    after_fork_in_child = _reset

    # Entering and leaving

    def stack(self) -> Stack:
        """Return this thread's frames, outermost first."""
        stack: Stack | None = getattr(self._local, "stack", None)
        if stack is None:
            life = self._local.life = ThreadLife()
            stack = self._local.stack = Stack(weakref.ref(life, lambda _: self._admission.changed.notify()))
        return stack

    def enter(self, frame: Frame) -> None:
        """Routes this thread's allocations to a pool on every visible device, because it may use any of them inside. This
        creates no context. Without torch it only records the frame.

        A signal handler may raise between any two steps. :meth:`leave` undoes those that were made.
        """
        torch, stack = frame.torch, frame.stack
        if torch is None:
            stack.append(frame)
            return
        if self._doomed:
            self.retire_doomed(torch)
        devices = self._devices or self._find_devices()
        if frame.origin is None and (not stack or not frame.managed):
            self._make_room(torch, frame.options, devices)
        outer = stack[-1] if stack and not torch.last_routed_wins else None
        while not _core.within(self._lock, self._admit, frame):
            self._admission.wait(frame)
        if len(frame.pools) < len(devices):
            for device in devices[len(frame.pools) :]:
                self._check_out(torch, Key(frame.options, device), frame.pools)
        if _may_be_capturing(torch):
            self._strike_off(torch, frame.pools)
        if outer is not None:
            self.router.end(outer)
        self.router.begin(torch, frame)
        stack.append(frame)
        self._settle_autograd(torch, stack)

    def _admit(self, frame: Frame) -> bool:
        """Add a frame with the idle pools that there are, unless it has to wait. The caller holds the lock."""
        if not self._admission.add(frame):
            return False
        self._entered.add(frame.tag)
        if frame.managed:
            self._take_idle(frame, self._devices)
        return True

    def leave(self, frame: Frame) -> None:
        """End only this frame, which may have been entered in part. The later frames of its thread stay; the last is in
        force. A signal handler may raise between any two steps: a repetition makes those that remain."""
        torch, stack = frame.torch, frame.stack
        if frame in stack:
            frame.later = stack[stack.index(frame) + 1 :]
            stack.remove(frame)
        if torch is not None:
            is_own = stack is self.stack()
            if is_own:
                self._settle_autograd(torch, stack)
            if frame.pools and _may_be_capturing(torch):
                self._strike_off(torch, frame.pools)
            self.router.end(frame)
            if not frame.managed:
                for pool in frame.pools:
                    self._note_disabled(torch, pool)
            _core.within(self._lock, self._discard, frame)
            self._admission.changed.notify()
            inner = stack[-1] if stack else None
            if is_own and inner is not None and inner.torch is not None and not inner.routed:
                self.router.begin(inner.torch, inner)
        frame.closed = True

    def return_memory(self, frame: Frame) -> None:
        """Releases what waits for the end of a frame that has been left: after disable() the memory that was allocated and
        freed inside, and after a region what empty_cache() could not release. If a signal handler raises, a later call
        releases it."""
        torch = frame.torch
        if torch is None:
            return
        if not frame.managed:
            self.retire_doomed(torch)
            self.empty_torch_cache(torch)
        elif self._pending:
            self.retire_doomed(torch)
            self._empty_pending(torch)

    def prepare_threads(self, frame: Frame) -> None:
        """Releases the idle segments of a region's tag. To be called inside it, before the first call follows it: this
        thread's pools serve no other thread, which would take as much memory again."""
        torch = frame.torch
        if torch is None or frame.has_threads:
            return
        frame.has_threads = True
        try:
            if frame.managed and not may_not_free(torch) and self.retire_idle_of(torch, (frame.tag,)):
                self.empty_retired(torch)
        except (TorchMemorySaverError, RuntimeError) as error:  # a lost device
            logger.warning("a call was submitted to a thread pool inside %s: idle memory stays: %s", frame, error)

    def _make_room(self, torch: TorchCuda, options: RegionOptions, devices: Sequence[int]) -> None:
        """Give back PyTorch's cache if a region that is about to be entered needs room (entry_room.py)."""
        devices = devices if len(devices) == 1 else devices_in_use()
        if [device for device in devices if self.room.is_needed(torch, options, device)]:
            self.empty_cache(torch)

    def return_idle_of(self, frame: Frame, pools: Sequence[Pool]) -> None:
        """To be called after :meth:`leave`, with the pools that the frame had. At the end of a thread's outermost region,
        notes what it has taken, and releases the idle segments of the pools that were routed since its entry."""
        torch = frame.torch
        if torch is None or not frame.managed:
            return
        routed = frame.inner.union(pools) if frame.inner else pools
        outer = frame.stack[-1] if frame.stack else frame.origin
        if outer is not None and not outer.closed:
            _core.within(self._lock, functools.partial(setattr, outer, "inner"), outer.inner.union(routed))
            return
        rows = _core.usage(frame.tag)
        has_changed = rows != self._rows.get(frame.tag)
        self._rows[frame.tag] = rows
        used = [pool for pool in routed if self._is_due(pool, has_changed or pool.key.options.tag != frame.tag)]
        if not used or may_have_native_frames(torch.torch):
            return
        in_use = _core.active_devices()
        taken = TakenPools(self, [pool for pool in used if in_use >> pool.device & 1])
        look = functools.partial(_core.within, taken, self._look_at, (torch, taken))
        idle: list[Pool] = _core.within(collector_stopped(), look)
        tags = {pool.key.options.tag for pool in used}
        retired = [pool for pool in list(self._retired.values()) if pool.key.options.tag in tags]
        if not torch.routing_spares_cache:  # an emptying costs PyTorch's own cache
            retired = _core.within(collector_stopped(), functools.partial(self._with_idle_segment, torch), retired)
        if (idle or retired) and not may_not_free(torch):
            if self.retire_idle(torch, idle) or retired:
                self.empty_retired(torch)
            gone = {pool.id for pool in idle if pool.memory_pool is None and not pool.live}
            _core.within(self._lock, self._forget, gone)

    def _look_at(self, wanted: tuple[TorchCuda, TakenPools]) -> list[Pool]:
        torch, taken = wanted
        return [pool for pool in list(taken.pools) if self._look(torch, pool)]

    def _look(self, torch: TorchCuda, pool: Pool) -> bool:
        """Note what a region has taken of a pool that it has used. Return whether to retire the pool."""
        before = pool.bytes
        should_retire = self.should_retire(torch, pool)
        self.room.note(pool.key, pool.bytes - before)
        return should_retire

    def _with_idle_segment(self, torch: TorchCuda, pools: list[Pool]) -> list[Pool]:
        """Return the retired pools that were looked at and have a segment without a tensor."""
        return [pool for pool in pools if self._is_due(pool, False) and has_idle_segment(pool.look(torch))]

    @staticmethod
    def _is_due(pool: Pool, may_have_grown: bool) -> bool:
        """Whether to look for idle segments of a pool when a region ends. A look takes PyTorch's list of the pool's blocks.
        So the regions that allocate nothing look seldom at a pool with many blocks, or where looks find nothing."""
        pool.unseen += 1
        wait = pool.blocks // _FEW_BLOCKS if pool.fruitless < _MOST_FRUITLESS else _MOST_UNSEEN
        return may_have_grown or pool.unseen > wait

    def _note_disabled(self, torch: TorchCuda, pool: Pool) -> None:
        """Note what a disable() has taken, whose pool is about to be retired."""
        if _core.active_devices() >> pool.device & 1:
            self.room.note(pool.key, sum(segment["total_size"] for segment in torch.segments(pool.id)))

    def _settle_autograd(self, torch: TorchCuda, stack: Stack) -> None:
        """Make backward() run on the calling thread, whose frames are `stack`, inside regions. On torch's own threads
        gradients would be outside every region. May be repeated."""
        before: bool | None = getattr(self._local, "autograd_threads", None)
        if stack and (stack[-1].torch is not None or [frame for frame in stack if frame.torch is not None]):
            if before is None:
                self._local.autograd_threads = torch.autograd_threads()
            torch.set_autograd_threads(False)
        elif before is not None:
            torch.set_autograd_threads(before)
            self._local.autograd_threads = None

    def _find_devices(self) -> Sequence[int]:
        self._devices = range(_core.device_count())
        self.single_device = len(self._devices) == 1
        return self._devices

    def begin_pause(self, pause: Pause, deadline: float) -> None:
        """Make other threads that enter a region of the tags wait from now on. Then wait for threads that are inside one,
        until `deadline`, in seconds of :func:`time.monotonic`. The caller calls :meth:`end_pause` after a failure, too.

        Raises:
            InvalidStateError: Another thread is still inside a region of one of the tags: it would allocate paused memory.
        """
        _core.within(self._lock, self._admission.pauses.append, pause)
        if not self._admission.inside(pause):  # the usual case
            return
        while not self._admission.changed.wait_until(lambda: self._close_ended() and self._end_following(pause), deadline):
            for frame in [each for each in self._admission.inside(pause) if each.origin is None]:
                raise InvalidStateError(
                    f"pause: {frame.stack} is still inside region(tag={frame.tag!r}), and would allocate memory that is "
                    f"paused. Pause that tag after the thread has left the region, or pass a longer timeout",
                    operation="pause",
                    tag=frame.tag,
                )

    def _end_following(self, pause: Pause) -> bool:
        """End the regions of other threads in the tags, if all of them follow others. Return whether they do. May be
        repeated."""
        new: list[Frame] = []
        frames = _core.within(self._lock, self._admission.mark_ended, (pause, new))
        if frames is None:
            return False
        for frame in frames:
            self.router.end(frame)
        for tag in {frame.tag for frame in frames}:
            _core.region_end_following(tag)
        for frame in new:
            warn_once(
                f"a pause ended the region of {frame.function}",
                "%s(), which was submitted to a thread pool inside %s, was still running when the tag was paused. It was "
                "taken out of the region: what it allocates from now on is ordinary memory, and what it has allocated "
                "there is paused. Pause after the call has returned, or submit bind_region(%s), which a pause waits for.",
                frame.function,
                frame,
                frame.function,
            )
        return True

    def _close_ended(self) -> bool:
        """Leaves regions whose thread has ended inside them, so that they block no pause. The native core's settings of the
        thread ended with it. Returns True."""
        for frame in list(self._admission.frames.values()):
            if frame.stack.has_ended and not frame.closed:
                self.leave(frame)
                logger.warning(
                    "a thread ended inside %s, which is left now: leave a region on its thread, with a with statement", frame
                )
        return True

    def end_pause(self, pause: Pause) -> None:
        """Let other threads enter regions again. May be repeated, and accepts a pause that has not begun."""
        if pause in self._admission.pauses:
            self._admission.pauses.remove(pause)
        self._admission.changed.notify()

    def note_pause(self, torch: TorchCuda, tags: Tags) -> None:
        """Record how many blocks PyTorch has freed. To be called after a pause that has left memory of the tags paused."""
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
        self._entered.add(tag)

    def take_entered(self, tags: Tags) -> bool:
        """Return whether PyTorch may have allocated memory of `tags` since the last call for them: a region was entered or
        is open."""
        entered = {tag for tag in list(self._entered) if selects(tags, tag)}
        self._entered -= entered - {frame.tag for frame in list(self._admission.frames.values())}
        return bool(entered)

    def _discard(self, frame: Frame) -> None:
        """Remove the frame. Its pools become idle; those of a disable() are to be retired. The caller holds the lock. May
        be repeated."""
        while frame.pools:
            key = frame.pools[0].key
            if key.options.managed:
                _core.move(frame.pools, self._idle.setdefault(key, []), 0)
            else:
                self._pending.add(key.device)  # to be emptied later, if a signal handler prevents it now
                _core.move(frame.pools, self._doomed, 0)
        self._admission.frames.pop(id(frame), None)

    # Captures

    def pools_without_captures(self, torch: TorchCuda, listed: Collection[PoolId | None]) -> frozenset[PoolId]:
        """Return the pools in torch's list that only regions have used, including retired ones.

        A graph may have been captured into such a pool by its id: it counts as one of the pool's uses then.
        """
        alive = _core.within(self._lock, self._forget_unlisted, listed)
        self._strike_off(torch, [pool for pool, uses in alive if torch.uses_of(pool.memory_pool) > uses])
        return frozenset(self._uncaptured)

    def _forget_unlisted(self, listed: Collection[PoolId | None]) -> list[tuple[Pool, int]]:
        """Forget the retired pools that are not in torch's list. Return the other pools, and how many uses torch counts for
        each without graphs. The caller holds the lock."""
        self._forget(set(self._retired) - set(listed))
        alive = [(pool, OBJECT_USES) for pools in self._idle.values() for pool in pools]
        for frame in self._admission.frames.values():
            uses = OBJECT_USES + (_ROUTING_USES if frame.routed else 0)
            alive += [(pool, uses) for pool in frame.pools]
        return alive

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
        """Release memory as :meth:`empty_cache` does, with a function that empties PyTorch's cache. Return its result."""
        result: _Result = _core.within(collector_stopped(), lambda: self._empty_cache(torch, empty_torch_cache))
        return result

    def _empty_cache(self, torch: TorchCuda, empty_torch_cache: Callable[[], _Result]) -> _Result:
        in_use = self.begin_emptying(torch)
        result = empty_torch_cache()  # first: PyTorch waits for the streams that used deleted tensors
        has_retired = self.last_look.retire_idle(torch, in_use)
        if self._replace_own(torch, None) or has_retired:
            empty_torch_cache()
        return result

    def retire_idle_of(self, torch: TorchCuda, tags: Tags) -> bool:
        """Retire idle pools of the tags, and those of this thread's frames, if worth it. Return whether to empty PyTorch."""
        self.retire_doomed(torch)
        retired = self.retire_idle(torch, self.idle_pools(tags))
        return self._replace_own(torch, tags) or retired

    def _replace_own(self, torch: TorchCuda, tags: Tags) -> bool:
        """Replace this thread's pools of the tags (None: and of disable()) if worth it. Return whether to empty PyTorch."""
        own = [each for each in self.stack() if each.pools and (selects(tags, each.tag) if each.managed else tags is None)]
        devices = {pool.device for frame in own for pool in frame.pools}
        releasable = {device for device in devices if torch.releasable_bytes(device)}
        replaced: list[bool] = []

        def visit(frame: Frame) -> None:
            if frame in own:
                replaced.append(self._replace_pools(torch, frame, releasable))

        if releasable:
            _core.within(self.routing_suspended(torch, visit), bool)
        return any(replaced) and needs_emptying(torch)

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
        candidates = [(pool, OBJECT_USES) for pool in self.idle_pools()]
        candidates += [(pool, OBJECT_USES + _ROUTING_USES * frame.routed) for frame in frames for pool in frame.pools]
        found = {
            pool.id
            for pool, uses in candidates
            if pool.id in segments and self.should_retire(torch, pool, uses, segments[pool.id])
        }
        return found | self.retired_pools()

    def empty_retired(self, torch: TorchCuda) -> None:
        """Release the segments without a tensor of retired pools. Before PyTorch 2.13 its own cache stays, because pools
        without memory are routed meanwhile, on every device. Since 2.13 only the end of a pool's object spares it."""
        if not torch.routing_spares_cache:
            self.empty_torch_cache(torch)
            return
        if any(frame.routed for frame in self.stack()):
            torch.empty_cache()
            return
        _core.within(SpareRouting(self, torch), torch.empty_cache)
        if self._pending:
            self._empty_pending(torch)

    def empty_torch_cache(self, torch: TorchCuda) -> None:
        """Call torch.cuda.empty_cache() with this thread's routings suspended. Devices with routings of other threads stay
        pending."""
        _core.within(self.routing_suspended(torch), self.empty_torch_cache_now, torch)

    def empty_torch_cache_now(self, torch: TorchCuda) -> None:
        """Empty the cache as :meth:`empty_torch_cache` does. This thread must route nothing."""
        self._close_ended()
        kept = self._devices_that_keep_cache(torch)
        self._pending |= kept
        emptied = self._pending - kept
        _core.within(self.substitutes.suspended(torch), torch.empty_cache)
        self._pending -= emptied

    def log_put_off(self) -> None:
        """Log once that PyTorch's cache was not emptied because another thread is inside a region."""
        stack = self.stack()
        frames = [frame for frame in list(self._admission.frames.values()) if frame.stack is not stack and frame.routed]
        if not frames or not self._pending or self._has_logged_put_off:
            return
        self._has_logged_put_off = True
        logger.warning(
            "empty_cache() has released idle managed memory, but PyTorch's cache outside of regions is only released when "
            "another thread leaves %s. PyTorch does not release that cache while a thread is inside a region, even if an "
            "allocation is out of memory. Leave regions as soon as the allocations are made. (Logged once.)",
            frames[0],
        )

    def _empty_pending(self, torch: TorchCuda) -> None:
        due = self._pending - self._devices_that_keep_cache(torch)
        if due and not torch.is_capturing():
            self.empty_torch_cache_now(torch)

    def _devices_that_keep_cache(self, torch: TorchCuda) -> set[int]:
        """Return the devices whose cache cannot be emptied, because a thread routes a pool there. Empty since PyTorch
        2.13."""
        if not torch.routing_spares_cache:
            return set()
        return {pool.device for frame in list(self._admission.frames.values()) if frame.routed for pool in list(frame.pools)}

    def is_any_routed(self) -> bool:
        """Return whether a thread is inside a region, or inside disable(), that routes allocations."""
        return bool(self._admission.frames)

    def is_any_routed_by_others(self) -> bool:
        """Return whether another thread is inside a region, or inside disable(), that routes allocations."""
        stack = self.stack()
        return bool([frame for frame in list(self._admission.frames.values()) if frame.stack is not stack])

    def routing_suspended(self, torch: TorchCuda, visit: Callable[[Frame], None] | None = None) -> Suspension:
        """Return a context manager inside which this thread routes nothing. `visit` is called for each of its frames and may
        replace their pools."""
        return Suspension(self, torch, visit)

    def give_away(self, torch: TorchCuda, matches: Callable[[Key], bool]) -> list[Any]:
        """Retires the idle pools with matching keys and returns their MemPools. The caller's reference may keep a pool
        alive."""
        taken = _core.within(self._lock, self._take_matching, matches)
        self._strike_off(torch, taken)  # a program that has the object may capture into the pool
        memory_pools = [pool.memory_pool for pool in taken]
        for pool in taken:
            self.retire(torch, pool)
        return memory_pools

    def _take_matching(self, matches: Callable[[Key], bool]) -> list[Pool]:
        """Remove the idle pools with matching keys, and return them. The caller holds the lock."""
        keys = [key for key in self._idle if matches(key)]
        return [pool for key in keys for pool in self._idle.pop(key)]
