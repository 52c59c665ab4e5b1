"""The case of memory snapshots: how long one takes, and how large its file is."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .figures import AT_MOST, MEMORY, Row, Target
from .savers import Unavailable
from .setting import MIB, Case, Setting, Shape

__all__ = ["Snapshot"]


class Snapshot(Case):
    """Snapshots alternate with PyTorch's own. Half of the blocks are managed. They are written twice: when the history has
    little more than the allocations of the blocks, and when it is full."""

    name = "snapshot"
    title = "a snapshot with a recorded history, written to a file"
    shapes = (Shape(5000, MIB),)
    repetitions = 15
    peer_repetitions = 0
    warm_up = 2
    #: Events of the full history, as by default.
    events = 100_000
    #: Of an allocation and its free.
    events_of_a_pair = 3

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        if not setting.allocator.caches:
            raise Unavailable("it needs PyTorch's allocator")
        torch, memory = importlib.import_module("torch"), importlib.import_module("torch_memory_saver.memory")
        events = max(1, round(self.events * setting.scale))
        memory.record_history(events, clear_history=True)
        half = Shape(shape.count // 2, shape.size)
        blocks = [*setting.allocate(self.name, half), *self._ordinary(setting, shape.count - half.count, shape.size)]
        rows = self._measure(setting, shape, torch, memory, "little history")
        for _ in range(events // self.events_of_a_pair + 1):
            setting.allocator.allocate(setting.device, shape.size, 0)
        rows += self._measure(setting, shape, torch, memory, f"{events} events")
        memory.stop_history()
        setting.check(blocks, self.name)
        return rows

    @staticmethod
    def _ordinary(setting: Setting, count: int, size: int) -> list[Any]:
        blocks = [setting.allocator.allocate(setting.device, size, index % 251 + 1) for index in range(count)]
        for block in blocks:
            block.fill()
        return blocks

    def _measure(self, setting: Setting, shape: Shape, torch: Any, memory: Any, what: str) -> list[Row]:
        paths = {name: Path(setting.directory, f"tms-bench-{os.getpid()}-{name}.pickle") for name in ("ours", "torch")}
        sides: dict[str, Callable[[], object]] = {
            "ours": lambda: memory.write_snapshot(paths["ours"]),
            "torch": lambda: torch.cuda.memory._dump_snapshot(str(paths["torch"])),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        try:
            for repetition in range(-self.warm_up, setting.repetitions):
                for name in sides if repetition % 2 else reversed(sides):
                    seconds = setting.timed(sides[name])
                    if repetition >= 0:
                        times[name].append(seconds)
            found = memory.load_snapshot(paths["ours"])
            live = sum(1 for _ in found.live_blocks(setting.device.ordinal))
            assert live >= shape.count, f"the snapshot has {live} live blocks, and there are {shape.count}"
            sizes = {name: float(path.stat().st_size) for name, path in paths.items()}
        finally:
            for path in paths.values():
                path.unlink(missing_ok=True)
        own = "PyTorch's own snapshot"
        notes = f"{live} live blocks, {sizes['ours'] / MIB:.2f} MiB"
        return [
            setting.row(self, shape, f"write, {what}", 0, times["ours"], times["torch"], own, Target(AT_MOST), notes),
            setting.row(
                self, shape, f"file in MiB, {what}", 0, [sizes["ours"]], [sizes["torch"]], own, Target(MEMORY), notes
            ),
        ]
