"""The cases of many allocations that come back on few large handles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from .figures import AT_MOST, Row, Target
from .memory import Block
from .savers import Ours, Unavailable
from .setting import GIB, MIB, Case, Setting, Shape
from .yardstick import LARGE_HANDLE, BareAllocations, bare_large_handles

__all__ = ["Cycles", "Model", "Transformer"]

_BARE = f"bare calls on handles of {LARGE_HANDLE // MIB} MiB"
#: How much longer than the bare calls a pause or a resume may take, from the second one on.
_AT_MOST = 1.5


@dataclass
class _Side:
    """One of those that take turns: its times from the second pause and resume on."""

    pauses: list[float] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)


class _FewHandles(Case):
    """Contents are dropped. The first pause releases one handle for each allocation. Each resume makes few large ones, which
    the later pauses release. The limit is the time of the bare driver calls on large handles for as many bytes. Ours and the
    bare calls take turns; each is paused while the other's turn lasts.

    All competitors, the C++ package too, rest for 0.3 s after each pause and each resume: the driver clears released memory
    in the background, 2 ms a GiB, and set-access waits for that, whatever the handles.

    Each process has one first pause. Larger handles at allocation could gain at most what it takes longer than the later
    ones ("first vs later"), and what the allocations take longer than the bare calls. Both are reported only."""

    peer_repetitions = 5
    repetitions = 5
    processes = peer_processes = 5

    @abstractmethod
    def sizes(self, setting: Setting, shape: Shape) -> list[int]:
        """The bytes of each allocation. Raises Unavailable if the case cannot run."""

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver, tag, sizes = setting.saver, self.name, self.sizes(setting, shape)
        pause, resume = partial(saver.pause, tag), partial(saver.resume, tag)
        other = self._warm_up(setting)
        blocks: list[Block] = []
        allocated = setting.timed(lambda: blocks.extend(setting.make(tag, sizes)))
        setting.fill(blocks)
        handles, held = self._handles(setting)
        ours, limit = _Side(), _Side()
        setting.rest_long()
        first_pause = setting.timed(pause)
        setting.rest_long()
        bare, notes = (None, "") if setting.is_peer else bare_large_handles(held, setting.device.ordinal)
        if bare is not None:
            self._turn(setting, bare, _Side())  # its first one
        first_resume = setting.timed(resume)
        setting.rest_long()
        for _ in range(setting.repetitions):
            ours.pauses.append(setting.timed(pause))
            setting.rest_long()
            if bare is not None:
                self._turn(setting, bare, limit)
            ours.resumes.append(setting.timed(resume))
            setting.rest_long()
        if bare is not None:
            bare.close()
        setting.fill(blocks)  # The contents were dropped. All memory is there, if each block can keep its own.
        setting.check([*blocks, *other], self.name)
        about = f"{handles} handles of {held} bytes before the first pause" + (f"; {notes}" if notes else "")
        size, row = sum(sizes), partial(setting.row, self, self.described(shape, sizes))
        return [
            row(operation, size, times, of or None, _BARE, Target(AT_MOST, at_most), about)
            for operation, times, of, at_most in (
                ("allocate", [allocated], limit.resumes, None),
                ("first pause", [first_pause], limit.pauses, None),
                ("first resume", [first_resume], limit.resumes, None),
                ("pause", ours.pauses, limit.pauses, _AT_MOST),
                ("resume", ours.resumes, limit.resumes, _AT_MOST),
            )
        ] + [row("first vs later", size, [first_pause], ours.pauses, "the later pauses", Target(AT_MOST), about)]

    def described(self, shape: Shape, sizes: Sequence[int]) -> str:
        return str(shape)

    def _warm_up(self, setting: Setting) -> list[Block]:
        """Some other memory, allocated, paused and resumed: the first calls of a process do more than others."""
        blocks = setting.allocate("warm-up", Shape(1, MIB))
        setting.saver.pause("warm-up")
        setting.saver.resume("warm-up")
        setting.fill(blocks)
        return blocks

    def _handles(self, setting: Setting) -> tuple[int, int]:
        """How many handles our allocations have before the first pause, and their bytes; 0 and 0 of the C++ package."""
        if not isinstance(setting.saver, Ours):
            return 0, 0
        allocations = setting.saver.allocations(self.name)
        return sum(allocations.values()), sum(size * count for size, count in allocations.items())

    def _turn(self, setting: Setting, bare: BareAllocations, limit: _Side) -> None:
        limit.resumes.append(setting.timed(bare.resume))
        setting.rest_long()
        limit.pauses.append(setting.timed(bare.pause))
        setting.rest_long()


class Cycles(_FewHandles):
    """Many small allocations of one size. All competitors rest for 0.3 s after each pause and each resume (_FewHandles)."""

    name = "cycles"
    title = "contents dropped, on large handles from the first resume on"
    shapes = (Shape(2000, 16 * MIB),)
    peer_gains = MappingProxyType({"pause": 5.0, "resume": 5.0})

    def sizes(self, setting: Setting, shape: Shape) -> list[int]:
        return [shape.size] * shape.count


@dataclass(frozen=True)
class Transformer:
    """The sizes of a language model with 16-bit parameters. The defaults are Qwen2.5-7B's, by its configuration."""

    layers: int = 28
    hidden: int = 3584
    intermediate: int = 18944
    keys: int = 512
    vocabulary: int = 152_064

    _BYTES = 2

    def tensor_bytes(self) -> list[int]:
        """The bytes of each tensor, in the order in which a loader makes them."""
        matrix = self.hidden * self.hidden
        attention = [matrix, *[self.hidden * self.keys] * 2, matrix, self.hidden, *[self.keys] * 2]
        layer = [*attention, *[self.hidden * self.intermediate] * 3, *[self.hidden] * 2]
        embedding = self.vocabulary * self.hidden
        return [self._BYTES * count for count in (embedding, *layer * self.layers, self.hidden, embedding)]

    def scaled(self, layers: int, part: float) -> Transformer:
        """A model of as many layers, each of which has about that part of its bytes; so has the rest, for each layer."""
        width = part**0.5
        return Transformer(
            layers,
            int(self.hidden * width),
            int(self.intermediate * width),
            int(self.keys * width),
            int(self.vocabulary * width * layers / self.layers),
        )


class Model(_FewHandles):
    """The tensors of a 7B model as PyTorch makes them: large ones in segments of their own, the others together in segments
    of 2 and 20 MiB. All competitors rest for 0.3 s after each pause and each resume (_FewHandles)."""

    name = "model"
    title = "a 7B model's tensors, contents dropped"
    whole = Transformer()
    #: A layer with its part of the embeddings.
    shapes = (Shape(whole.layers, 520 * MIB),)
    peer_gains = MappingProxyType({"pause": 1.5, "resume": 3.0})

    def sizes(self, setting: Setting, shape: Shape) -> list[int]:
        if not setting.allocator.caches:
            raise Unavailable("it needs PyTorch's allocator")
        return self.whole.scaled(shape.count, shape.size / self.shapes[0].size).tensor_bytes()

    def described(self, shape: Shape, sizes: Sequence[int]) -> str:
        return f"{len(sizes)} tensors, {sum(sizes) / GIB:.3g} GiB"
