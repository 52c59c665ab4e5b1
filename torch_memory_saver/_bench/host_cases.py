"""The cases that keep contents in host memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from .driver import PinnedCopy
from .figures import AT_LEAST, GAIN, MEMORY, Row, Samples, Target
from .savers import Unavailable
from .setting import MIB, Case, ResidentSampler, Setting, Shape, resident_bytes
from .staged_copy import StagedCopy
from .yardstick import bare_allocations

__all__ = ["LARGE", "SMALL", "FirstPause", "HostMemory", "Mmap", "Pooled", "Release", "Retained", "TwoDevices"]

LARGE = Shape(32, 512 * MIB)
SMALL = Shape(800, 16 * MIB)


_BARE = "bare copies and calls"
_BARE_FIRST = "bare prefaulting, pinning, copies and calls"


class _Cycles(Case):
    """Pauses and resumes repeatedly, in turns with one pinned copy of as many bytes. The first cycle is not measured: only
    after a resume does memory lie in few large handles."""

    shapes = (LARGE, SMALL)
    host_memory = "release"
    backup = "pinned"
    pause_at_least: float | None = None
    resume_at_least: float | None = None

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        blocks = setting.allocate(tag, shape, self.backup, self.host_memory)
        # One cycle to warm up. The peer needs none where it keeps no host memory: each of its cycles is like the first.
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
            setting.rest(shape.bytes)
            resumes.append(setting.timed(lambda: saver.resume(tag)))
            saver.settle()
            if copy is not None:
                outs.append(setting.timed(copy.out))
                backs.append(setting.timed(copy.back))
        rows = [
            setting.row(
                self,
                shape,
                operation,
                shape.bytes,
                ours,
                limit or None,
                PinnedCopy.name,
                Target(AT_LEAST, at_least),
                "from the second cycle on",
            )
            for operation, ours, limit, at_least in (
                ("pause", pauses, outs, self.pause_at_least),
                ("resume", resumes, backs, self.resume_at_least),
            )
        ]
        if copy is not None:
            rows += self.beside_bare_calls(setting, shape, copy, pauses, resumes)
        setting.check(blocks, self.name)
        return rows

    def beside_bare_calls(
        self, setting: Setting, shape: Shape, copy: PinnedCopy, pauses: list[float], resumes: list[float]
    ) -> list[Row]:
        """The rows that compare the times with bare driver calls; none unless the case has them."""
        return []


class Release(_Cycles):
    name = "release"
    title = "host backup, given back at each resume (the default)"
    repetitions = 5
    resume_at_least = 0.95


class Pooled(_Cycles):
    """Also compares with the driver calls for the same handles: a pause copies, unmaps and releases; a resume creates, maps,
    sets the access and copies. Also measures a resume at once after its pause, while the driver still clears memory."""

    name = "pooled"
    title = "host backup, memory kept in the pool, from the second cycle on"
    host_memory = "pool"
    peer_repetitions = 0
    pause_at_least = resume_at_least = 0.97

    def beside_bare_calls(
        self, setting: Setting, shape: Shape, copy: PinnedCopy, pauses: list[float], resumes: list[float]
    ) -> list[Row]:
        saver, tag = setting.saver, self.name
        times: dict[str, list[float]] = {name: [] for name in ("out", "back", "at once", "bare at once")}
        bare, notes = bare_allocations(shape.count, shape.size, setting.device.ordinal)
        host = copy.host.address
        if bare is not None:
            bare.resume()
        for _ in range(setting.repetitions):
            if bare is not None:
                times["out"].append(setting.timed(partial(bare.pause_with_contents, host)))
                setting.rest(shape.bytes)
                times["back"].append(setting.timed(partial(bare.resume_with_contents, host)))
                bare.pause_with_contents(host)
                times["bare at once"].append(setting.timed(partial(bare.resume_with_contents, host)))
            saver.pause(tag)
            times["at once"].append(setting.timed(lambda: saver.resume(tag)))
        if bare is not None:
            bare.pause()
            bare.close()
        return [
            setting.row(self, shape, operation, shape.bytes, ours, limit or None, _BARE, notes=notes)
            for operation, ours, limit in (
                ("pause bare", pauses, times["out"]),
                ("resume bare", resumes, times["back"]),
                ("resume at once", times["at once"], times["bare at once"]),
            )
        ]


class Retained(_Cycles):
    name = "retained"
    title = "host backup, kept with its contents, from the second cycle on"
    host_memory = "retain"
    pause_at_least = resume_at_least = 0.97
    peer_repetitions = 5


class FirstPause(Case):
    """Each measurement runs in a fresh process, in which no memory has been pinned and all memory is new. Also compares with
    the bare calls for the same host memory and handles, and with copies through a small pinned ring."""

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
        if setting.is_peer:
            return self._rows(setting, shape, pause, resume, (None, None))
        copy = PinnedCopy(setting.device, shape.bytes)
        rows = self._rows(setting, shape, pause, resume, ([setting.timed(copy.out)], [setting.timed(copy.back)]))
        copy.close()
        bare, notes = bare_allocations(shape.count, shape.size, setting.device.ordinal)
        bare_pauses = []
        if bare is not None:
            bare.resume()
            bare_pauses.append(setting.timed(bare.first_pause))
            bare.forget_host()
            bare.close()
        staged = StagedCopy(setting.device, shape.bytes)
        out, back = setting.timed(staged.out), setting.timed(staged.back)
        staged.close()
        return [
            *rows,
            setting.row(self, shape, "pause bare", shape.bytes, [pause], bare_pauses or None, _BARE_FIRST, notes=notes),
            setting.row(self, shape, "pause staged", shape.bytes, [pause], [out], StagedCopy.name),
            setting.row(self, shape, "resume staged", shape.bytes, [resume], [back], StagedCopy.name),
        ]

    def _rows(
        self,
        setting: Setting,
        shape: Shape,
        pause: float,
        resume: float,
        limits: tuple[list[float] | None, list[float] | None],
    ) -> list[Row]:
        outs, backs = limits
        return [
            setting.row(self, shape, "pause", shape.bytes, [pause], outs, PinnedCopy.name, Target(AT_LEAST, 0.6)),
            setting.row(self, shape, "resume", shape.bytes, [resume], backs, PinnedCopy.name),
        ]


class Mmap(Case):
    """The resume unregisters and unmaps the host memory before it returns. So does the limit."""

    name = "mmap"
    title = "host backup in ordinary memory, given back before the resume returns"
    shapes = (LARGE,)
    repetitions = 4
    #: Bytes of each registration that the limit tries; None: one registration for all.
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
            setting.rest(shape.bytes)
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


class TwoDevices(Case):
    """Compares two GPUs in one call with one GPU twice, and with one pinned copy on each at the same time, which shows the
    limit of the host's memory and buses."""

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
        copies = [] if setting.is_peer else [PinnedCopy(device, shape.bytes) for device in setting.devices[: self.devices]]
        times: dict[tuple[str | None, str], list[float]] = {}
        bare: dict[str, list[float]] = {}
        for _ in range(setting.repetitions):
            for tags in ("first", None):
                times.setdefault((tags, "pause"), []).append(setting.timed(partial(saver.pause, tags)))
                setting.rest(shape.bytes)
                times.setdefault((tags, "resume"), []).append(setting.timed(partial(saver.resume, tags)))
            for operation, starts in (("pause", [c.start_out for c in copies]), ("resume", [c.start_back for c in copies])):
                bare.setdefault(operation, []).append(setting.timed(partial(self._at_once, starts, copies)))
        setting.check(blocks, self.name)
        both = {operation: times[None, operation] for operation in ("pause", "resume")}
        rows = [
            setting.row(
                self,
                f"{shape} on each",
                operation,
                2 * shape.bytes,
                both[operation],
                [2 * seconds for seconds in times["first", operation]],
                "one GPU, twice",
                Target(GAIN, 1.9),
            )
            for operation in both
        ]
        return rows + [
            setting.row(
                self,
                f"{shape} on each",
                f"{operation} bare",
                2 * shape.bytes,
                both[operation],
                bare[operation],
                "a pinned copy on each at once",
            )
            for operation in (both if copies else ())
        ]

    @staticmethod
    def _at_once(starts: Sequence[Callable[[], None]], copies: Sequence[PinnedCopy]) -> None:
        for start in starts:
            start()
        for copy in copies:
            copy.wait()


class HostMemory(Case):
    """Measures bytes instead of times: the host memory of the process at its peak, and after the backups are released."""

    name = "host-memory"
    title = "host memory of the process"
    shapes = (LARGE,)
    repetitions = 3
    peer_repetitions = 1
    peak_bytes, after_bytes = 256 * MIB, 16 * MIB
    #: Seconds within which the default backend must release its memory.
    within_s = 1.0

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        rows = self._measure(setting, shape, "pinned")
        # Not every release of the peer has the backend "mmap".
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
