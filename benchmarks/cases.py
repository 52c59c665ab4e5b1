"""All cases, in the order in which they run.

A target is the least ratio of the limit's time and ours. `1.0` beside a limit in seconds is an upper bound.
"""

from __future__ import annotations

import subprocess
import sys
import time
from abc import abstractmethod
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from direct_io import DirectFile
from incremental import Changes, Swap
from limits import CoreCalls, NoCompiler, PinnedCopy
from results import Row
from savers import Ours, Unavailable
from setting import GIB, LARGE_HANDLE, MIB, Block, Case, Setting, Shape, live_and_dead_sizes

__all__ = ["CASES", "find"]

_LARGE = Shape(32, 512 * MIB)
_SMALL = Shape(800, 16 * MIB)


class Dropped(Case):
    """Contents are dropped. Pauses and resumes alternate with the driver calls alone on handles of the blocks' size, or of
    512 MiB, which small blocks share. Each side resumes and pauses while the other is paused, and the order changes each
    time. The driver clears memory that was just released before it hands it out again, which can make a resume ten times
    slower. So each side rests after its pauses. The first cycle, in which each block has its own handle, is not measured."""

    name = "dropped"
    shapes = (Shape(1, 32 * GIB), Shape(128, 512 * MIB), Shape(2000, 16 * MIB))
    repetitions = 16
    peer_repetitions = 4
    warm_up = 1
    at_least, small_at_least = 0.87, 0.67

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape)
        saver.pause(tag)
        bare, limit_name = setting.bare(shape.bytes, max(shape.size, min(LARGE_HANDLE, shape.bytes)))
        sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "ours": (partial(saver.resume, tag), partial(saver.pause, tag))
        }
        if bare is not None:
            sides["bare"] = (bare.resume, bare.pause)
        times: dict[tuple[str, str], list[float]] = {}
        for repetition in range(-self.warm_up, setting.repetitions):
            for name in sorted(sides, reverse=repetition % 2 == 1):
                resume, pause = sides[name]
                resumed, paused = setting.timed(resume), setting.timed(pause)
                setting.rest(shape.bytes)
                if repetition >= 0:
                    times.setdefault((name, "resume"), []).append(resumed)
                    times.setdefault((name, "pause"), []).append(paused)
        saver.resume(tag)
        setting.fill(blocks)  # The contents were dropped. All memory is there, if each block can keep its own.
        setting.check(blocks, self.name)
        if bare is not None:
            bare.close()
        at_least = self.at_least if shape.size >= LARGE_HANDLE else self.small_at_least
        return [
            setting.row(
                *(self, shape, operation, shape.bytes, times["ours", operation], times.get(("bare", operation), ())),
                *(limit_name, at_least),
            )
            for operation in ("pause", "resume")
        ]


class FirstPause(Case):
    """The first pause and resume of a process, in which no memory has been pinned and all memory is new. They are compared
    with one pinned copy, whose host memory was made before, and with the driver calls that also make the host memory."""

    name = "first"
    shapes = (_LARGE, _SMALL)
    processes = 5
    repetitions = 1
    peer_repetitions = 1
    host_bytes = 2 * _LARGE.bytes

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape, "pinned")
        pause = setting.timed(lambda: saver.pause(tag))
        resume = setting.timed(lambda: saver.resume(tag))
        setting.check(blocks, "after the first resume")
        saver.settle()
        outs, backs, bares, bare_name = [], [], [], ""
        if not setting.is_peer:
            copy = PinnedCopy(setting.device, shape.bytes)
            outs, backs = [setting.timed(copy.out)], [setting.timed(copy.back)]
            copy.close()
            bare, bare_name = setting.bare(shape.bytes, shape.size)
            if bare is not None:
                bare_name = "bare prefaulting, pinning, copies and calls"
                bare.resume()
                bares = [setting.timed(bare.first_pause)]
                bare.forget_host()
                bare.close()
        row = partial(setting.row, self, shape)
        return [
            row("pause", shape.bytes, [pause], outs, PinnedCopy.name, 0.6),
            row("resume", shape.bytes, [resume], backs, PinnedCopy.name),
            row("pause, bare", shape.bytes, [pause], bares, bare_name),
        ]


