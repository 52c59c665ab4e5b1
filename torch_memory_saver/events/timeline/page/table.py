"""The levels as a text table: what each tag held at most and at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest

from torch_memory_saver.events.log import EventLog
from torch_memory_saver.events.timeline.levels import KINDS
from torch_memory_saver.events.timeline.merge import Gpu, Host

__all__ = ["gpu_name", "host_name", "process_name", "table"]

_MIB = 1 << 20
#: Rows of a machine, those of the highest peaks.
_MOST_ROWS = 400
_HEADS = ("process", "device", "tag", *(f"{kind} {when}" for kind in KINDS for when in ("peak", "end")))


def printable(text: str) -> str:
    """The text on one line, also if a file has line breaks or halves of characters in it."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def process_name(log: EventLog, host: Host) -> str:
    """The name of a process for people; with that of its container where the host has several."""
    rank = "" if log.rank is None else f", rank {log.rank}"
    return printable(f"{log.role}{rank}, pid {log.pid}" + (f" on {log.host}" if len(host.names) > 1 else ""))


def host_name(host: Host) -> str:
    """The name of a machine for people."""
    return printable(", ".join(host.names))


def gpu_name(gpu: Gpu) -> str:
    """The name of a GPU for people: the ordinals that its processes give it."""
    ordinals = sorted(set(gpu.ordinals.values()))
    return f"GPU {' or '.join(map(str, ordinals))}"


def table(hosts: Sequence[Host]) -> str:
    """The table, in MiB. The end is that of each log: after an exit nothing is held."""
    lines = []
    for host in hosts:
        found = list(_rows(host))
        shown = set(nlargest(_MOST_ROWS, range(len(found)), key=lambda number: found[number][0]))
        rows = [_HEADS, *(row for number, (_, row) in enumerate(found) if number in shown)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
        lines.append(f"{host_name(host)} (MiB)")
        for row in rows:
            texts = (text.ljust(width) for text, width in zip(row[:3], widths, strict=False))
            numbers = (text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True))
            lines.append("  ".join([*texts, *numbers]).rstrip())
        if len(shown) < len(found):
            lines.append(f"and {len(found) - len(shown)} rows more, of lower peaks")
        lines.append("")
    return "\n".join(lines)


def _rows(host: Host) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The highest level of a row, and the row."""
    for log, changes in zip(host.logs, host.changes, strict=True):
        peaks: dict[tuple[int, str], dict[str, int]] = {}
        ends: dict[tuple[int, str], dict[str, int]] = {}
        for change in changes:
            key = (change.device, change.tag)
            held = peaks.setdefault(key, dict.fromkeys(KINDS, 0))
            held[change.kind] = max(held[change.kind], change.bytes)
            ends.setdefault(key, dict.fromkeys(KINDS, 0))[change.kind] = change.bytes
        for device, tag in sorted(peaks):
            sizes = [at[device, tag][kind] for kind in KINDS for at in (peaks, ends)]
            texts = (process_name(log, host), str(device), printable(tag), *(f"{size / _MIB:.1f}" for size in sizes))
            yield max(sizes), texts
