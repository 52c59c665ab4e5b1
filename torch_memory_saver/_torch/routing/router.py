"""Begin and end the routing of frames to their pools.

A frame's routing begins and ends on its thread. That of a frame that follows another one (_engine/thread_pools.py) is also
ended by a pause on any thread, and does not begin again. So its begin and its end are held apart by a lock, under which
PyTorch is called. Nothing takes another lock of this package then.
"""

from __future__ import annotations

import threading

from torch_memory_saver import _core
from torch_memory_saver._torch.binding.layer import Routing, TorchCuda
from torch_memory_saver._torch.records.frames import Frame

__all__ = ["Router"]


class Router:
    """The routings of the frames of this process."""

    def __init__(self) -> None:
        self._following = threading.RLock()

    def begin(self, torch: TorchCuda, frame: Frame) -> None:
        """Route this thread's allocations to the frame's pools. Does nothing if they already are, and if a pause has ended
        the frame. May be repeated."""
        if frame.origin is None:
            _begin(torch, frame)
        else:
            _core.within(self._following, _begin, torch, frame)

    def end(self, frame: Frame) -> None:
        """Undo :meth:`begin`, from any thread. Does nothing if the frame is not routed. May be repeated."""
        if frame.origin is None:
            _end(frame)
        else:
            _core.within(self._following, _end, frame)


def _begin(torch: TorchCuda, frame: Frame) -> None:
    if frame.routed or frame.ended:
        return
    if frame.routing is not None and frame.routing.is_ending:
        _end(frame)
    if frame.routing is None:
        frame.routing = Routing(torch, [pool.route for pool in frame.pools])
    frame.routing.begin()
    frame.routed = True


def _end(frame: Frame) -> None:
    frame.routed = False
    if frame.routing is not None:
        frame.routing.end()
        frame.routing = None
