"""The cases of backups that are kept with their contents, so that a pause copies only what has changed."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kernels import CHUNK, Fingerprints, device_read
from limits import PinnedCopy
from results import Row
from savers import Ours, Unavailable
from setting import GIB, LARGE_HANDLE, MIB, Block, Case, Setting, Shape

__all__ = ["Changes", "Swap"]

_Side = TypeVar("_Side")


class Changes(Case):
    """Host backup that is kept, of contents of which nothing, or 5 % of the chunks of 512 KiB, change before a pause. A
    pause is compared with the fingerprint kernel over other memory, a pinned copy of what has changed, and the bare unmap
    and release of that memory. The kernel is compared with one that only reads, and the steps before the release with a
    pinned copy of everything."""

    name = "changes"
    shapes = (Shape(32, 512 * MIB), Shape(800, 16 * MIB))
    peer_repetitions = 0
    changed_part = 0.05
    pause_at_least, kernel_at_least, before_at_least = 0.87, 0.9, 40

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag, device = setting.saver, self.name, setting.device
        blocks = setting.allocate(tag, shape, "pinned", "retain")
        saver.pause(tag)
        saver.resume(tag)
        limit = _PassAndRelease(setting, shape.bytes)
        read, read_name = device_read(device, shape.bytes)
        copy = PinnedCopy(device, shape.bytes)
        part = PinnedCopy(device, max(CHUNK, int(self.changed_part * shape.bytes) // CHUNK * CHUNK))
        chooser = random.Random(1)
        times: dict[str, list[float]] = {}

        def measure(name: str, work: Callable[[], object]) -> None:
            times.setdefault(name, []).append(setting.timed(work))

        def pause(name: str) -> None:
            measure(name, lambda: saver.pause(tag))
            times.setdefault(f"before, {name}", []).append(_seconds_before_release())

        def pass_and_release(name: str) -> None:
            measure(f"limit, {name}", partial(limit.run, part.out if name == "a part" else None))

        for repetition in range(-1, setting.repetitions):  # The first one is not kept: the kernel is loaded.
            if repetition == 0:
                times.clear()
            for name in ("nothing", "a part"):
                if name == "a part":
                    self.change(chooser, blocks, part)
                for side in _in_turns(repetition, pause, pass_and_release):
                    setting.rest(shape.bytes)
                    side(name)
                setting.rest(shape.bytes)
                saver.resume(tag)
                limit.resume()
            measure("kernel", limit.kernel.run)
            if read is not None:
                measure("read", read.run)
            measure("copy", copy.out)
        setting.check(blocks, self.name)
        limit.close()
        row, size = partial(setting.row, self, shape), shape.bytes
        return [
            row("fingerprints", size, times["kernel"], times.get("read", ()), read_name, self.kernel_at_least),
            row("pause, nothing changed", size, times["nothing"], times["limit, nothing"], limit.name, self.pause_at_least),
            row("before the release", size, times["before, nothing"], times["copy"], PinnedCopy.name, self.before_at_least),
            row("pause, 5 % changed", size, times["a part"], times["limit, a part"], limit.name, self.pause_at_least),
        ]

    @staticmethod
    def change(chooser: random.Random, blocks: list[Block], part: PinnedCopy) -> None:
        """Writes to as many chunks as the copy has, in the middle of blocks, whose ends are compared."""
        places = [(block, at) for block in blocks for at in range(CHUNK, block.size - 2 * CHUNK + 1, CHUNK)]
        for block, at in chooser.sample(places, min(len(places), part.size // CHUNK)):
            block.device.fill(block.address + at, 16, chooser.randrange(256))


def _seconds_before_release() -> float:
    """Return the seconds from the begin of the last pause to the first unmap."""
    log = importlib.import_module("torch_memory_saver.observe.events").events()
    end = next(event for event in reversed(log.events) if (event.operation, event.kind) == ("pause", "end"))
    (unmap,) = (event for event in log.events if event.call == end.call and event.phase == "unmap")
    return float(unmap.began_ns - end.began_ns) / 1e9


class Swap(Case):
    """A model that is swapped out and in, with a backup that is kept, of which nothing has changed. The tensors are those of
    Qwen2.5-32B in bfloat16, as PyTorch lays them out. Half of the layers are taken as often as needed to have room for the
    limits. The C++ package copies everything each time."""

    name = "swap"
    #: Each layer as a block of its bytes, and the embeddings beside them.
    shapes = (Shape(64, 930 * MIB),)
    hidden, key, intermediate, words = 5120, 1024, 27648, 152064  # sizes of https://huggingface.co/Qwen/Qwen2.5-32B
    repetitions = peer_repetitions = 5
    host_bytes = 72 * GIB
    pause_at_least, resume_at_least = 0.8, 0.95
    most_copied = 8 * GIB
    spare = 3 * GIB

    def sizes(self, layers: int, part: float) -> list[int]:
        """Bytes of the tensors, each multiplied by `part`."""
        hidden, intermediate = self.hidden, self.intermediate
        attention = [hidden * hidden, hidden, *[self.key * hidden, self.key] * 2, hidden * hidden]
        layer = [*attention, *[intermediate * hidden] * 3, hidden, hidden]
        parameters = [self.words * hidden, *layer * layers, hidden, self.words * hidden]
        return [max(512, int(2 * count * part) // 512 * 512) for count in parameters]

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag = setting.saver, self.name
        layers, part = shape.count, shape.size / self.shapes[0].size
        room = setting.device.memory()[0] - part * (self.most_copied + self.spare)
        while layers > 1 and 2 * sum(self.sizes(layers, part)) > room:
            layers //= 2
        with saver.region(tag, "pinned", "retain"):
            blocks = [setting.block(size, index) for index, size in enumerate(self.sizes(layers, part))]
        setting.fill(blocks)
        total = sum(block.size for block in blocks)
        saver.pause(tag)
        saver.resume(tag)
        limits = _SwapLimits(setting, saver, tag, total, int(part * self.most_copied)) if isinstance(saver, Ours) else None
        pauses, resumes = [], []

        def pause() -> None:
            pauses.append(setting.timed(lambda: saver.pause(tag)))

        for repetition in range(setting.repetitions):
            for side in (pause,) if limits is None else _in_turns(repetition, pause, limits.pause):
                setting.rest(total)
                side()
            setting.rest(total)
            resumes.append(setting.timed(lambda: saver.resume(tag)))
            if limits is not None:
                limits.resume()
        setting.check(blocks, self.name)
        row = partial(setting.row, self, f"{layers} layers, {total / GIB:.1f} GiB")
        if limits is None:
            return [row("pause", total, pauses), row("resume", total, resumes)]
        limits.close()
        return [
            row("pause", total, pauses, limits.pauses, limits.pause_name, self.pause_at_least),
            row("resume", total, resumes, limits.resumes, limits.resume_name, self.resume_at_least),
        ]


class _SwapLimits:
    """The limit of a pause of a tag, and a pinned copy of at most `copied` bytes back to the device, whose time is
    multiplied to that of `total` bytes.

    Raises:
        Unavailable: There is no C compiler.
    """

    resume_name = f"{PinnedCopy.name} of a part"

    def __init__(self, setting: Setting, saver: Ours, tag: str, total: int, copied: int) -> None:
        self._released = _PassAndRelease(setting, saver.reserved_bytes(tag))
        self.pause_name = self._released.name
        self.pauses: list[float] = []
        self.resumes: list[float] = []
        self._setting, self._total = setting, total
        self._copy = PinnedCopy(setting.device, min(copied, total))

    def pause(self) -> None:
        self.pauses.append(self._setting.timed(self._released.run))

    def resume(self) -> None:
        self._released.resume()
        self._setting.rest(self._total)
        self.resumes.append(self._setting.timed(self._copy.back) * self._total / self._copy.size)

    def close(self) -> None:
        """Release the memory of the limits, which must be resumed."""
        self._copy.close()
        self._released.close()


class _PassAndRelease:
    """The limit of a pause of which nothing has changed: the fingerprint kernel over other memory, in handles of the same
    kind, and the bare unmap and release of that memory. It begins with memory.

    Raises:
        Unavailable: There is no C compiler.
    """

    def __init__(self, setting: Setting, total: int) -> None:
        bare, name = setting.bare(total, min(LARGE_HANDLE, total))
        if bare is None:
            raise Unavailable(name)
        self._bare = bare
        self._bare.resume()
        self.kernel = Fingerprints(setting.device, bare.blocks)
        self.name = f"{Fingerprints.name} and {name}"

    def run(self, copy: Callable[[], None] | None = None) -> None:
        """Run the kernel, then the copy, and then release the memory."""
        self.kernel.run()
        if copy is not None:
            copy()
        self._bare.pause()

    def resume(self) -> None:
        self._bare.resume()

    def close(self) -> None:
        self.kernel.close()
        self._bare.pause()
        self._bare.close()


def _in_turns(repetition: int, one: _Side, other: _Side) -> tuple[_Side, _Side]:
    """Two sides of a comparison, each of which is first in every other repetition. The first releases its memory while the
    other's is still allocated, and the second after it was released."""
    return (one, other) if repetition % 2 else (other, one)
