"""Suspend this thread's routings while PyTorch's cache is emptied, because a routed pool keeps its cache."""

from __future__ import annotations

from collections.abc import Callable

from torch_memory_saver._torch.base.steps import SingleUseScope
from torch_memory_saver._torch.binding.layer import TorchCuda
from torch_memory_saver._torch.records.frames import Frame
from torch_memory_saver._torch.routing.router import Router

__all__ = ["Suspension"]


class Suspension(SingleUseScope):
    """The context manager of :meth:`Regions.routing_suspended`. `frames` are the frames of this thread that have pools."""

    def __init__(self, router: Router, torch: TorchCuda, frames: list[Frame], visit: Callable[[Frame], None] | None) -> None:
        self._router = router
        self._torch = torch
        self._visit = visit
        self._frames = frames
        self._routed = [frame for frame in frames if frame.routed]

    def _begin(self) -> None:
        for frame in reversed(self._routed):
            self._router.end(frame)
        if self._visit is not None:
            for frame in self._frames:
                self._visit(frame)

    def _end(self) -> None:
        for frame in self._routed:
            self._router.begin(self._torch, frame)
