"""The report of check_fresh() as text for a terminal: findings first, then what is no finding, then the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_memory_saver.freshness import FreshReport, UnwrittenBlock
from torch_memory_saver.memory.comparison.naming import file_name, own_frames
from torch_memory_saver.memory.model import CallStack

__all__ = ["render"]

#: Rows of each kind, frames of a call stack, and names of a block that are shown. How many more there are is said.
_ROWS = 20
_FRAMES = 3
_NAMES = 2
_INDENT = "  "
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024

_Rows = Sequence[UnwrittenBlock]


def render(report: FreshReport) -> str:
    """The table, which ends with a line break."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: FreshReport) -> Iterator[str]:
    number = len(report.unwritten)
    findings = f"{number or 'no'} finding{'' if number == 1 else 's'} in {report.checked_blocks} blocks"
    sizes = f"{_size(report.unwritten_bytes)} of {_size(report.checked_bytes)}"
    yield f"check_fresh: {findings}, {sizes} not written since the resume"
    how = "read from end to end" if report.whole else "in samples; whole=True reads from end to end"
    yield f"looked at {_size(report.sampled_bytes)}, {how}"
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
    return _size(block.bytes), names or "-", (block.dtype + shape) or "no tensor found", block.tag, where, part


def _stack(stack: CallStack, indent: str) -> Iterator[str]:
    frames = own_frames(stack)
    if not frames:
        yield f"{indent}{stack.origin.value}"
    for number, frame in enumerate(frames[:_FRAMES]):
        yield f"{indent}{'by' if number else 'at'} {file_name(frame)}:{frame.line} {frame.name}"


def _classes(report: FreshReport) -> Iterator[str]:
    graphs = f"in pools of CUDA graphs, of which {_size(report.graph_unwritten_bytes)} hold the pattern"
    rows = [
        (report.ignored_bytes, "ignored"),
        (report.new_bytes, "allocated since the resume"),
        (report.graph_bytes, graphs),
        (report.restored_bytes, "restored from a backup"),
        (report.zeroed_bytes, "zeroed by the resume"),
        (report.never_paused_bytes, "not paused since it was allocated"),
        (report.unguarded_bytes, "resumed while guard mode was off: it cannot be told"),
    ]
    shown = [(_size(size), text) for size, text in rows if size]
    if shown:
        width = max(len(size) for size, _ in shown)
        yield from ("", "Memory in which nothing is found")
        yield from (f"{_INDENT}{size:>{width}}  {text}" for size, text in shown)


def _size(size: int) -> str:
    number, unit = float(size), _UNITS[0]
    for larger in _UNITS[1:]:
        if number < _STEP:
            break
        number, unit = number / _STEP, larger
    return f"{size} B" if unit == _UNITS[0] else f"{number:.1f} {unit}"
