"""The cases that drop contents, keep them on disk, or resume in stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from .direct_io import DirectFile
from .driver import PinnedCopy
from .figures import AT_LEAST, AT_MOST, Row, Target
from .setting import GIB, MIB, Case, Setting, Shape
from .yardstick import BareAllocations, bare_allocations

__all__ = ["Disk", "Dropped", "WakeUp"]

_BARE = "bare driver calls"


def _bare(setting: Setting, shape: Shape) -> tuple[BareAllocations | None, str]:
    """The bare driver calls on as many handles, or None for the peer and without a compiler; and a note for the rows."""
    return (None, "") if setting.is_peer else bare_allocations(shape.count, shape.size, setting.device.ordinal)


class Dropped(Case):
    """Alternates with the bare calls. Each side resumes and pauses while the other is paused, and the order changes each
    time. The driver clears memory that was just released before it hands it out again, which can make a resume ten times
    slower. So each side rests after its pauses."""

    name = "dropped"
    title = "contents dropped"
    shapes = (Shape(1, 32 * GIB), Shape(128, 512 * MIB), Shape(2000, 16 * MIB))
    repetitions = 16
    peer_repetitions = 4
    warm_up = 1

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape)
        addresses = [block.address for block in blocks]
        saver.pause(tag)
        bare, notes = _bare(setting, shape)
        sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "ours": (lambda: saver.resume(tag), lambda: saver.pause(tag))
        }
        if bare is not None:
            sides["bare"] = (bare.resume, bare.pause)
        resumes: dict[str, list[float]] = {name: [] for name in sides}
        pauses: dict[str, list[float]] = {name: [] for name in sides}
        orders = itertools.cycle(itertools.permutations(sides))
        for repetition, order in zip(range(-self.warm_up, setting.repetitions), orders, strict=False):
            for name in order:
                resume, pause = sides[name]
                resumed, paused = setting.timed(resume), setting.timed(pause)
                setting.rest(shape.bytes)
                if repetition >= 0:
                    resumes[name].append(resumed)
                    pauses[name].append(paused)
        saver.resume(tag)
        assert addresses == [block.address for block in blocks]
        if bare is not None:
            bare.close()
        return [
            setting.row(
                self, shape, operation, shape.bytes, times["ours"], times.get("bare"), _BARE, Target(AT_MOST, 1.15), notes
            )
            for operation, times in (("pause", pauses), ("resume", resumes))
        ]


class Disk(Case):
    """Alternates with direct I/O on another file. The order changes each time, because the speed of a disk varies."""

    name = "disk"
    title = "disk backup"
    shapes = (Shape(8, 512 * MIB),)
    repetitions = 6
    peer_repetitions = 2

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        saver.set_disk_directory(setting.directory)
        blocks = setting.allocate(tag, shape, "disk")
        file = None if setting.is_peer else DirectFile(setting.directory, shape.bytes)
        if file is not None:
            file.choose_ways()
        times: dict[str, list[float]] = {"pause": [], "resume": [], "write": [], "read": []}

        def ours() -> None:
            with setting.bar("pause to disk") as bar:
                times["pause"].append(setting.timed(partial(saver.pause, tag, progress=bar)))
            with setting.bar("resume from disk") as bar:
                times["resume"].append(setting.timed(partial(saver.resume, tag, progress=bar)))

        def limit() -> None:
            if file is not None:
                # The file consists of whole blocks, so it may be a little larger.
                times["write"].append(file.write() * shape.bytes / file.bytes)
                times["read"].append(file.read() * shape.bytes / file.bytes)

        for repetition in range(setting.repetitions):
            for side in (limit, ours) if repetition % 2 else (ours, limit):
                side()
        name = "" if file is None else file.name
        if file is not None:
            file.close()
        setting.check(blocks, self.name)
        return [
            setting.row(
                self, shape, operation, shape.bytes, times[operation], times[limits] or None, name, Target(AT_LEAST, 0.85)
            )
            for operation, limits in (("pause", "write"), ("resume", "read"))
        ]


class WakeUp(Case):
    """Resumes the weights, whose contents are kept, and then the cache, whose contents are dropped."""

    name = "wake-up"
    title = "wake-up in stages: weights with contents, then an empty cache"
    shapes = (Shape(32, 512 * MIB),)
    repetitions = 5
    peer_repetitions = 5
    cache = Shape(64, 512 * MIB)

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver = setting.saver
        cache = self.cache.scaled(setting.scale)
        weights = setting.allocate("weights", shape, "pinned", "retain")
        blocks = setting.allocate("kv_cache", cache)
        saver.pause()
        free, _ = setting.device.memory()
        saver.resume("kv_cache")
        taken = free - setting.device.memory()[0]
        assert taken >= sum(block.size for block in blocks), f"the resumed cache has only {taken} bytes"
        saver.resume()
        copy = None if setting.is_peer else PinnedCopy(setting.device, shape.bytes)
        bare, notes = _bare(setting, cache)
        measured: dict[str, list[float]] = {name: [] for name in ("weights", "kv_cache", "copy", "bare")}
        everything = shape.bytes + cache.bytes
        for _ in range(setting.repetitions):
            saver.pause()
            setting.rest(everything)
            measured["weights"].append(setting.timed(lambda: saver.resume("weights")))
            measured["kv_cache"].append(setting.timed(lambda: saver.resume("kv_cache")))
            saver.pause()
            setting.rest(everything)
            if copy is not None:
                measured["copy"].append(setting.timed(copy.back))
            if bare is not None:
                measured["bare"].append(setting.timed(bare.resume))
                bare.pause()
            saver.resume()
        setting.check(weights, self.name)
        both = [sum(stages) for stages in zip(measured["weights"], measured["kv_cache"], strict=True)]
        return [
            setting.row(
                self,
                f"{shape}, {cache}",
                "resume weights",
                shape.bytes,
                measured["weights"],
                measured["copy"] or None,
                PinnedCopy.name,
            ),
            setting.row(
                self,
                f"{shape}, {cache}",
                "resume kv_cache",
                cache.bytes,
                measured["kv_cache"],
                measured["bare"] or None,
                _BARE,
                Target(AT_MOST),
                notes,
            ),
            setting.row(self, f"{shape}, {cache}", "both", everything, both),
        ]
