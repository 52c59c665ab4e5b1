"""The lines of `top`: a view as text of a given width. This module has no state and reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_memory_saver._text import binary_size, counted, wrapped
from torch_memory_saver.observe._processes.names import cut, width_of
from torch_memory_saver.observe._processes.view import GpuView, ProcessView, StoreView, TagView, View

__all__ = ["ORDERS", "Line", "lines_of"]

_SMALLEST_NAME = 15
#: The columns after the name: titles and widths.
_COLUMNS = (
    ("STATE", 8),
    ("USED", 6),
    ("RESIDENT", 8),
    ("PAUSED", 6),
    ("BACKUP", 6),
    ("PAUSE", 5),
    ("RESUME", 6),
    ("FAIL", 4),
)
_PID_WIDTH = 7
_NARROWEST = _PID_WIDTH + 1 + _SMALLEST_NAME + sum(width + 1 for _, width in _COLUMNS)
_INDENT = "      "
_TAG_INDENT = len(_INDENT)
#: The number of tags of a process that have a line. The others share one.
_MAX_TAGS = 10
_WITHOUT_ROW = "(others)"
_FOREIGN = "* in another PID namespace, such as a container's: the number is the one there"
_UNKNOWN, _NONE = "?", "-"
_UNITS = ((60.0, "s", 1.0), (3600.0, "m", 60.0), (86400.0, "h", 3600.0), (float("inf"), "d", 86400.0))


@dataclass(frozen=True)
class Line:
    """A line, and what it is of: "gpu", "heading", "process", "tag", "note" or "" for an empty one."""

    text: str
    kind: str


def lines_of(view: View, width: int, *, sort: str = "memory", pattern: str = "") -> list[Line]:
    """Return the lines, none longer than `width` unless that is less than the columns need.

    Args:
        sort: One of ORDERS, by which the processes of a GPU are sorted.
        pattern: Only processes whose number, name or a tag contains this text, in any case; of those found by a tag, only
            such tags.
    """
    width = max(width, _NARROWEST)
    columns = _width_of_columns(view, width)
    lines: list[Line] = []
    for gpu in view.gpus:
        if lines:
            lines.append(Line("", ""))
        lines += [Line(cut(text, width), "gpu") for text in _gpu_texts(gpu)]
        shown = [found for process in gpu.processes if (found := _filtered(process, pattern.casefold()))]
        if shown:
            lines.append(Line(_row("    PID", "NAME", [title for title, _ in _COLUMNS], columns), "heading"))
        elif gpu.processes:
            lines.append(Line(cut(f"  no process has {pattern!r}", width), "note"))
        for process, tags in sorted(shown, key=lambda found: ORDERS[sort](found[0])):
            lines.append(Line(_process_text(process, columns), "process"))
            lines += [Line(text, "tag") for text in _tag_texts(tags, columns)]
    if not view.gpus:
        lines.append(Line("no GPU and no process with a page is known", "note"))
    if any(process.foreign for gpu in view.gpus for process in gpu.processes):
        lines.append(Line(_FOREIGN, "note"))
    if view.store is not None and (view.store.objects or view.store.processes):
        lines += [Line(text, "note") for text in wrapped(_store_text(view.store), width, _INDENT)]
    for note in view.notes:
        lines += [Line(text, "note") for text in wrapped(f"note: {note}", width, _INDENT)]
    return lines


#: Sort keys for the processes of a GPU, by the name of the order.
ORDERS: dict[str, Callable[[ProcessView], tuple[object, ...]]] = {
    "memory": lambda process: (-max(process.used_bytes or 0, process.resident_bytes), process.pid),
    "paused": lambda process: (-process.paused_bytes, process.pid),
    "pid": lambda process: (process.foreign, process.pid),
    "name": lambda process: (process.name.casefold(), process.rank or 0, process.pid),
    "failures": lambda process: (-process.failures_total, process.pid),
}


def _width_of_columns(view: View, width: int) -> int:
    """Return the width of the table, at most `width`: no wider than the longest name needs."""
    processes = [process for gpu in view.gpus for process in gpu.processes]
    names = [max(width_of(_name_of(process)), 2 * width_of(_after_name(process))) for process in processes]
    names += [width_of(tag.tag) + _TAG_INDENT - _PID_WIDTH - 1 for process in processes for tag in process.tags]
    return min(width, _NARROWEST + max(0, max(names, default=0) - _SMALLEST_NAME))


def _filtered(process: ProcessView, pattern: str) -> tuple[ProcessView, Sequence[TagView]] | None:
    if not pattern or pattern in f"{process.pid} {_name_of(process)}".casefold():
        return process, process.tags
    tags = [tag for tag in process.tags if pattern in tag.tag.casefold()]
    return (process, tags) if tags else None


def _gpu_texts(gpu: GpuView) -> list[str]:
    title = f"GPU {_UNKNOWN if gpu.index is None else gpu.index}" + ("" if gpu.mig is None else f" MIG {gpu.mig}")
    slack = f"  slack {_size(gpu.slack_bytes)}" if gpu.slack_bytes else ""
    managed = f"resident {_size(gpu.resident_bytes)}  paused {_size(gpu.paused_bytes)}{slack}"
    return [
        "  ".join(text for text in (title, gpu.name, gpu.uuid) if text),
        f"  total {_size(gpu.total_bytes)}  used {_size(gpu.used_bytes)}  free {_size(gpu.free_bytes)}",
        f"  managed: {managed}  other {_size(gpu.other_bytes)}",
    ]


def _store_text(store: StoreView) -> str:
    objects, processes = counted(store.objects, "object"), "process" if store.processes == 1 else "processes"
    size = _size(store.bytes)
    return f"shared store: {size} in {objects}, each counted once, for {store.processes} {processes}: {store.path}"


def _backups(held: ProcessView | TagView) -> int:
    """Return the bytes of all backups. An object of the shared store is in the number of each process that holds it."""
    return held.host_backup_bytes + held.disk_backup_bytes + held.shared_backup_bytes


def _name_of(process: ProcessView) -> str:
    return f"{process.name or _UNKNOWN}{_after_name(process)}"


def _after_name(process: ProcessView) -> str:
    """Return the rank; or the user, of processes that may be of another one: those with a page are of the user who looks."""
    if process.managed:
        return "" if process.rank is None else f" #{process.rank}"
    return f" ({process.user})" if process.user else ""


def _process_text(process: ProcessView, width: int) -> str:
    pid = f"{f'{process.pid}*' if process.foreign else process.pid:>{_PID_WIDTH}}"
    if not process.managed:
        cells = [_NONE, _cell(process.used_bytes), *([_NONE] * 6)]
    else:
        cells = [
            process.state,
            _cell(process.used_bytes),
            _cell(process.resident_bytes),
            _cell(process.paused_bytes),
            _cell(_backups(process)),
            _age(process.last_pause_age),
            _age(process.last_resume_age),
            str(process.failures_total),
        ]
    return _row(pid, process.name or _UNKNOWN, cells, width, _after_name(process))


def _tag_texts(tags: Sequence[TagView], width: int) -> list[str]:
    """Return the lines of the tags of a process: the largest ones, and a line that sums the others."""
    tags = sorted(tags, key=lambda tag: -(tag.resident_bytes + tag.paused_bytes))
    texts = [_tag_text(tag, width) for tag in tags[:_MAX_TAGS]]
    rest = tags[_MAX_TAGS:]
    if rest:
        cells = [
            "",
            "",
            _cell(sum(tag.resident_bytes for tag in rest)),
            _cell(sum(tag.paused_bytes for tag in rest)),
            _cell(sum(map(_backups, rest))),
            _NONE,
            _NONE,
            str(sum(tag.failures_total for tag in rest)),
        ]
        texts.append(_row("", f"  and {len(rest)} more", cells, width))
    return texts


def _tag_text(tag: TagView, width: int) -> str:
    cells = [
        tag.state,
        "",
        _cell(tag.resident_bytes),
        _cell(tag.paused_bytes),
        _cell(_backups(tag)),
        _age(tag.last_pause_age),
        _age(tag.last_resume_age),
        str(tag.failures_total),
    ]
    return _row("", f"  {tag.tag or _WITHOUT_ROW}", cells, width)


def _row(pid: str, name: str, cells: Sequence[str], width: int, after_name: str = "") -> str:
    """Return one row of the table. The first column of a tag is empty, and the name of the tag begins there. A long name is
    cut at its end, and the text after the name is kept."""
    room = width - _NARROWEST + _SMALLEST_NAME
    start = f"{pid:>{_PID_WIDTH}} " if pid else "    "
    room += _PID_WIDTH + 1 - len(start)
    if width_of(after_name) > room // 2:
        after_name = f"{cut(after_name, room // 2 - 1)}~"
    own = room - width_of(after_name)
    shown = (name if width_of(name) <= own else f"{cut(name, own - 1)}~") + after_name
    text = start + shown + " " * (room - width_of(shown))
    for index, (cell, (_, cell_width)) in enumerate(zip(cells, _COLUMNS, strict=True)):
        text += f" {cell:<{cell_width}}" if index == 0 else f" {cell:>{cell_width}}"
    return text.rstrip()


def _size(size: int | None) -> str:
    return _UNKNOWN if size is None else "0" if size == 0 else binary_size(size)


def _cell(size: int | None) -> str:
    """Return a size in few characters: binary units, such as "1.5G" for 1.5 GiB."""
    return _size(size).replace(" ", "").replace("iB", "")


def _age(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    for limit, unit, size in _UNITS:
        if seconds < limit:
            return f"{int(seconds / size)}{unit}"
    return ""
