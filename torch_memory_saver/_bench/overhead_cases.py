"""The cases about the cost of the library itself: an allocation, a region, the statistics, the import."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .core_calls import CoreCalls
from .figures import AT_MOST, Row, Target
from .savers import Ours
from .setting import MIB, Case, Setting, Shape

__all__ = ["AllocateOverhead", "ImportTime", "RegionOverhead", "StatsOverhead"]


class AllocateOverhead(Case):
    """C loops on both sides, in turns. The core's free first waits for the device, as cudaFree does. The bare calls do not,
    so the time of free is reported only."""

    name = "allocate"
    title = "an allocation of 2 MiB and its free through the C core"
    shapes = (Shape(500, 2 * MIB),)
    peer_repetitions = 0
    repetitions = 31
    warm_up = 3

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        core = CoreCalls(setting.device.ordinal)
        sides: dict[str, Callable[[int, int], tuple[float, float]]] = {
            "bare": core.bare_allocate_and_free,
            "core": core.allocate_and_free,
        }
        times: dict[tuple[str, str], list[float]] = {}
        for repetition in range(-self.warm_up, setting.repetitions):
            for name in sorted(sides, reverse=repetition % 2 == 1):
                for operation, seconds in zip(("allocate", "free"), sides[name](shape.count, shape.size), strict=True):
                    if repetition >= 0:
                        times.setdefault((name, operation), []).append(seconds / shape.count)
        return [
            setting.row(
                self,
                shape,
                operation,
                0,
                times["core", operation],
                times["bare", operation],
                "bare driver calls",
                Target(AT_MOST, at_most),
            )
            for operation, at_most in (("allocate", 1.05), ("free", None))
        ]


class RegionOverhead(Case):
    """If most of the GPU is in use, entering a region also checks whether PyTorch's cache must be emptied first."""

    name = "region"
    title = "entering and leaving region()"
    shapes = (Shape(500, 0),)
    repetitions = 21
    limit_s = 10e-6
    warm_up = 200
    used_part, free_part = 0.6, 0.9

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        kept = setting.allocate("weights", Shape(1, 4 * MIB))
        rows = [
            self._row(setting, shape, "little memory in use", "none"),
            self._row(setting, shape, "with a CPU backup", "pinned"),
        ]
        if not setting.is_peer:  # Not every release of the peer nests regions.
            rows.append(self._row(setting, shape, "in another region", "none", "outer"))
        free, total = setting.device.memory()
        used = setting.allocator.allocate(setting.device, int(min(total * self.used_part, free * self.free_part)), 0)
        rows.append(self._row(setting, shape, "GPU mostly in use", "none"))
        if setting.allocator.caches:
            used.owner = None
            rows.append(self._row(setting, shape, "the same, cached", "none"))
        setting.check(kept, self.name)
        return rows

    def _row(self, setting: Setting, shape: Shape, when: str, backup: str, outer: str | None = None) -> Row:
        def enter(times: int) -> float:
            region: Callable[[str, str, str], Any] = setting.saver.region
            start = time.perf_counter()
            for _ in range(times):
                with region("weights", backup, "release"):
                    pass
            return (time.perf_counter() - start) / times

        with nullcontext() if outer is None else setting.saver.region(outer, "none", "release"):
            enter(self.warm_up)
            values = [enter(shape.count) for _ in range(setting.repetitions)]
        return setting.row(self, shape, when, 0, values, [self.limit_s], "10 us", Target(AT_MOST, 1.0))


class StatsOverhead(Case):
    """The allocations are paused soon after they are made, and stay so: they take addresses only. PyTorch makes each of this
    size a segment of its own."""

    name = "stats"
    title = "stats() and snapshot() of thousands of allocations"
    shapes = (Shape(5000, 12 * MIB),)
    repetitions = 31
    peer_repetitions = 0
    warm_up = 3
    limit_s = 5e-3
    tags = 20
    #: How many are resident at once.
    at_once = 50

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        assert isinstance(setting.saver, Ours)
        kept: list[Any] = []
        for first in range(0, shape.count, self.at_once):
            tag = f"{self.name}{first // self.at_once % self.tags}"
            kept += setting.allocate(tag, Shape(min(self.at_once, shape.count - first), shape.size))  # alive to the end
            setting.saver.pause(tag)
        assert len(setting.saver.snapshot()["segments"]) >= shape.count
        rows = []
        for operation, work in (("stats", setting.saver.stats), ("snapshot", setting.saver.snapshot)):
            values = [setting.timed(work) for _ in range(-self.warm_up, setting.repetitions)][self.warm_up :]
            rows.append(setting.row(self, shape, operation, 0, values, [self.limit_s], "5 ms", Target(AT_MOST, 1.0)))
        return rows


_MEASURE_IMPORT = """
import time
{first}
start = time.perf_counter()
import torch_memory_saver
print(time.perf_counter() - start)
"""


class ImportTime(Case):
    """Imports in fresh processes with the environment of this process."""

    name = "import"
    title = "import torch_memory_saver"
    shapes = (Shape(1, 0),)
    repetitions = 3
    limit_s = 30e-3

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        rows = []
        ways: list[tuple[str, str, float | None]] = [("without torch", "", None), ("torch imported", "import torch", 1.0)]
        if not setting.allocator.caches:
            ways.pop()  # PyTorch is not used here.
        for when, first, at_most in ways[setting.is_peer :]:  # The peer imports torch by itself.
            values = []
            for _ in range(setting.repetitions + 1):
                program = [sys.executable, "-c", _MEASURE_IMPORT.format(first=first)]
                values.append(float(subprocess.run(program, capture_output=True, text=True, check=True).stdout))
            # The first import is left out, because it compiles the modules.
            rows.append(setting.row(self, shape, when, 0, values[1:], [self.limit_s], "30 ms", Target(AT_MOST, at_most)))
        return rows