class _Cycles(Case):
    """Pauses and resumes from the second cycle on, in turns with one pinned copy of as many bytes."""

    shapes = (_LARGE, _SMALL)
    host_memory = "release"
    pause_at_least: float | None = None
    resume_at_least: float | None = None

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape, "pinned", self.host_memory)
        # The peer needs no first cycle where it keeps no host memory: each of its cycles is like the first.
        if not setting.is_peer or self.host_memory != "release":
            saver.pause(tag)
            saver.resume(tag)
            saver.settle()
        copy = None if setting.is_peer else PinnedCopy(setting.device, shape.bytes)
        pauses, resumes, outs, backs = [], [], [], []
        for _ in range(setting.repetitions):
            self.change(setting, blocks)
            pauses.append(setting.timed(lambda: saver.pause(tag)))
            setting.rest(shape.bytes)
            resumes.append(setting.timed(lambda: saver.resume(tag)))
            saver.settle()
            if copy is not None:
                outs.append(setting.timed(copy.out))
                backs.append(setting.timed(copy.back))
        row = partial(setting.row, self, shape)
        rows = [
            row("pause", shape.bytes, pauses, outs, PinnedCopy.name, self.pause_at_least),
            row("resume", shape.bytes, resumes, backs, PinnedCopy.name, self.resume_at_least),
        ]
        if copy is not None:
            rows += self.beside_bare_calls(setting, shape, copy, pauses, resumes)
        rows += self.without_rest(setting, shape, blocks, copy)
        setting.check(blocks, self.name)
        return rows

    def change(self, setting: Setting, blocks: list[Block]) -> None:
        """Changes the contents before a pause, if that matters."""

    def beside_bare_calls(
        self, setting: Setting, shape: Shape, copy: PinnedCopy, pauses: list[float], resumes: list[float]
    ) -> list[Row]:
        """The rows that compare the times with bare driver calls and copies; none unless the case has them."""
        return []

    def without_rest(self, setting: Setting, shape: Shape, blocks: list[Block], copy: PinnedCopy | None) -> list[Row]:
        """The row of resumes at once after their pauses, which the peer also makes; none unless the case has it."""
        return []


class Release(_Cycles):
    """Host backup whose memory is given back at each resume, which is the default."""

    name = "release"
    repetitions = 5
    resume_at_least = 0.95


class Pooled(_Cycles):
    """Host backup whose memory is kept in the pool. The times are also compared with the driver calls and copies for the
    same handles. A resume at once after its pause is measured, too, while the driver still clears memory."""

    name = "pooled"
    host_memory = "pool"
    peer_repetitions = 0
    pause_at_least = resume_at_least = 0.97

    def beside_bare_calls(
        self, setting: Setting, shape: Shape, copy: PinnedCopy, pauses: list[float], resumes: list[float]
    ) -> list[Row]:
        saver, tag, host = setting.saver, self.name, copy.host.address
        outs, backs, at_once, bare_at_once = [], [], [], []
        bare, limit_name = setting.bare(shape.bytes, shape.size)
        if bare is not None:
            limit_name = f"copies and {limit_name}"
            bare.resume()
        for _ in range(setting.repetitions):
            if bare is not None:
                outs.append(setting.timed(partial(bare.pause_with_contents, host)))
                setting.rest(shape.bytes)
                backs.append(setting.timed(partial(bare.resume_with_contents, host)))
                bare.pause_with_contents(host)
                bare_at_once.append(setting.timed(partial(bare.resume_with_contents, host)))
            saver.pause(tag)
            at_once.append(setting.timed(lambda: saver.resume(tag)))
        if bare is not None:
            bare.pause()
            bare.close()
        row = partial(setting.row, self, shape)
        return [
            row("pause, bare", shape.bytes, pauses, outs, limit_name),
            row("resume, bare", shape.bytes, resumes, backs, limit_name),
            row("resume at once", shape.bytes, at_once, bare_at_once, limit_name),
        ]


