"""The regions of every thread: entering and leaving them, frame by frame, and the pauses that wait for them.

Lock: that of :class:`IdlePools`, which guards the frames as well, so that an entry takes it once. It is never held across a
call of torch, because torch's allocator calls the native core with its own mutex held. Frames are entered and left by their
own thread; other threads may only read them, but a pause ends the routing of frames that follow others (router.py), and any
thread leaves the frames of a thread that has ended.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

from torch_memory_saver import _core
from torch_memory_saver._text import warn_once
from torch_memory_saver._torch.base.steps import InterruptSafeLock
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda
from torch_memory_saver._torch.pools.idle import IdlePools
from torch_memory_saver._torch.records.frames import Frame, Pause, Stack, ThreadLife
from torch_memory_saver._torch.records.pool import OBJECT_USES, Key, Pool
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver._torch.routing.admission import Admission
from torch_memory_saver._torch.routing.entry_room import EntryRoom
from torch_memory_saver._torch.routing.router import Router
from torch_memory_saver._torch.routing.suspension import Suspension
from torch_memory_saver.errors import InvalidStateError

__all__ = ["Regions", "uses_of_object"]

logger = logging.getLogger("torch_memory_saver")

#: The uses that torch counts for a routing, beside that of the pool's object.
_ROUTING_USES = 1


def _may_be_capturing(torch: TorchCuda) -> bool:
    """Return whether this thread's current stream is being captured, or this is unknown because the device is lost."""
    try:
        return bool(torch.is_capturing())
    except RuntimeError:
        return True


def uses_of_object(frame: Frame) -> int:
    """Return the uses that torch counts for each pool of a frame without graphs."""
    return OBJECT_USES + _ROUTING_USES * frame.routed


