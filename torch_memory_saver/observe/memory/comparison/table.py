"""The comparison as text for a terminal of a given width.

The module owns the layout. Findings come first; then each process with its memory, and each kind of result with its call
stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch_memory_saver._stacks import CallStack, Frame, Origin, file_name, is_library, own_frames, title
from torch_memory_saver._text import counted, mebibytes, signed_mebibytes, table, wrapped

from .drift import Drift
from .findings import Findings
from .fragmentation import HELD_SHARE, DeviceUsage, Fragmentation
from .growth import StackGrowth
from .processes import Process

__all__ = ["reasons", "render"]

#: Width for `str()`, which does not know where its text goes.
_DEFAULT_WIDTH = 100
_DEFAULT_TOP = 10
_SMALLEST_WIDTH = 60
#: Number of frames of a call stack that are shown, and of changes of a row.
_FRAMES = 3
_INTERVALS = 6
_INDENT = "     "
#: A space at which a line does not end.
_NO_BREAK = "\N{NO-BREAK SPACE}"

_Item = TypeVar("_Item")


def render(findings: Findings, width: int = _DEFAULT_WIDTH, top: int = _DEFAULT_TOP, varying: bool = False) -> str:
    """Return the table.

    Args:
        findings: The results.
        width: Characters in a line. File names are cut at their beginning to fit.
        top: Number of rows of each kind.
        varying: Whether to list the call stacks that vary as well.
    """
    return "\n".join(_Table(findings, max(width, _SMALLEST_WIDTH), top).lines(varying)) + "\n"


class _Table:
    def __init__(self, findings: Findings, width: int, top: int) -> None:
        self._results = findings
        self._width = width
        self._top = top

    def lines(self, varying: bool) -> Iterator[str]:
        results = self._results
        labels = results.moments
        named = ", ".join(labels) if len(labels) <= _INTERVALS else f"{labels[0]} to {labels[-1]}"
        yield from self._wrapped(f"{counted(len(labels), 'moment')} ({named}); all sizes in MiB", "")
        for note in results.notes:
            yield from self._wrapped(f"Note: {note}", "  ")
        yield from self._findings()
        yield from self._processes()
        growth = self._growth
        yield from self._section("Leaks", "grew, and still grow", results.leaks, growth)
        yield from self._section(
            "Fragmentation", "memory that is reserved and not in use", results.fragmentation, self._fragmentation
        )
        yield from self._section("Warm-ups", "grew once, or stopped growing", results.warm_ups, growth)
        yield from self._section("Grown", "more at the second moment", results.grown, growth)
        if varying:
            yield from self._section("Varying", "also fell", results.varying, growth)
        yield from self._section("Drift", "blocks that rise as memory below them grows", results.drifts, self._drift)

    def _findings(self) -> Iterator[str]:
        results = self._results
        yield from ("", "Findings")
        leaking: dict[tuple[Process, int], list[StackGrowth]] = {}
        for leak in results.leaks:
            leaking.setdefault((leak.process, leak.device), []).append(leak)
        for usage in results.processes:
            leaks = leaking.get((usage.process, usage.device))
            if leaks:
                total = signed_mebibytes(sum(leak.growth for leak in leaks))
                largest = f"the largest: {title(leaks[0].stack)}"
                what = f"{total} in {counted(len(leaks), 'call stack')}; {largest}"
                yield from self._wrapped(f"leak: {_where(usage)}: {what}", "  ")
        for found in results.fragmentation:
            yield from self._wrapped(f"fragmentation: {_where(found.usage)}: {'; '.join(reasons(found))}", "  ")
        if not results.leaks and not results.fragmentation:
            yield "  none"

    def _processes(self) -> Iterator[str]:
        usages = self._results.processes
        heads = ("allocated", "reserved", "unused", "paused")[: 4 if any(usage.paused[-1] for usage in usages) else 3]
        rows = [
            (
                f"  {_where(usage)}",
                _change(usage.allocated),
                _change(usage.reserved),
                _change(usage.unused),
                _change(usage.paused),
            )
            for usage in usages
        ]
        first = "Processes, first -> last moment"
        lines = table([(first, *heads), *(row[: len(heads) + 1] for row in rows)])
        yield ""
        if max(map(len, lines)) <= self._width:
            yield from (line.replace(_NO_BREAK, " ") for line in lines)
            return
        yield first
        for row in rows:
            yield _cut_right(row[0], self._width).replace(_NO_BREAK, " ")
            figures = [f"{head} {cell}" for head, cell in zip(heads, row[1:], strict=False)]
            yield from self._wrapped(", ".join(figures), _INDENT, _INDENT)

    def _section(
        self, name: str, meaning: str, items: Sequence[_Item], show: Callable[[_Item], Iterable[str]]
    ) -> Iterator[str]:
        if not items:
            return
        yield from ("", f"{name}: {meaning}")
        for number, item in enumerate(items[: self._top], 1):
            first, *others = show(item)
            yield from self._wrapped(f"{number:>3}. {first}", "", _INDENT)
            yield from others
        if len(items) > self._top:
            yield f"{_INDENT}and {len(items) - self._top} more"

    def _growth(self, growth: StackGrowth) -> Iterator[str]:
        blocks = f"{growth.blocks[0]} -> {growth.blocks[-1]} blocks"
        again = "; grew last too" if growth.grew_last and growth in self._results.warm_ups else ""
        changes = _changes(growth.intervals)
        yield f"{signed_mebibytes(growth.growth)}  ({changes}{again})  {blocks}  {_where(growth)}"
        yield from self._stack(growth.stack)

    def _fragmentation(self, found: Fragmentation) -> Iterator[str]:
        yield f"{_where(found.usage)}: {'; '.join(reasons(found))}"
        usage = found.usage
        cached = f"cached {mebibytes(usage.cached[-1])} (release_cached() gives it back)"
        held = f"held{_NO_BREAK}{mebibytes(usage.held[-1])}"
        yield from self._wrapped(f"unused {_change(usage.unused)}, of it {cached}, {held}", _INDENT)
        if usage.held[-1]:
            for holder in found.holders[:_FRAMES]:
                yield from self._wrapped(
                    f"{mebibytes(holder.held)} held in {_held_in(holder.segments, usage)} by "
                    f"{counted(holder.blocks, 'block')} of {mebibytes(holder.bytes)} in all",
                    _INDENT,
                )
                yield from self._stack(holder.stack, _INDENT + "  ")

    def _drift(self, drift: Drift) -> Iterator[str]:
        places = " -> ".join(mebibytes(position) for position in drift.positions[-_INTERVALS:])
        size = f"{counted(drift.blocks, 'block')} of {mebibytes(drift.bytes)}"
        yield f"{size} at {places} ({signed_mebibytes(drift.rise)})  {_where(drift)}"
        yield from self._stack(drift.stack)
        for stack, grown in drift.below[:_FRAMES]:
            yield self._fit(f"{_INDENT}below: {signed_mebibytes(grown)}  ", title(stack))

    def _stack(self, stack: CallStack, indent: str = _INDENT) -> Iterator[str]:
        if not stack.frames:
            yield f"{indent}{stack.origin.value}"
            return
        own = own_frames(stack)
        inner = stack.frames[0]
        if stack.origin is Origin.PYTHON and is_library(inner) and inner not in own:
            yield self._frame(f"{indent}in ", inner)
        native = stack.origin is Origin.NATIVE
        for number, frame in enumerate(own[:_FRAMES]):
            prefix = f"{indent}{'by ' if number else 'at '}"
            yield self._fit(prefix, f"C++ {frame.name}") if native else self._frame(prefix, frame)
        rest = len(own) - _FRAMES
        folded = [f"{counted(rest, 'more frame')} of the program"] if rest > 0 and not native else []
        folded += [f"C++ frames: {stack.native_frames}"] if stack.native_frames else []
        if folded:
            yield f"{indent}({', '.join(folded)})"

    def _frame(self, prefix: str, frame: Frame) -> str:
        call = f":{frame.line} {frame.name}"
        room = self._width - len(prefix) - len(call)
        return self._fit(prefix, _cut_left(file_name(frame), max(room, 12)) + call)

    def _fit(self, prefix: str, text: str) -> str:
        return prefix + _cut_right(text, self._width - len(prefix))

    def _wrapped(self, text: str, indent: str, hanging: str | None = None) -> list[str]:
        following = indent + "  " if hanging is None else hanging
        return [line.replace(_NO_BREAK, " ") for line in wrapped(text, self._width, following, indent)]


def _where(row: DeviceUsage | StackGrowth | Drift) -> str:
    return f"{row.process}, device{_NO_BREAK}{row.device}"


def reasons(found: Fragmentation) -> list[str]:
    """Return the reasons why a device is a finding, one text for each.

    Sizes are in MiB.
    """
    usage, texts = found.usage, []
    if usage.is_held:
        where = _held_in(usage.held_segments[-1], usage)
        texts.append(f"{mebibytes(usage.held[-1])} unused in {where} that are less than {HELD_SHARE:.0%} in use")
    if usage.unused_grows:
        grown = f"by{_NO_BREAK}{mebibytes(usage.unused[-1] - usage.unused[0])}"
        texts.append(f"reserved minus allocated grew in every interval, {grown}")
    return texts


def _held_in(number: int, usage: DeviceUsage) -> str:
    """Return a text about the number of segments in which memory is held.

    PyTorch gives back single pieces of expandable segments.
    """
    pieces = usage.held_pieces[-1]
    if pieces == 0:
        return counted(number, "segment")
    if pieces == usage.held_segments[-1]:
        return f"{counted(number, 'piece')} of expandable segments"
    return f"{number} segments and pieces of expandable ones"


def _change(values: Sequence[int]) -> str:
    if len(values) == 1:
        return mebibytes(values[0])
    return f"{mebibytes(values[0])} -> {mebibytes(values[-1])}"


def _changes(intervals: Sequence[int]) -> str:
    shown = " ".join(signed_mebibytes(change) for change in intervals[-_INTERVALS:])
    return shown if len(intervals) <= _INTERVALS else f"... {shown}"


def _cut_left(text: str, room: int) -> str:
    """Return the end of a path, from a separator on where one fits."""
    if len(text) <= room:
        return text
    tail = text[len(text) - room + 3 :]
    _, slash, rest = tail.partition("/")
    return "..." + (slash + rest if slash and rest else tail)


def _cut_right(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 3, 0)] + "..."