class Retained(_Cycles):
    """Host backup that is kept with its contents. All contents change before each pause, so that all are copied. A resume at
    once after its pause is measured, too."""

    name = "retained"
    host_memory = "retain"
    pause_at_least = resume_at_least = 0.97
    peer_repetitions = 5

    def change(self, setting: Setting, blocks: list[Block]) -> None:
        for block in blocks:
            block.value = block.value % 251 + 1
        setting.fill(blocks)

    def without_rest(self, setting: Setting, shape: Shape, blocks: list[Block], copy: PinnedCopy | None) -> list[Row]:
        saver, tag = setting.saver, self.name
        resumes, backs = [], []
        for _ in range(setting.repetitions):
            self.change(setting, blocks)
            saver.pause(tag)
            resumes.append(setting.timed(lambda: saver.resume(tag)))
            if copy is not None:
                setting.rest(shape.bytes)
                backs.append(setting.timed(copy.back))
        return [setting.row(self, shape, "resume at once", shape.bytes, resumes, backs, PinnedCopy.name)]


class Mmap(Case):
    """Host backup in ordinary memory. The resume unregisters and unmaps it before it returns, and so does the limit."""

    name = "mmap"
    shapes = (_LARGE,)
    repetitions = 4

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape, "mmap")
        pauses, resumes, outs, backs = [], [], [], []
        for _ in range(setting.repetitions):
            pauses.append(setting.timed(lambda: saver.pause(tag)))
            setting.rest(shape.bytes)
            resumes.append(setting.timed(lambda: saver.resume(tag)))
            if not setting.is_peer:
                copy = PinnedCopy(setting.device, shape.bytes)
                outs.append(setting.timed(copy.out))
                backs.append(setting.timed(copy.back_and_release))
                copy.close()
        setting.check(blocks, self.name)
        row = partial(setting.row, self, shape)
        return [
            row("pause", shape.bytes, pauses, outs, PinnedCopy.name),
            row("resume", shape.bytes, resumes, backs, "pinned copy, unregister, unmap", 0.9),
        ]


class Disk(Case):
    """Disk backup, in turns with direct I/O on another file. The order changes each time, because the speed of a disk
    varies."""

    name = "disk"
    shapes = (Shape(8, 512 * MIB),)
    repetitions = 6

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        saver.set_disk_directory(setting.directory)
        blocks = setting.allocate(tag, shape, "disk")
        file = None if setting.is_peer else DirectFile(setting.directory, shape.bytes)
        if file is not None:
            file.choose_ways()
        pauses, resumes, writes, reads = [], [], [], []

        def ours() -> None:
            pauses.append(setting.timed(partial(saver.pause, tag)))
            resumes.append(setting.timed(partial(saver.resume, tag)))

        def limit() -> None:
            if file is not None:
                # The file consists of whole blocks, so it may be a little larger.
                writes.append(file.write() * shape.bytes / file.bytes)
                reads.append(file.read() * shape.bytes / file.bytes)

        for repetition in range(setting.repetitions):
            for side in (limit, ours) if repetition % 2 else (ours, limit):
                side()
        name = "" if file is None else file.name
        if file is not None:
            file.close()
        setting.check(blocks, self.name)
        row = partial(setting.row, self, shape)
        return [
            row("pause", shape.bytes, pauses, writes, name, 0.85),
            row("resume", shape.bytes, resumes, reads, name, 0.85),
        ]


