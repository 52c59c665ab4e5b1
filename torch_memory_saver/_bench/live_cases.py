"""The cases that copy live bytes only: live and freed blocks alternate in the segments."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable
from functools import partial

from .driver import PinnedCopy
from .figures import GAIN, Row, Target
from .memory import Block, live_and_dead_sizes
from .savers import Ours, Unavailable
from .setting import GIB, MIB, Case, Setting, Shape
from .yardstick import bare_allocations

__all__ = ["LiveBytes", "LiveBytesOfTorch"]

_SMALLEST, _LARGEST = 64 << 10, 8 * MIB


class _LiveBytes(Case):
    """30 % of the bytes are live. Pauses and resumes of the live bytes alternate with pauses and resumes of all bytes. The
    first of each are not measured."""

    peer_repetitions = 0
    at_least = 2.5

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        kept, total, pause_live = self.prepare(setting, shape)
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
        what = f"{total() / GIB:.1f} GiB, {live / total():.0%} live"
        gain, copying = Target(GAIN, self.at_least), "copying everything"
        rows = [
            setting.row(
                self, what, operation, total(), times[True, operation], times[False, operation], copying, gain, notes
            )
            for operation in ("pause", "resume")
        ]
        return rows + [
            setting.row(self, what, f"{operation} bare", total(), times[True, operation], limit, name, notes=notes)
            for operation, limit, name, notes in self.bare(setting, live)
        ]

    def bare(self, setting: Setting, live: int) -> list[tuple[str, list[float] | None, str, str]]:
        """Further limits of a pause and a resume of `live` bytes: the operation, times in seconds, the name and notes."""
        return []

    @abstractmethod
    def prepare(self, setting: Setting, shape: Shape) -> tuple[list[Block], Callable[[], int], Callable[[], object]]:
        """The live blocks, filled; a function that returns the bytes of all segments; a pause that copies live bytes."""


class LiveBytes(_LiveBytes):
    """Live and dead blocks of every size alternate in large segments. The case names the live bytes in place of PyTorch,
    because PyTorch lays small blocks into small segments. The driver calls for those take as long for live bytes as for all
    bytes."""

    name = "live"
    title = "30 % live bytes, in turns with copying everything"
    shapes = (Shape(32, 512 * MIB),)
    part = 0.3

    def prepare(self, setting: Setting, shape: Shape) -> tuple[list[Block], Callable[[], int], Callable[[], object]]:
        if not isinstance(setting.saver, Ours):
            raise Unavailable("it copies everything")
        saver = setting.saver
        segments = setting.allocate(self.name, shape, "pinned", "pool")
        kept: list[Block] = []
        addresses, ranges = array("Q"), array("Q")
        for seed, segment in enumerate(sorted(segments, key=lambda block: block.address)):
            addresses.append(segment.address)
            start, end = segment.address, segment.address + segment.size
            for live, dead in live_and_dead_sizes(segment.size, self.part, _SMALLEST, _LARGEST, seed):
                if start + live > end:
                    break
                kept.append(Block(segment.device, start, live, len(kept) % 251 + 1, segment))
                ranges.extend((start, start + live))
                start += live + dead
        for block in kept:
            block.fill()
        live_ranges = (addresses.tobytes(), ranges.tobytes())
        live_bytes = sum(block.size for block in kept)

        def pause() -> None:
            copied = saver.pause_with_live(self.name, live_ranges)
            assert copied == live_bytes, f"{copied} bytes were copied, and {live_bytes} are live"

        return kept, lambda: shape.bytes, pause


class LiveBytesOfTorch(_LiveBytes):
    """PyTorch's allocator names the live bytes of its own segments. Blocks up to 1 MiB lie in segments of 2 MiB, larger ones
    mostly in segments of 20 MiB. The driver calls for so many handles would take a good part of the time; what is measured
    comes after the first resume, which has laid the segments into few large ones."""

    name = "live-torch"
    title = "30 % live bytes as PyTorch lays them out"
    shapes = (Shape(1, 16 * GIB),)
    at_least = 2.7
    #: The live part of the allocated bytes. It is above 30 %, because the unused ends of segments count as dead, too.
    part = 0.307
    #: The smallest and the largest block, for small and for large segments.
    sizes = ((_SMALLEST, MIB), (MIB + 512, _LARGEST))
    #: The part of the bytes that lies in small segments.
    small_part = 0.2

    def prepare(self, setting: Setting, shape: Shape) -> tuple[list[Block], Callable[[], int], Callable[[], object]]:
        if not setting.allocator.caches:
            raise Unavailable("it needs PyTorch's allocator")
        before = setting.allocator.reserved_bytes()
        kept: list[Block] = []
        dead: list[Block] = []
        parts = (self.small_part, 1 - self.small_part)
        with setting.saver.region(self.name, "pinned", "pool"):
            for seed, (part, (smallest, largest)) in enumerate(zip(parts, self.sizes, strict=True)):
                for live, freed in live_and_dead_sizes(int(shape.bytes * part), self.part, smallest, largest, seed):
                    kept.append(setting.allocator.allocate(setting.device, live, len(kept) % 251 + 1))
                    dead.append(setting.allocator.allocate(setting.device, freed, 0))
        dead.clear()
        for block in kept:
            block.fill()
        # The first pause releases the few segments without live bytes, so the sum is computed at each call.
        return (
            kept,
            lambda: setting.allocator.reserved_bytes() - before,
            partial(setting.saver.pause, self.name, live_only=True),
        )

    def bare(self, setting: Setting, live: int) -> list[tuple[str, list[float] | None, str, str]]:
        """The driver calls for as many allocations of the same sizes, and one copy of the live bytes. In a pause the two
        times add up, because nothing is unmapped before everything is copied. In a resume they overlap, so the longer one
        counts."""
        assert isinstance(setting.saver, Ours)
        copy = PinnedCopy(setting.device, live)
        limits: dict[str, list[float]] = {"pause": [], "resume": []}
        names, notes = {"pause": "one copy and the calls", "resume": "one copy or the calls"}, ""
        for _ in range(setting.repetitions):
            pause = resume = 0.0
            for size, count in setting.saver.allocations(self.name).items():
                bare, notes = bare_allocations(count, size, setting.device.ordinal)
                if bare is None:
                    return [(operation, None, name, notes) for operation, name in names.items()]
                resume += setting.timed(bare.resume)
                pause += setting.timed(bare.pause)
                setting.rest(count * size)
                bare.close()
            limits["pause"].append(pause + setting.timed(copy.out))
            limits["resume"].append(max(resume, setting.timed(copy.back)))
        return [(operation, limits[operation], name, notes) for operation, name in names.items()]
