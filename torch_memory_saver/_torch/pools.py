"""Routing this thread's allocations to pools (pool_stock.py), frame by frame, and releasing the pools' memory.

Locks: `_lock` guards the bookkeeping of frames and pools and is never held across a call of torch, because torch's allocator
calls the native core with its own mutex held. Frames are entered and left by their own thread; other threads may only read
them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._saver.options import RegionOptions
from torch_memory_saver._torch.elsewhere import Watch
from torch_memory_saver._torch.frames import Frame
from torch_memory_saver._torch.layer import PoolId, TorchCuda, devices_in_use
from torch_memory_saver._torch.pool_stock import Key, Pool, PoolStock, Tags, selects
from torch_memory_saver._torch.substitute_pools import SubstitutePools
from torch_memory_saver.errors import InvalidStateError

__all__ = ["Key", "Pool", "PoolStore", "Tags", "selects"]

logger = logging.getLogger("torch_memory_saver")

#: The uses that torch counts for a pool: one for its object, and one for a routing.
_OBJECT_USES, _ROUTING_USES = 1, 1


def _may_be_capturing(torch: TorchCuda) -> bool:
    """Whether this thread's current stream is being captured, or this is unknown because the device is lost."""
    try:
        return bool(torch.is_capturing())
    except RuntimeError:
        return True


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
        self._pauses: list[tuple[int, Tags]] = []  # running pauses: thread and tags
        self._devices: Sequence[int] = ()  # all visible devices, once they are known
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
        for device in devices if len(devices) == 1 else devices_in_use():
            self.make_room(torch, device)
        outer = stack[-1] if stack and not torch.last_routed_wins else None
        try:
            with self._lock:
                if options.managed and self._pauses:
                    self._wait_for_pauses(options.tag)
                if torch.routes_every_thread:
                    self._check_alone(frame)
                self._frames[id(frame)] = frame
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

    def _settle_autograd(self, torch: TorchCuda) -> None:
        """Makes backward() run on the calling thread inside regions. On torch's own threads gradients would be outside every
        region."""
        inside = any(frame.torch is not None for frame in self.stack())
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
            self._forget(self._retired - set(listed))
            alive = [(pool, _OBJECT_USES) for pools in self._idle.values() for pool in pools]
            for frame in self._frames.values():
                uses = _OBJECT_USES + (_ROUTING_USES if frame.routed else 0)
                alive += [(pool, uses) for pool in frame.pools]
        self._strike_off([pool for pool, uses in alive if torch.uses_of(pool.memory_pool) > uses])
        with self._lock:
            return frozenset(self._uncaptured)

    # Releasing memory

    def make_room(self, torch: TorchCuda, device: int) -> None:
        """Empties torch's cache if the device has less free memory than the cache could release.

        torch does that itself when memory runs out, but not inside a pool, where the allocation fails.
        """
        memory = _core.device_memory(device)
        # The driver counts cached memory as used. If half of the device is free, there is no need to check.
        if 2 * memory.free >= memory.total or torch.is_capturing():
            return
        if memory.free < torch.releasable_bytes(device):
            self.empty_cache(torch)

    def empty_cache(self, torch: TorchCuda) -> None:
        """Releases every segment without a tensor, of torch's default pool and of this package's pools.

        This thread's own routings are suspended meanwhile, and their pools replaced. Devices on which another thread is in a
        region are emptied when the last thread leaves.
        """
        if torch.is_capturing():
            return
        self.retire_doomed(torch)
        self.retire_idle(torch, None)
        with self.routing_suspended(torch, lambda frame: self.replace_pools(torch, frame, only_if=self.has_idle_segment)):
            self.empty_torch_cache_now(torch)

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

    def replace_pools(self, torch: TorchCuda, frame: Frame, only_if: Callable[[TorchCuda, Pool], bool]) -> None:
        """Replaces the pools of a suspended frame that `only_if` selects with new ones, and retires them."""
        for index, pool in enumerate(frame.pools):
            if only_if(torch, pool):
                frame.pools[index] = self.check_out(torch, pool.key)
                self.retire(torch, pool)

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