class _LiveBytes(Case):
    """30 % of the bytes are live. Pauses and resumes of the live bytes alternate with pauses and resumes of all bytes. The
    first of each are not measured. The target is a gain over copying everything."""

    peer_repetitions = 0
    at_least: float | None = 2.5

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        assert isinstance(saver, Ours)
        kept, total, pause_live = self.prepare(setting, saver, shape)
        times: dict[tuple[bool, str], list[float]] = {}
        for repetition in range(-1, setting.repetitions):
            for live_only in (False, True) if repetition % 2 else (True, False):
                pause = setting.timed(pause_live if live_only else partial(saver.pause, tag, live_only=False))
                setting.rest(total())
                resume = setting.timed(lambda: saver.resume(tag))
                if repetition >= 0:
                    times.setdefault((live_only, "pause"), []).append(pause)
                    times.setdefault((live_only, "resume"), []).append(resume)
        setting.check(kept, self.name)
        live = sum(block.size for block in kept)
        notes = f"{live / total():.1%} of {total()} bytes are live, in {len(kept)} blocks"
        row = partial(setting.row, self, f"{total() / GIB:.1f} GiB, {live / total():.0%} live")
        return [
            row(
                *(operation, total(), times[True, operation], times[False, operation]),
                *("copying everything", self.at_least, notes),
            )
            for operation in ("pause", "resume")
        ]

    @abstractmethod
    def prepare(
        self, setting: Setting, saver: Ours, shape: Shape
    ) -> tuple[list[Block], Callable[[], int], Callable[[], Any]]:
        """The live blocks, filled; a function that returns the bytes of all segments; a pause that copies live bytes."""


class LiveBytes(_LiveBytes):
    """Live and dead blocks of every size alternate in large segments. The case names the live bytes in place of PyTorch,
    because PyTorch lays small blocks into small segments. The driver calls for those take as long for live bytes as for all
    bytes."""

    name = "live"
    shapes = (_LARGE,)
    part = 0.3
    smallest, largest = 64 << 10, 8 * MIB

    def prepare(
        self, setting: Setting, saver: Ours, shape: Shape
    ) -> tuple[list[Block], Callable[[], int], Callable[[], Any]]:
        segments = setting.allocate(self.name, shape, "pinned", "pool")
        kept: list[Block] = []
        addresses, ranges = array("Q"), array("Q")
        for seed, segment in enumerate(sorted(segments, key=lambda block: block.address)):
            addresses.append(segment.address)
            start, end = segment.address, segment.address + segment.size
            for live, dead in live_and_dead_sizes(segment.size, self.part, self.smallest, self.largest, seed):
                if start + live > end:
                    break
                kept.append(Block(segment.device, start, live, len(kept) % 251 + 1, segment))
                ranges.extend((start, start + live))
                start += live + dead
        setting.fill(kept)
        live_ranges = (addresses.tobytes(), ranges.tobytes())
        live_bytes = sum(block.size for block in kept)

        def pause() -> None:
            copied = saver.pause_with_live(self.name, live_ranges)
            assert copied == live_bytes, f"{copied} bytes were copied, and {live_bytes} are live"

        return kept, lambda: shape.bytes, pause


class LiveBytesOfTorch(_LiveBytes):
    """PyTorch's allocator names the live bytes of its own segments. Blocks up to 1 MiB lie in segments of 2 MiB, larger ones
    mostly in segments of 20 MiB. What is measured comes after the first resume, which has laid the segments into few large
    handles."""

    name = "live-torch"
    shapes = (Shape(1, 16 * GIB),)
    at_least = 2.4
    #: The live part of the allocated bytes. It is above 30 %, because the unused ends of segments count as dead, too.
    part = 0.307
    #: The smallest and the largest block, and the part of the bytes: of small segments, and of large ones.
    layouts = ((64 << 10, MIB, 0.2), (MIB + 512, 8 * MIB, 0.8))

    def prepare(
        self, setting: Setting, saver: Ours, shape: Shape
    ) -> tuple[list[Block], Callable[[], int], Callable[[], Any]]:
        kept: list[Block] = []
        dead: list[Block] = []
        with saver.region(self.name, "pinned", "pool"):
            for seed, (smallest, largest, part) in enumerate(self.layouts):
                for live, freed in live_and_dead_sizes(int(shape.bytes * part), self.part, smallest, largest, seed):
                    kept.append(setting.block(live, len(kept)))
                    dead.append(setting.block(freed, 0))
        dead.clear()
        setting.fill(kept)
        # The first pause releases the few segments without live bytes, so the sum is computed at each call.
        return kept, lambda: saver.reserved_bytes(self.name), partial(saver.pause, self.name, live_only=True)


