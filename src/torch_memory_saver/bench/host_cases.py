"""The cases that keep contents in host memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial

from .driver import PinnedCopy
from .figures import AT_LEAST, GAIN, MEMORY, Row, Samples, Target
from .memory import Block, live_and_dead_sizes
from .savers import Unavailable
from .setting import GIB, MIB, Case, ResidentSampler, Setting, Shape, resident_bytes

__all__ = ["LARGE", "SMALL", "FirstPause", "HostMemory", "LiveBytes", "Mmap", "Pooled", "Release", "Retained", "TwoDevices"]

LARGE = Shape(32, 512 * MIB)
SMALL = Shape(800, 16 * MIB)


class _Cycles(Case):
    """Pause and resume, over and over, in turns with one pinned copy of as many bytes."""

    shapes = (LARGE, SMALL)
    host_memory = "release"
    backup = "pinned"
    pause_at_least: float | None = None
    resume_at_least: float | None = None

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape, self.backup, self.host_memory)
        # Every cycle of the peer's that keeps no host memory is as slow as its first.
        if not setting.is_peer or self.host_memory != "release":
            with setting.bar("pause") as bar:
                saver.pause(tag, progress=bar)
            with setting.bar("resume") as bar:
                saver.resume(tag, progress=bar)
            saver.settle()
        copy = None if setting.is_peer else PinnedCopy(setting.device, shape.bytes)
        pauses, resumes, outs, backs = [], [], [], []
        for _ in range(setting.repetitions):
            pauses.append(setting.timed(lambda: saver.pause(tag)))
            resumes.append(setting.timed(lambda: saver.resume(tag)))
            saver.settle()
            if copy is not None:
                outs.append(setting.timed(copy.out))
                backs.append(setting.timed(copy.back))
        setting.check(blocks, self.name)
        return [
            setting.row(
                self, shape, operation, shape.bytes, ours, limit or None, PinnedCopy.name, Target(AT_LEAST, at_least)
            )
            for operation, ours, limit, at_least in (
                ("pause", pauses, outs, self.pause_at_least),
                ("resume", resumes, backs, self.resume_at_least),
            )
        ]


class Release(_Cycles):
    name = "release"
    title = "host backup, given back at each resume (the default)"
    repetitions = 5
    resume_at_least = 0.95


class Pooled(_Cycles):
    name = "pooled"
    title = "host backup, memory kept in the pool"
    host_memory = "pool"
    peer_repetitions = 0
    pause_at_least = resume_at_least = 0.97


class Retained(_Cycles):
    name = "retained"
    title = "host backup, kept with its contents"
    host_memory = "retain"
    pause_at_least = resume_at_least = 0.97
    peer_repetitions = 5


class FirstPause(Case):
    """In a fresh process each: nothing has been page-locked before, and everything has to be found."""

    name = "first"
    title = "host backup, the first of a fresh process"
    shapes = (LARGE, SMALL)
    processes = 5
    repetitions = 1
    peer_repetitions = 1
    host_bytes = 2 * LARGE.bytes

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape, "pinned", "release")
        pause = setting.timed(lambda: saver.pause(tag))
        resume = setting.timed(lambda: saver.resume(tag))
        setting.check(blocks, "after the first resume")
        saver.settle()
        outs, backs = None, None
        if not setting.is_peer:
            copy = PinnedCopy(setting.device, shape.bytes)
            outs, backs = [setting.timed(copy.out)], [setting.timed(copy.back)]
        return [
            setting.row(self, shape, "pause", shape.bytes, [pause], outs, PinnedCopy.name, Target(AT_LEAST, 0.6)),
            setting.row(self, shape, "resume", shape.bytes, [resume], backs, PinnedCopy.name),
        ]


class Mmap(Case):
    """The resume gives the memory back before it returns, which unregisters and unmaps it: so does the limit."""

    name = "mmap"
    title = "host backup in ordinary memory, given back before the resume returns"
    shapes = (LARGE,)
    repetitions = 4
    #: Whoever gives back may have registered all at once, or in pieces.
    pieces = (None, 64 * MIB)

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape, "mmap", "release")
        pieces = () if setting.is_peer else self.pieces
        pauses, resumes = [], []
        outs: list[list[float]] = [[] for _ in pieces]
        backs: list[list[float]] = [[] for _ in pieces]
        for _ in range(setting.repetitions):
            pauses.append(setting.timed(lambda: saver.pause(tag)))
            resumes.append(setting.timed(lambda: saver.resume(tag)))
            for index, piece in enumerate(pieces):
                copy = PinnedCopy(setting.device, shape.bytes, piece)
                outs[index].append(setting.timed(copy.out))
                backs[index].append(setting.timed(copy.back_and_release))
                copy.close()
        setting.check(blocks, self.name)
        best = min(range(len(pieces)), key=lambda index: Samples.of(backs[index]).median, default=None)
        out, back = (None, None) if best is None else (outs[best], backs[best])
        chosen = None if best is None else self.pieces[best]
        how = "at once" if chosen is None else f"in pieces of {chosen // MIB} MiB"
        return [
            setting.row(self, shape, "pause", shape.bytes, pauses, out, PinnedCopy.name),
            setting.row(
                self,
                shape,
                "resume",
                shape.bytes,
                resumes,
                back,
                f"pinned copy, unregister ({how}), unmap",
                Target(AT_LEAST, 0.9),
            ),
        ]


class LiveBytes(Case):
    """Segments in which 30 % of the bytes are live: blocks that were kept and blocks that were freed, in turns."""

    name = "live"
    title = "30 % live bytes, in turns with copying everything"
    shapes = (Shape(1, 16 * GIB),)
    peer_repetitions = 0
    #: Of what is allocated; what is left over at the ends of segments counts as dead too.
    part = 0.307
    #: torch keeps blocks up to 1 MiB in segments of their own: blocks alternate in both kinds.
    sizes = ((64 << 10, MIB), (MIB + 512, 8 * MIB))
    #: Of the bytes, in the segments of small blocks.
    small_part = 0.2

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        if not setting.allocator.caches:
            raise Unavailable("it needs PyTorch's allocator")
        saver, tag = setting.saver, self.name
        before = setting.allocator.reserved_bytes()
        kept = self._allocate(setting, shape.bytes)
        times: dict[tuple[bool, str], list[float]] = {}
        for repetition in range(-1, setting.repetitions):
            for live_only in (False, True) if repetition % 2 else (True, False):
                pause = setting.timed(partial(saver.pause, tag, live_only=live_only))
                resume = setting.timed(lambda: saver.resume(tag))
                if repetition >= 0:
                    times.setdefault((live_only, "pause"), []).append(pause)
                    times.setdefault((live_only, "resume"), []).append(resume)
        setting.check(kept, self.name)
        # The first pause has given back the few segments in which nothing is live.
        total, live = setting.allocator.reserved_bytes() - before, sum(block.size for block in kept)
        notes = f"{live / total:.1%} of {total} bytes are live"
        return [
            setting.row(
                self,
                f"{total / GIB:.1f} GiB, {live / total:.0%} live",
                operation,
                total,
                times[True, operation],
                times[False, operation],
                "copying everything",
                Target(GAIN, 2.5),
                notes,
            )
            for operation in ("pause", "resume")
        ]

    def _allocate(self, setting: Setting, size: int) -> list[Block]:
        kept: list[Block] = []
        dead: list[Block] = []
        parts = (self.small_part, 1 - self.small_part)
        with setting.saver.region(self.name, "pinned", "pool"):
            for seed, (part, (smallest, largest)) in enumerate(zip(parts, self.sizes, strict=True)):
                for live, freed in live_and_dead_sizes(int(size * part), self.part, smallest, largest, seed):
                    kept.append(setting.allocator.allocate(setting.device, live, len(kept) % 251 + 1))
                    dead.append(setting.allocator.allocate(setting.device, freed, 0))
        dead.clear()
        for block in kept:
            block.fill()
        return kept


class TwoDevices(Case):
    name = "two-gpus"
    title = "host backup of two GPUs in one call, beside one GPU twice"
    shapes = (LARGE,)
    devices = 2
    peer_repetitions = 5

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        if len(setting.devices) < self.devices:
            raise Unavailable("it needs two GPUs")
        saver = setting.saver
        blocks = []
        for tag, device in zip(("first", "second"), setting.devices, strict=False):
            blocks += setting.allocate(tag, shape, "pinned", "retain", device)
        saver.pause()
        saver.resume()
        times: dict[tuple[str | None, str], list[float]] = {}
        for _ in range(setting.repetitions):
            for tags in ("first", None):
                times.setdefault((tags, "pause"), []).append(setting.timed(partial(saver.pause, tags)))
                times.setdefault((tags, "resume"), []).append(setting.timed(partial(saver.resume, tags)))
        setting.check(blocks, self.name)
        return [
            setting.row(
                self,
                f"{shape} on each",
                operation,
                2 * shape.bytes,
                times[None, operation],
                [2 * seconds for seconds in times["first", operation]],
                "one GPU, twice",
                Target(GAIN, 1.9),
            )
            for operation in ("pause", "resume")
        ]


class HostMemory(Case):
    """Not times: what the process has of the host's memory, at its peak and after it was given back."""

    name = "host-memory"
    title = "host memory of the process"
    shapes = (LARGE,)
    repetitions = 3
    peer_repetitions = 1
    peak_bytes, after_bytes = 256 * MIB, 16 * MIB
    #: In which memory of the default backend is to be back.
    within_s = 1.0

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        rows = self._measure(setting, shape, "pinned")
        # Not all releases of the peer's have the other one.
        with contextlib.suppress(*[Unavailable] if setting.is_peer else []):
            rows += self._measure(setting, shape, "mmap")
        return rows

    def _measure(self, setting: Setting, shape: Shape, backup: str) -> list[Row]:
        saver, tag = setting.saver, f"{self.name} {backup}"
        blocks = setting.allocate(tag, shape, backup, "release")
        start = resident_bytes()
        peaks, afters = [], []
        for _ in range(setting.repetitions):
            with ResidentSampler() as sampler:
                saver.pause(tag)
                saver.resume(tag)
            if backup == "pinned":
                self._wait(start)
            afters.append(max(0, resident_bytes() - start))
            peaks.append(max(0, sampler.peak - start))
        setting.check(blocks, tag)
        when = "within a second of the resume" if backup == "pinned" else "when the resume returns"
        return [
            self._row(setting, shape, f"{backup}: peak", peaks, [shape.bytes], "the backups", self.peak_bytes),
            self._row(setting, shape, f"{backup}: after", afters, [0], f"the start, {when}", self.after_bytes),
        ]

    def _wait(self, start: int) -> None:
        deadline = time.monotonic() + self.within_s
        while resident_bytes() > start + self.after_bytes and time.monotonic() < deadline:
            time.sleep(0.01)

    def _row(
        self, setting: Setting, shape: Shape, what: str, values: Sequence[float], limit: list[float], name: str, most: int
    ) -> Row:
        return setting.row(self, shape, what, 0, values, limit, name, Target(MEMORY, most))
