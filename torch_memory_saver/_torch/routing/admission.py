"""Admission to regions: a frame waits for pauses of its tag, and a pause waits for frames of other threads.

A frame that follows another one (_engine/thread_pools.py) waits for no pause, and no pause waits for it. But few frames
follow the same frame at once, because each needs pools, and each pool has partly used segments.

The lock of :class:`IdlePools` guards the changes of the frames. Nothing here calls PyTorch.
"""

from __future__ import annotations

import math
import time

from torch_memory_saver._torch.base.steps import Notifier
from torch_memory_saver._torch.records.frames import Frame, Pause
from torch_memory_saver._torch.records.tags import selects
from torch_memory_saver.errors import InvalidStateError

__all__ = ["Admission"]

#: The number of frames that may follow one frame, and the seconds for which a further frame waits until one of them is left.
_MAX_FOLLOWING, _PATIENCE_S = 3, 0.25


class Admission:
    """The frames with pools and the pauses of this process.

    Attributes:
        frames: The frames, by :func:`id`.
        pauses: The pauses that run, or wait for threads inside regions of their tags.
        changed: Notified of the ends of pauses and of regions.
    """

    def __init__(self) -> None:
        self.frames: dict[int, Frame] = {}
        self.pauses: list[Pause] = []
        self.changed = Notifier()

    def add(self, frame: Frame) -> bool:
        """Add a frame, unless it has to wait. The caller holds the lock."""
        if self.pauses and self._must_wait(frame):
            return False
        if frame.origin is not None:
            if self._is_crowded(frame.origin):
                return False
            frame.origin.followers += 1
        self.frames[id(frame)] = frame
        return True

    def _is_crowded(self, origin: Frame) -> bool:
        """Return whether another frame that follows `origin` has to wait."""
        if origin.wait_timed_out:
            return False
        return len([frame for frame in list(self.frames.values()) if frame.origin is origin]) >= _MAX_FOLLOWING

    def wait(self, frame: Frame) -> None:
        """Wait until a frame may be added. To be called, without the lock, after :meth:`add` has refused it.

        Raises:
            InvalidStateError: The frame follows another one, and a pause of its tag runs.
        """
        origin = frame.origin
        if origin is None:
            self.changed.wait_until(lambda: not self._must_wait(frame), math.inf)
        elif self._must_wait(frame):
            raise InvalidStateError(f"a pause of tag {frame.tag!r} is running", operation="region", tag=frame.tag)
        else:
            self._wait_for_others(origin)

    def _wait_for_others(self, origin: Frame) -> None:
        """Wait until one of the frames that follow `origin` is left, or another one has taken its place. Calls may wait for
        one another, so that no frame is left. After one such wait has timed out, later frames that follow `origin`
        do not wait."""
        followers = origin.followers

        def has_changed() -> bool:
            return origin.followers != followers or not self._is_crowded(origin)

        if not self.changed.wait_until(has_changed, time.monotonic() + _PATIENCE_S):
            origin.wait_timed_out = True

    def _must_wait(self, frame: Frame) -> bool:
        """Return whether another thread pauses the tag: the region would get memory that is about to be released. A pause
        that waits for this thread to leave a region does not keep it from entering further ones."""
        if not frame.managed:
            return False
        frames = list(self.frames.values())
        own = [each for each in frames if each.stack is frame.stack and each.managed and not each.ended]
        for pause in list(self.pauses):
            if pause.stack is frame.stack or not selects(pause.tags, frame.tag):
                continue
            if not [each for each in own if selects(pause.tags, each.tag)]:
                return True
        return False

    def inside(self, pause: Pause) -> list[Frame]:
        """Return the frames of other threads in one of the tags."""
        frames = list(self.frames.values())
        return [
            frame for frame in frames if frame.managed and frame.stack is not pause.stack and selects(pause.tags, frame.tag)
        ]

    def mark_ended(self, pause: Pause, new: list[Frame]) -> list[Frame] | None:
        """Mark the frames of other threads in the pause's tags as ended, and append the newly marked ones to `new`. Return
        them all, or None if one follows no other. A pause that only waits ends none. The caller holds the lock."""
        frames = self.inside(pause)
        if [frame for frame in frames if frame.origin is None]:
            return None
        if pause.only_waits:
            return []
        for frame in frames:
            if not frame.ended:
                frame.ended = True
                new.append(frame)
        return frames