class Regions:
    """Every frame of every thread.

    Attributes:
        router: The routings of the frames.
        room: What the regions of each tag have taken.
        single_device: Whether there is one visible device. False until a region was entered.
    """

    def __init__(self, idle_pools: IdlePools) -> None:
        self._idle_pools = idle_pools
        self._local = threading.local()
        self._reset()

    def _reset(self) -> None:
        self._admission = Admission()
        self.router = Router()
        self._entered: set[str] = set()  # tags of regions and captures that began since the last pause of the tag
        self._devices: Sequence[int] = ()  # all visible devices, once they are known
        self.room = EntryRoom()
        self.single_device = False
        self._closing = InterruptSafeLock()  # held while a frame whose thread has ended is left, which calls torch

    after_fork_in_child = _reset

    # Entering and leaving

    def stack(self) -> Stack:
        """Return this thread's frames, outermost first."""
        stack: Stack | None = getattr(self._local, "stack", None)
        if stack is None:
            life = self._local.life = ThreadLife()
            stack = self._local.stack = Stack(weakref.ref(life, lambda _: self._admission.changed.notify()))
        return stack

    def devices(self) -> Sequence[int]:
        """Return all visible devices."""
        if not self._devices:
            self._devices = range(_core.device_count())
            self.single_device = len(self._devices) == 1
        return self._devices

    def enter(self, frame: Frame) -> None:
        """Route this thread's allocations to a pool on every visible device, because it may use any of them inside. This
        creates no context. Without torch it only records the frame.

        A signal handler may raise between any two steps. :meth:`leave` undoes those that were made.
        """
        torch, stack = frame.torch, frame.stack
        if torch is None:
            stack.append(frame)
            return
        devices = self.devices()
        outer = stack[-1] if stack and not torch.last_routed_wins else None
        while not _core.within(self._idle_pools.lock, self._admit, frame):
            self._admission.wait(frame)
        if len(frame.pools) < len(devices):
            for device in devices[len(frame.pools) :]:
                self._idle_pools.check_out_to(torch, Key(frame.options, device), frame.pools)
        if _may_be_capturing(torch):
            self._idle_pools.note_captured(torch, frame.pools)
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
            self._idle_pools.take_idle(frame.options, self._devices, frame.pools)
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
                self._idle_pools.note_captured(torch, frame.pools)
            self.router.end(frame)
            if not frame.managed:
                for pool in frame.pools:
                    self._note_disabled(torch, pool)
            _core.within(self._idle_pools.lock, self._discard, frame)
            self._admission.changed.notify()
            inner = stack[-1] if stack else None
            if is_own and inner is not None and inner.torch is not None and not inner.routed:
                self.router.begin(inner.torch, inner)
        frame.closed = True

    def _discard(self, frame: Frame) -> None:
        """Remove the frame, and make its pools idle. The caller holds the lock. May be repeated."""
        self._idle_pools.take_back(frame.pools)
        self._admission.frames.pop(id(frame), None)

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

    # Pauses

    def begin_pause(self, pause: Pause, deadline: float) -> None:
        """Make other threads that enter a region of the tags wait from now on. Then wait for threads that are inside one,
        until `deadline`, in seconds of :func:`time.monotonic`. The caller calls :meth:`end_pause` after a failure, too.

        Raises:
            InvalidStateError: Another thread is still inside a region of one of the tags: it would allocate paused memory.
        """
        _core.within(self._idle_pools.lock, self._admission.pauses.append, pause)
        if not self._admission.inside(pause):  # the usual case
            return
        while not self._admission.changed.wait_until(lambda: self.close_ended() and self._end_following(pause), deadline):
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
        frames = _core.within(self._idle_pools.lock, self._admission.mark_ended, pause, new)
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

    def close_ended(self) -> bool:
        """Leave regions whose thread has ended inside them, so that they block no pause. The native core's settings of the
        thread ended with it. Return True."""
        for frame in list(self._admission.frames.values()):
            if frame.stack.has_ended:
                self._closing.call(self._close, frame)
        return True

    def _close(self, frame: Frame) -> None:
        """Leave a frame whose thread has ended, once. The caller holds the lock."""
        if not frame.closed:
            self.leave(frame)
            logger.warning(
                "a thread ended inside %s, which is left now: leave a region on its thread, with a with statement", frame
            )

    def end_pause(self, pause: Pause) -> None:
        """Let other threads enter regions again. May be repeated, and accepts a pause that has not begun."""
        if pause in self._admission.pauses:
            self._admission.pauses.remove(pause)
        self._admission.changed.notify()

    def note_entered(self, tag: str) -> None:
        """Count a capture with memory of the tag as a region, for :meth:`take_entered`."""
        self._entered.add(tag)

    def take_entered(self, tags: Tags) -> bool:
        """Return whether PyTorch may have allocated memory of `tags` since the last call for them: a region was entered or
        is open."""
        entered = {tag for tag in list(self._entered) if selects(tags, tag)}
        self._entered -= entered - {frame.tag for frame in list(self._admission.frames.values())}
        return bool(entered)

    # Captures

    def pools_without_captures(self, torch: TorchCuda, listed: Collection[PoolId | None]) -> frozenset[PoolId]:
        """Return the pools in torch's list that only regions have used, including retired ones.

        A graph may have been captured into such a pool by its id: it counts as one of the pool's uses then.
        """
        alive = _core.within(self._idle_pools.lock, self._pools_alive, listed)
        self._idle_pools.note_captured(torch, [pool for pool, uses in alive if torch.uses_of(pool.memory_pool) > uses])
        return self._idle_pools.uncaptured_pools()

    def _pools_alive(self, listed: Collection[PoolId | None]) -> list[tuple[Pool, int]]:
        """Forget the retired pools that are not in torch's list. Return the other pools, and how many uses torch counts for
        each without graphs. The caller holds the lock."""
        alive = [(pool, OBJECT_USES) for pool in self._idle_pools.forget_unlisted(listed)]
        for frame in list(self._admission.frames.values()):  # route_only() changes them without the lock
            alive += [(pool, uses_of_object(frame)) for pool in frame.pools]
        return alive

    # Routing

    def is_any_routed(self) -> bool:
        """Return whether a thread is inside a region, or inside disable(), that routes allocations."""
        return bool(self._admission.frames)

    def is_any_routed_by_others(self) -> bool:
        """Return whether another thread is inside a region, or inside disable(), that routes allocations."""
        stack = self.stack()
        return bool([frame for frame in list(self._admission.frames.values()) if frame.stack is not stack])

    def routed_devices(self) -> set[int]:
        """Return the devices on which a thread routes a pool."""
        return {pool.device for frame in list(self._admission.frames.values()) if frame.routed for pool in list(frame.pools)}

    def routed_by_others(self) -> Frame | None:
        """Return a frame of another thread that routes, if there is one."""
        stack = self.stack()
        frames = [frame for frame in list(self._admission.frames.values()) if frame.stack is not stack and frame.routed]
        return frames[0] if frames else None

    def route_only(self, torch: TorchCuda, frame: Frame) -> None:
        """Route this thread's allocations to the pools of a frame that is in no stack, and that waits for no pause."""
        self._admission.frames[id(frame)] = frame
        self.router.begin(torch, frame)

    def end_route(self, frame: Frame) -> None:
        """Undo :meth:`route_only`. The pools stay the caller's. May be repeated."""
        self.router.end(frame)
        self._admission.frames.pop(id(frame), None)

    def note_inner(self, outer: Frame, pools: Iterable[Pool]) -> None:
        """Record that the pools were routed by regions that were left inside a frame."""
        _core.within(self._idle_pools.lock, setattr, outer, "inner", outer.inner.union(pools))

    def routing_suspended(self, torch: TorchCuda, visit: Callable[[Frame], None] | None = None) -> Suspension:
        """Return a context manager inside which this thread routes nothing. `visit` is called for each of its frames and may
        replace their pools."""
        return Suspension(self.router, torch, [frame for frame in self.stack() if frame.pools], visit)