class Allocation(Case):
    """An allocation of 2 MiB and its free through the C core, in C loops, in turns with the driver calls. The core's free
    first waits for the device, as cudaFree does. The bare calls do not, so the time of a free is reported only."""

    name = "allocate"
    shapes = (Shape(500, 2 * MIB),)
    peer_repetitions = 0
    repetitions = 31
    warm_up = 3

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        try:
            calls = CoreCalls(setting.device.ordinal)
        except NoCompiler as error:
            raise Unavailable(str(error)) from error
        sides = {"bare": calls.bare, "core": calls.core}
        times: dict[tuple[str, str], list[float]] = {}
        for repetition in range(-self.warm_up, setting.repetitions):
            for name in sorted(sides, reverse=repetition % 2 == 1):
                for operation, seconds in zip(("allocate", "free"), sides[name](shape.count, shape.size), strict=True):
                    if repetition >= 0:
                        times.setdefault((name, operation), []).append(seconds / shape.count)
        return [
            setting.row(
                *(self, shape, operation, 0, times["core", operation], times["bare", operation]),
                *("bare driver calls", at_least),
            )
            for operation, at_least in (("allocate", 0.95), ("free", None))
        ]


class RegionEntry(Case):
    """Entering and leaving `region()`. If most of the GPU is in use, that also checks whether PyTorch's cache must be
    emptied first."""

    name = "region"
    shapes = (Shape(500, 0),)
    repetitions = 21
    limit_s = 10e-6
    warm_up = 200
    used_part, free_part = 0.6, 0.9

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        kept = setting.allocate("weights", Shape(1, 4 * MIB))
        rows = [self._row(setting, shape, "little memory in use")]
        free, total = setting.device.memory()
        used = setting.block(int(min(total * self.used_part, free * self.free_part)), 0)
        rows.append(self._row(setting, shape, "GPU mostly in use"))
        setting.check(kept, self.name)
        del used
        return rows

    def _row(self, setting: Setting, shape: Shape, when: str) -> Row:
        def enter(times: int) -> float:
            region = setting.saver.region
            start = time.perf_counter()
            for _ in range(times):
                with region("weights", "none", "release"):
                    pass
            return (time.perf_counter() - start) / times

        enter(self.warm_up)
        values = [enter(shape.count) for _ in range(setting.repetitions)]
        return setting.row(self, shape, when, 0, values, [self.limit_s], "10 us", 1.0)


_MEASURE_IMPORT = """
import time, torch
start = time.perf_counter()
import torch_memory_saver
print(time.perf_counter() - start)
"""


class ImportTime(Case):
    """`import torch_memory_saver` after `import torch`, in fresh processes with the environment of this process."""

    name = "import"
    shapes = (Shape(1, 0),)
    repetitions = 3
    limit_s = 30e-3

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        values = []
        for _ in range(setting.repetitions + 1):
            program = [sys.executable, "-c", _MEASURE_IMPORT]
            values.append(float(subprocess.run(program, capture_output=True, text=True, check=True).stdout))
        # The first import is left out, because it compiles the modules.
        return [setting.row(self, shape, "torch imported", 0, values[1:], [self.limit_s], "30 ms", 1.0)]


CASES: tuple[Case, ...] = (
    *(Dropped(), FirstPause(), Release(), Pooled(), Retained(), Changes(), Swap(), LiveBytes(), LiveBytesOfTorch()),
    *(Mmap(), Disk(), Allocation(), RegionEntry(), ImportTime()),
)


def find(name: str) -> Case | None:
    """The case of that name; None if there is none."""
    return next((case for case in CASES if case.name == name), None)
