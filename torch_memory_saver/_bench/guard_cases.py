"""The case of guard mode: what it adds to a pause and a resume."""

from __future__ import annotations

import statistics

from .figures import AT_MOST, Row, Target
from .savers import Ours
from .setting import GIB, MIB, Case, Setting, Shape

__all__ = ["Guard"]


class Guard(Case):
    """With and without guard mode in turns, on the same memory. Its contents are dropped, so that a resume with guard mode
    fills it."""

    name = "guard"
    title = "guard mode, contents dropped"
    shapes = (Shape(1, 16 * GIB), Shape(800, 20 * MIB))
    repetitions = 8
    peer_repetitions = 0
    warm_up = 1

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        assert isinstance(saver, Ours)
        blocks = setting.allocate(tag, shape)
        pauses: dict[bool, list[float]] = {False: [], True: []}
        resumes: dict[bool, list[float]] = {False: [], True: []}
        for repetition in range(-self.warm_up, setting.repetitions):
            for guarded in (False, True) if repetition % 2 else (True, False):
                saver.guard(guarded)
                paused = setting.timed(lambda: saver.pause(tag))
                setting.rest(shape.bytes)
                resumed = setting.timed(lambda: saver.resume(tag))
                if repetition >= 0:
                    pauses[guarded].append(paused)
                    resumes[guarded].append(resumed)
        saver.guard(False)
        assert saver.resident_bytes(tag) >= sum(block.size for block in blocks)
        return [
            setting.row(
                self,
                shape,
                operation,
                shape.bytes,
                times[True],
                times[False],
                "without guard mode",
                Target(AT_MOST),
                self._per_gib(shape, times),
            )
            for operation, times in (("pause", pauses), ("resume", resumes))
        ]

    def _per_gib(self, shape: Shape, times: dict[bool, list[float]]) -> str:
        """Both sides' medians in milliseconds for each GiB."""
        guarded, plain = (statistics.median(times[side]) * 1e3 * GIB / shape.bytes for side in (True, False))
        return f"ms a GiB: {guarded:.3g} with guard mode, {plain:.3g} without"
