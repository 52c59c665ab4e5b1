"""The case of preserve(): what thousands of preserved buffers add to a pause and a resume."""

from __future__ import annotations

import importlib
import statistics
from typing import Any

from .figures import AT_MOST, Row, Target
from .savers import Ours, Unavailable
from .setting import KIB, Case, Setting, Shape

__all__ = ["Preserve"]


class Preserve(Case):
    """With and without the preserved buffers in turns, on the same memory, whose contents are dropped. The buffers lie side
    by side, or each beside a block that is not kept, which makes each a copy of its own. They are registered as tensors, or
    as the buffers of modules."""

    name = "preserve"
    title = "preserved buffers in memory whose contents are dropped"
    shapes = (Shape(10_000, 4 * KIB),)
    repetitions = 15
    peer_repetitions = 0
    warm_up = 2
    #: What a pause may take longer.
    limit_s = 0.020
    #: The buffers of one module, as in a transformer's layer.
    buffers_per_module = 10

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        if not setting.allocator.caches:
            raise Unavailable("it needs PyTorch's tensors")
        assert isinstance(setting.saver, Ours)
        rows: list[Row] = []
        for layout in ("side by side", "apart"):
            buffers, between = self._allocate(setting, setting.saver, shape, apart=layout == "apart")
            for kind, targets in (("tensors", buffers), ("modules", self._modules(buffers))):
                rows += self._measure(setting, setting.saver, shape, f"{kind} {layout}", targets)
            del buffers, between, targets
            setting.saver.empty_cache()
        return rows

    def _allocate(self, setting: Setting, saver: Ours, shape: Shape, apart: bool) -> tuple[list[Any], list[Any]]:
        """The tensors, and what lies between them."""
        buffers, between = [], []
        with saver.region(self.name, "none", "release"):
            for _ in range(shape.count):
                buffers.append(setting.allocator.allocate(setting.device, shape.size, 0).owner)
                if apart:
                    between.append(setting.allocator.allocate(setting.device, shape.size, 0).owner)
        return buffers, between

    def _modules(self, buffers: list[Any]) -> list[Any]:
        torch = importlib.import_module("torch")
        modules = [torch.nn.Module() for _ in range(-(-len(buffers) // self.buffers_per_module))]
        for index, buffer in enumerate(buffers):
            modules[index // self.buffers_per_module].register_buffer(f"buffer{index}", buffer)
        return modules

    def _measure(self, setting: Setting, saver: Ours, shape: Shape, what: str, targets: list[Any]) -> list[Row]:
        pauses: dict[bool, list[float]] = {False: [], True: []}
        resumes: dict[bool, list[float]] = {False: [], True: []}
        for repetition in range(-self.warm_up, setting.repetitions):
            for preserved in (False, True) if repetition % 2 else (True, False):
                if preserved:
                    saver.preserve(targets)
                paused = setting.timed(lambda: saver.pause(self.name))
                resumed = setting.timed(lambda: saver.resume(self.name))
                if preserved:
                    saver.forget(targets)
                if repetition >= 0:
                    pauses[preserved].append(paused)
                    resumes[preserved].append(resumed)
        rows = []
        # A part of the cost does not depend on the number of buffers: with fewer of them there is no limit.
        limit = [self.limit_s] if shape == self.shapes[0] else None
        for operation, times, bound in (("pause", pauses, limit), ("resume", resumes, None)):
            added = [ours - plain for ours, plain in zip(times[True], times[False], strict=True)]
            notes = (
                f"ms: {statistics.median(times[True]) * 1e3:.3g} with, {statistics.median(times[False]) * 1e3:.3g} without"
            )
            target = Target(AT_MOST, 1.0) if bound else None
            name = f"{self.limit_s * 1e3:.3g} ms" if bound else ""
            rows.append(setting.row(self, shape, f"added to a {operation}, {what}", 0, added, bound, name, target, notes))
        return rows
