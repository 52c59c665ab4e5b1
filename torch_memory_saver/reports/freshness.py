"""The report of check_fresh(): memory that nothing has written to since a resume mapped it without contents.

The printed report is a text for a terminal: findings first, then results that are not findings, then the rest.

The module has only plain frozen values. It imports neither torch nor the native core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_memory_saver._stacks import CallStack, file_name, own_frames
from torch_memory_saver._text import binary_size, counted

__all__ = ["FreshReport", "UnwrittenBlock"]


@dataclass(frozen=True)
class UnwrittenBlock:
    """Memory that holds the fill pattern of guard mode.

    It is a block of PyTorch's allocator, a tensor that is a part of one, or an allocation that PyTorch does not know.

    Attributes:
        address: Address of the first byte, on the device.
        bytes: Size in bytes, as the program requested it.
        sampled_bytes: Number of bytes that were looked at.
        unwritten_bytes: Number of sampled bytes in parts that hold the pattern from end to end.
        device: CUDA ordinal.
        tag: Tag of the memory that contains it.
        dtype: Type of the largest tensor there, such as "float32"; "" if none was found.
        shape: Shape of that tensor; () if none was found.
        names: Names of the parameters and buffers there, such as "Engine.layers.0.rope.cos", in order.
        stack: Call stack of the allocation, or None if PyTorch has not recorded it.
    """

    address: int
    bytes: int
    sampled_bytes: int
    unwritten_bytes: int
    device: int
    tag: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    stack: CallStack | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, lists, texts and numbers, for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stack = None if self.stack is None else self.stack.as_dict()
        return fields | {"shape": list(self.shape), "names": list(self.names), "stack": stack}


@dataclass(frozen=True)
class FreshReport:
    """The live memory of the tags of a check, in which each byte belongs to one class.

    All sizes are bytes, as programs request them. `unwritten` has the findings, the largest first. `integers`,
    `partly_written`, `ignored` and the pools of graphs are not findings.

    Attributes:
        unwritten: Blocks that were live when the resume began, and in which everything that was looked at holds the pattern.
        integers: Blocks of an integer type in which all or parts of what was looked at holds the pattern. Nothing has
            restored them, or they were written with -1 (255 for uint8).
        partly_written: Other blocks that hold the pattern in parts: a cache that fills up, or a restoration that ended too
            early.
        ignored: Blocks that `ignore` names and in which everything that was looked at holds the pattern, such as a cache
            that was not written yet.
        checked_bytes: Bytes of the blocks that were looked at, findings or not, except ignored blocks and graphs.
        checked_blocks: Number of these blocks.
        ignored_bytes: Bytes of the memory that `ignore` names.
        new_bytes: Bytes of blocks that were allocated after the resume had begun. Their contents are not left over from the
            pause.
        restored_bytes: Bytes of memory that the resume restored from a backup.
        zeroed_bytes: Bytes of memory that was resumed with ``zero=True``.
        never_paused_bytes: Bytes of memory that was not paused since it was allocated.
        unguarded_bytes: Bytes of memory that was resumed while guard mode was off, so that it is unknown whether it was
            written.
        graph_bytes: Bytes of the pools of CUDA graphs, including free blocks, because PyTorch does not know which blocks are
            live. A replay writes the memory that its kernels read.
        graph_unwritten_bytes: Bytes of these pools in which everything that was looked at holds the pattern.
        sampled_bytes: Bytes that were copied to the host, out of everything that was looked at.
        whole: Whether blocks were read from end to end.
        hidden_objects: Number of objects of this process that were not searched for tensors and their names, because
            ``gc.freeze()`` has put them aside.
    """

    unwritten: tuple[UnwrittenBlock, ...] = ()
    integers: tuple[UnwrittenBlock, ...] = ()
    partly_written: tuple[UnwrittenBlock, ...] = ()
    ignored: tuple[UnwrittenBlock, ...] = ()
    checked_bytes: int = 0
    checked_blocks: int = 0
    ignored_bytes: int = 0
    new_bytes: int = 0
    restored_bytes: int = 0
    zeroed_bytes: int = 0
    never_paused_bytes: int = 0
    unguarded_bytes: int = 0
    graph_bytes: int = 0
    graph_unwritten_bytes: int = 0
    sampled_bytes: int = 0
    whole: bool = False
    hidden_objects: int = 0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was found."""
        return not self.unwritten

    @property
    def unwritten_bytes(self) -> int:
        """The bytes of the findings."""
        return sum(block.bytes for block in self.unwritten)

    @property
    def by_stack(self) -> tuple[tuple[CallStack | None, tuple[UnwrittenBlock, ...]], ...]:
        """The findings, grouped by the call stack that allocated them.

        The groups with the most bytes come first. The stack is None if it was not recorded.
        """
        groups: dict[CallStack | None, list[UnwrittenBlock]] = {}
        for block in self.unwritten:
            groups.setdefault(block.stack, []).append(block)
        by_size = sorted(groups.items(), key=lambda item: -sum(block.bytes for block in item[1]))
        return tuple((stack, tuple(blocks)) for stack, blocks in by_size)

    def __str__(self) -> str:
        return _render(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, lists, texts and numbers, for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = ("unwritten", "integers", "partly_written", "ignored")
        return fields | {name: [block.as_dict() for block in fields[name]] for name in lists}


#: Maximum numbers of rows of each kind, of frames of a call stack, and of names of a block that are shown. The text states
#: how many more rows and names there are.
_ROWS = 20
_FRAMES = 3
_NAMES = 2
_INDENT = "  "

_Rows = Sequence[UnwrittenBlock]


def _render(report: FreshReport) -> str:
    """Return the table, which ends with a line break."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: FreshReport) -> Iterator[str]:
    number = len(report.unwritten)
    findings = f"{counted(number, 'finding') if number else 'no findings'} in {counted(report.checked_blocks, 'block')}"
    sizes = f"{binary_size(report.unwritten_bytes)} of {binary_size(report.checked_bytes)}"
    yield f"check_fresh: {findings}, {sizes} not written since the resume"
    how = "read from end to end" if report.whole else "in samples; whole=True reads from end to end"
    yield f"looked at {binary_size(report.sampled_bytes)}, {how}"
    if report.hidden_objects and not all(block.names for block in report.unwritten):
        yield "gc.freeze() hides objects of this process: pass modules=... to see their names"
    yield from _section("Not written since the resume", report.unwritten, by_stack=True)
    yield from _section("Integers of -1 (255 in uint8): not restored, or written so", report.integers)
    yield from _section("Written in parts: a cache that fills up, or a restoration that ended early", report.partly_written)
    yield from _section("Ignored, and not written", report.ignored)
    yield from _classes(report)


def _section(title: str, blocks: _Rows, by_stack: bool = False) -> Iterator[str]:
    if not blocks:
        return
    yield from ("", title)
    shown = blocks[:_ROWS]
    widths = [max(map(len, column)) for column in zip(*map(_cells, shown), strict=True)]
    groups: dict[CallStack | None, list[UnwrittenBlock]] = {}
    for block in shown:
        groups.setdefault(block.stack if by_stack else None, []).append(block)
    for stack, rows in groups.items():
        for block in rows:
            size, *cells = _cells(block)
            padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            yield f"{_INDENT}{size:>{widths[0]}}  {'  '.join(padded)}".rstrip()
        if stack is not None:
            yield from _stack(stack, " " * (len(_INDENT) + widths[0] + 2))
    if len(blocks) > len(shown):
        yield f"{_INDENT}and {len(blocks) - len(shown)} more"


def _cells(block: UnwrittenBlock) -> tuple[str, ...]:
    names = ", ".join(block.names[:_NAMES])
    if len(block.names) > _NAMES:
        names += f" and {len(block.names) - _NAMES} more"
    shape = f" {block.shape}" if block.dtype else ""
    part = "" if block.unwritten_bytes == block.sampled_bytes else f"{block.unwritten_bytes / block.sampled_bytes:.0%} of it"
    where = f"device {block.device}, {block.address:#x}"
    return binary_size(block.bytes), names or "-", (block.dtype + shape) or "no tensor found", block.tag, where, part


def _stack(stack: CallStack, indent: str) -> Iterator[str]:
    frames = own_frames(stack)
    if not frames:
        yield f"{indent}{stack.origin.value}"
    for number, frame in enumerate(frames[:_FRAMES]):
        yield f"{indent}{'by' if number else 'at'} {file_name(frame)}:{frame.line} {frame.name}"


def _classes(report: FreshReport) -> Iterator[str]:
    graphs = f"in pools of CUDA graphs, {binary_size(report.graph_unwritten_bytes)} of it not written since the resume"
    rows = [
        (report.ignored_bytes, "ignored"),
        (report.new_bytes, "allocated since the resume"),
        (report.graph_bytes, graphs),
        (report.restored_bytes, "restored from a backup"),
        (report.zeroed_bytes, "zeroed by the resume"),
        (report.never_paused_bytes, "not paused since it was allocated"),
        (report.unguarded_bytes, "resumed while guard mode was off: it is unknown whether it was written"),
    ]
    shown = [(binary_size(size), text) for size, text in rows if size]
    if shown:
        width = max(len(size) for size, _ in shown)
        yield from ("", "Other memory, in which nothing counts as a finding")
        yield from (f"{_INDENT}{size:>{width}}  {text}" for size, text in shown)
