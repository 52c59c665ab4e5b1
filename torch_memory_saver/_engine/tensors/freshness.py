"""check_fresh(): find live memory of resumed tags that still holds the fill pattern of guard mode, so nothing restored it.

The core knows where the contents of each allocation are from. Only memory that the last resume has filled is examined.
PyTorch's snapshot says which blocks are live there. The record of that resume says which of them are older than it
(live_blocks.py). The modules and tensors of the process say what lies in them (lookup.py).

Once the devices are idle, the core counts the bytes of the pattern in pieces of memory. A piece is examined in parts, each
from its first byte to its last. A part counts as unwritten if every byte of it is the pattern, because a single byte of that
value is in most data. A sample has a few short parts: the first at the begin of the piece, the last at its end, and the
others evenly between. A whole piece has many parts, without gaps. Pieces may overlap: no byte is copied twice.

This module launches no kernel, and makes no driver call but those of the core's copies. It has no lock. Any thread may call.
While the core copies, it owns the memory as a pause does: another thread that frees it, pauses it or begins a capture waits.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._engine.calls.pending import on_main_thread
from torch_memory_saver._engine.tensors.lookup import FoundTensor, FoundTensors, add_extents, find_tensors, storages_of
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.memory.live_blocks import ManagedBlock
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.options import check_flag, select_tags
from torch_memory_saver.reports.freshness import FreshReport, UnwrittenBlock

__all__ = [
    "PARTS",
    "PART_BYTES",
    "Checked",
    "Piece",
    "Sampled",
    "check_fresh",
    "sample",
]

#: A sample's parts, and the bytes of each: enough to meet one missing shard of eight, little enough for 10 000 blocks.
PARTS = 8
PART_BYTES = 64
#: Parts begin at multiples of this number, so that they hold whole numbers.
_ALIGNMENT = 16
#: A whole piece is divided into so many parts at most, of so many bytes at least.
_WHOLE_PARTS = 1024
_WHOLE_PART_BYTES = 4096
#: The bytes that one call of the core copies at most: it needs so much pinned host memory.
_CALL_BYTES = 256 << 20

#: Address at which a range begins, and the address after its last byte.
_Range = tuple[int, int]
#: Counts the bytes of the fill pattern in ranges that are in order and do not overlap. None marks a range that is no longer
#: resident.
Count = Callable[[bytes], Sequence[int | None]]


class Piece(NamedTuple):
    """Device memory to examine. If `whole` is True, the memory is read from end to end."""

    address: int
    bytes: int
    whole: bool


class Sampled(NamedTuple):
    """The result for a piece, in bytes. `unwritten` counts the bytes of parts that hold the pattern from end to end."""

    examined: int
    unwritten: int


def sample(pieces: Sequence[Piece], count: Count) -> tuple[list[Sampled | None], int]:
    """Examine the pieces. Return the result of each piece, None for those that are not resident any more, and the bytes that
    were copied."""
    parts = [[*_parts(piece)] for piece in pieces]
    counts = _Counts(itertools.chain.from_iterable(parts), count)
    return [counts.of(each) for each in parts], counts.copied


def _parts(piece: Piece) -> Iterator[_Range]:
    begin, end = piece.address, piece.address + piece.bytes
    if piece.whole:
        size = max(_WHOLE_PART_BYTES, -(-piece.bytes // _WHOLE_PARTS))
        starts: Iterable[int] = range(begin, end, size)
    elif piece.bytes <= PARTS * PART_BYTES:
        size, starts = PART_BYTES, range(begin, end, PART_BYTES)
    else:
        size, last = PART_BYTES, piece.bytes - PART_BYTES
        inner = (begin + number * last // (PARTS - 1) // _ALIGNMENT * _ALIGNMENT for number in range(PARTS - 1))
        starts = (*inner, begin + last)
    return ((start, min(start + size, end)) for start in starts)


class _Counts:
    """The counts of ranges that may overlap."""

    def __init__(self, ranges: Iterable[_Range], count: Count) -> None:
        apart = [*_apart(ranges)]
        self._begins = [begin for begin, _ in apart]
        self._counts: list[int | None] = []
        self.copied = 0
        for call in _calls(apart):
            self._counts += count(array("Q", itertools.chain.from_iterable(call)).tobytes())
        self._sizes = [end - begin for begin, end in apart]
        self.copied = sum(size for size, number in zip(self._sizes, self._counts, strict=True) if number is not None)

    def of(self, parts: Iterable[_Range]) -> Sampled | None:
        examined = unwritten = 0
        for begin, end in parts:
            found = 0
            for index in range(bisect.bisect_left(self._begins, begin), bisect.bisect_left(self._begins, end)):
                number = self._counts[index]
                if number is None:
                    return None
                found += number
            examined += end - begin
            unwritten += end - begin if found == end - begin else 0
        return Sampled(examined, unwritten)


def _apart(ranges: Iterable[_Range]) -> Iterator[_Range]:
    """Split ranges into ranges that cover the same bytes without overlaps. The result is cut where one of the given ranges
    begins or ends, and no range of it exceeds the bytes of one call."""
    depth: dict[int, int] = {}
    for begin, end in ranges:
        depth[begin] = depth.get(begin, 0) + 1
        depth[end] = depth.get(end, 0) - 1
    inside = 0
    for begin, end in itertools.pairwise(sorted(depth)):
        inside += depth[begin]
        if inside:
            yield from ((start, min(start + _CALL_BYTES, end)) for start in range(begin, end, _CALL_BYTES))


def _calls(ranges: Sequence[_Range]) -> Iterator[Sequence[_Range]]:
    """Yield the ranges of each call. At least one call is made, because the call checks conditions that always apply."""
    first = size = 0
    for number, (begin, end) in enumerate(ranges):
        if size + end - begin > _CALL_BYTES and size:
            yield ranges[first:number]
            first, size = number, 0
        size += end - begin
    yield ranges[first:]


OPERATION = "check_fresh"

#: The classes of memory in which there is nothing to find, by where its contents are from: attributes of the report.
_NOTHING_TO_FIND = {
    _core.CONTENTS_OWN: "never_paused_bytes",
    _core.CONTENTS_RESTORED: "restored_bytes",
    _core.CONTENTS_ZEROED: "zeroed_bytes",
    _core.CONTENTS_UNDEFINED: "unguarded_bytes",
}


class Ignored(NamedTuple):
    """Memory that the caller excludes from the findings because it is legitimately not written."""

    tags: tuple[str, ...]
    storages: tuple[int, ...]  # by address, in order

    def names(self, block: ManagedBlock) -> bool:
        first = bisect.bisect_left(self.storages, block.address)
        holds_one = first < len(self.storages) and self.storages[first] < block.address + block.bytes
        return block.allocation.tag in self.tags or holds_one


@dataclass(frozen=True)
class Checked:
    """The checked arguments of a call."""

    tags: Tags
    ignored: Ignored
    modules: tuple[Any, ...]
    whole: bool

    @classmethod
    def check(cls, tags: object, ignore: object, modules: object, whole: object) -> Checked:
        """Return the checked arguments.

        Raises:
            InvalidArgumentError: An argument is not valid for :meth:`TorchMemorySaver.check_fresh`.
        """
        torch = layer.imported()
        return cls(
            select_tags(tags), _check_ignored(torch, ignore), _check_modules(torch, modules), check_flag("whole", whole)
        )


def _check_ignored(torch: Any, ignore: object) -> Ignored:
    tags: list[str] = []
    tensors: list[Any] = []
    for each in _flat(torch, ignore):
        if isinstance(each, str):
            tags.append(each)
        elif isinstance(each, torch.Tensor):
            tensors.append(each)
        else:
            tensors += [*each.parameters(), *each.buffers()]
    storages: dict[int, int] = {}
    if tensors:
        add_extents(torch, storages_of(torch, tensors), storages)
    return Ignored(select_tags(tags) or () if tags else (), tuple(sorted(storages)))


def _flat(torch: Any, ignore: object) -> Iterator[Any]:
    """Return the tags, tensors and modules in it."""
    if isinstance(ignore, str) or (torch is not None and isinstance(ignore, (torch.Tensor, torch.nn.Module))):
        yield ignore
    elif isinstance(ignore, Iterable) and not isinstance(ignore, (bytes, dict)):
        for each in ignore:
            yield from _flat(torch, each)
    else:
        raise InvalidArgumentError(
            f"check_fresh: ignore takes tags, tensors, modules and iterables of them, not {type(ignore).__name__}"
            + (": of a dict pass its values()" if isinstance(ignore, dict) else "")
        )


def _check_modules(torch: Any, modules: object) -> tuple[Any, ...]:
    given = (modules,) if torch is not None and isinstance(modules, torch.nn.Module) else modules
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
        raise InvalidArgumentError(f"check_fresh: modules takes a module or an iterable of them, not {modules!r}")
    found = (*given,)
    wrong = next((each for each in found if torch is None or not isinstance(each, torch.nn.Module)), None)
    if wrong is not None:
        raise InvalidArgumentError(f"check_fresh: modules takes modules, not {type(wrong).__name__}")
    return found


# The check.


def check_fresh(
    checked: Checked,
    stream: int | None,
    list_blocks: Callable[[list[_core.Segment]], list[ManagedBlock]],
) -> FreshReport:
    """Check the memory of the tags.

    Args:
        checked: The arguments.
        stream: The caller's current stream.
        list_blocks: Returns the live blocks of allocations.

    Raises:
        InvalidStateError: Guard mode is off; or memory of the tags is not resident. Nothing was changed.
    """
    if not _core.get_guard():
        raise InvalidStateError(
            "check_fresh: guard mode is off, so that memory without contents holds whatever was there before. Set "
            "torch_memory_saver.guard = True (or TMS_GUARD=1) before the pause, and resume again",
            operation=OPERATION,
        )
    rows = [row for row in _core.segments() if selects(checked.tags, row.tag) and _is_checked(row, checked)]
    _refuse_absent(rows)
    classes = _SortedBlocks(checked)
    for block in list_blocks(rows):
        classes.add(block)
    return classes.report(stream)


def _is_checked(row: _core.Segment, checked: Checked) -> bool:
    """Return whether an allocation is checked. Paused memory is not if its tag is ignored: it may be resumed last."""
    return row.state == _core.STATE_ACTIVE or row.tag not in checked.ignored.tags


def _refuse_absent(rows: Iterable[_core.Segment]) -> None:
    """Raise if memory is paused, being resumed or damaged. The core waits for memory that another call owns right now."""
    reasons = {
        _core.STATE_PAUSED: "is paused: resume it first",
        _core.STATE_RESUMING: "is being resumed: wait() for it first",
        _core.STATE_DAMAGED: "is damaged: call resume() again first",
        _core.STATE_REPAIRING: "is damaged: call resume() again first",
    }
    absent = [row for row in rows if row.state in reasons]
    if not absent:
        return
    first = absent[0]
    tags = sorted({row.tag for row in absent})
    raise InvalidStateError(
        f"check_fresh: memory of tag {first.tag!r} {reasons[first.state]}, or name the tags to be checked, or ignore it"
        + (f". The tags concerned are {', '.join(map(repr, tags))}" if len(tags) > 1 else ""),
        operation=OPERATION,
        address=first.address,
        bytes=sum(row.reserved_bytes for row in absent),
        device=first.device,
        tag=first.tag,
    )


@dataclass
class _Examined:
    """Memory that is examined: a block, or a tensor that is a part of one."""

    block: ManagedBlock
    address: int
    bytes: int
    tensors: list[FoundTensor]
    parts: list[_Examined] = field(default_factory=list)  # of a block: its tensors that modules hold
    found: Sampled | None = None

    @property
    def is_unwritten(self) -> bool:
        return self.found is not None and 0 < self.found.examined == self.found.unwritten

    @property
    def is_partly_unwritten(self) -> bool:
        return self.found is not None and 0 < self.found.unwritten < self.found.examined

    @property
    def largest(self) -> FoundTensor | None:
        """The largest tensor in the memory, which describes it."""
        return max(self.tensors, key=lambda tensor: (tensor.bytes, tensor.names), default=None)

    @property
    def is_of_integers(self) -> bool:
        largest = self.largest
        if largest is None or str(largest.dtype) == "torch.bool":  # a bool is written as 0 or 1
            return False
        return not (largest.dtype.is_floating_point or largest.dtype.is_complex)


class _SortedBlocks:
    """The blocks of a check, sorted into the classes of the report."""

    def __init__(self, checked: Checked) -> None:
        self._checked = checked
        self._torch = layer.imported()
        self._tensors = FoundTensors()
        self._searched = False
        self._bytes: dict[str, int] = {}
        self._candidates: list[_Examined] = []
        self._ignored: list[_Examined] = []
        self._of_graphs: list[_Examined] = []

    def add(self, block: ManagedBlock) -> None:
        kind = _NOTHING_TO_FIND.get(block.allocation.contents)
        if kind is not None:
            self._count(kind, block)
        elif self._checked.ignored.names(block):
            self._count("ignored_bytes", block)
            self._ignored.append(self._examine(block))
        elif block.of_graphs:
            self._count("graph_bytes", block)
            self._of_graphs.append(_Examined(block, block.address, block.bytes, []))
        elif block.is_new:
            self._count("new_bytes", block)
        else:
            self._count("checked_bytes", block)
            self._candidates.append(self._examine(block, with_parts=True))

    def _count(self, kind: str, block: ManagedBlock) -> None:
        self._bytes[kind] = self._bytes.get(kind, 0) + block.bytes

    def _examine(self, block: ManagedBlock, with_parts: bool = False) -> _Examined:
        if not self._searched:  # only where there is something to be named
            self._searched = True
            self._tensors = find_tensors(self._torch, self._checked.modules)
        tensors = self._tensors.inside(block.address, block.bytes)
        item = _Examined(block, block.address, block.bytes, tensors)
        end, seen = block.address + block.bytes, set()
        for tensor in tensors if with_parts else ():
            place = (tensor.address, tensor.bytes)
            if tensor.names and tensor.is_dense and tensor.bytes < block.bytes and sum(place) <= end and place not in seen:
                seen.add(place)  # several tensors may be the same memory
                inside = [each for each in self._tensors.inside(*place) if each.address + each.bytes <= sum(place)]
                item.parts.append(_Examined(block, *place, inside))
        return item

    def report(self, stream: int | None) -> FreshReport:
        copied = self._sample(stream)
        unwritten: list[_Examined] = []
        integers: list[_Examined] = []
        partly: list[_Examined] = []
        for item in _parts_or_blocks(self._candidates):
            if item.is_of_integers and (item.is_unwritten or item.is_partly_unwritten):
                integers.append(item)
            elif item.is_unwritten:
                unwritten.append(item)
            elif item.is_partly_unwritten:
                partly.append(item)
        stacks = _stacks()
        return FreshReport(
            unwritten=_describe_all(unwritten, stacks),
            integers=_describe_all(integers, stacks),
            partly_written=_describe_all(partly, stacks),
            ignored=_describe_all([item for item in self._ignored if item.is_unwritten], stacks),
            checked_blocks=len(self._candidates),
            graph_unwritten_bytes=sum(item.bytes for item in self._of_graphs if item.is_unwritten),
            sampled_bytes=copied,
            whole=self._checked.whole,
            hidden_objects=self._tensors.hidden_objects,
            **self._bytes,
        )

    def _sample(self, stream: int | None) -> int:
        """Record in each block what was found. Return the bytes that were copied."""
        searched = [part for item in self._candidates for part in (item, *item.parts)]
        items = [*searched, *self._ignored, *self._of_graphs]
        whole = [self._checked.whole] * len(searched) + [False] * (len(items) - len(searched))
        pieces = [Piece(item.address, item.bytes, each) for item, each in zip(items, whole, strict=True)]
        found, copied = sample(
            pieces,
            lambda ranges: _core.count_guard_bytes(self._checked.tags, stream, ranges, interruptible=on_main_thread()),
        )
        for item, sampled in zip(items, found, strict=True):
            item.found = sampled
            if sampled is None:
                row = _core.find(item.address)
                _refuse_absent([] if row is None else [row])  # otherwise it was freed since then
        return copied


def _parts_or_blocks(items: Iterable[_Examined]) -> Iterator[_Examined]:
    """Yield the blocks. A block that is written in parts is replaced by the tensors of modules in it, if there are any."""
    for item in items:
        if item.is_partly_unwritten and item.parts:
            yield from item.parts
        else:
            yield item


def _describe_all(items: list[_Examined], stacks: Callable[[Any], Any]) -> tuple[UnwrittenBlock, ...]:
    """Return the descriptions of blocks, the largest first."""
    return tuple(_describe(item, stacks) for item in sorted(items, key=lambda item: (-item.bytes, item.address)))


def _describe(item: _Examined, stacks: Callable[[Any], Any]) -> UnwrittenBlock:
    largest, found = item.largest, item.found or Sampled(0, 0)
    return UnwrittenBlock(
        address=item.address,
        bytes=item.bytes,
        sampled_bytes=found.examined,
        unwritten_bytes=found.unwritten,
        device=item.block.allocation.device,
        tag=item.block.allocation.tag,
        dtype="" if largest is None else str(largest.dtype).removeprefix("torch."),
        shape=() if largest is None else largest.shape,
        names=tuple(sorted({name for tensor in item.tensors for name in tensor.names})),
        stack=stacks(item.block.frames),
    )


def _stacks() -> Callable[[Any], Any]:
    """Return a function that maps the frames of a block to its call stack, or to None without frames."""
    from torch_memory_saver._stacks import CallStacks

    stacks = CallStacks()
    return lambda frames: stacks.get(frames, recorded=True) if frames else None
