"""The statistics as text: a row for each tag and each device, then what is worth a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_memory_saver.usage import CallTotals, Stats, Usage

__all__ = ["stats_table"]

_MIB = 1 << 20
_HEADINGS = ("MiB", "allocations", "resident", "peak", "paused", "backup", "slack", "deferred", "damaged")
#: Columns that are shown only if the total has any, from the right.
_RARE = (("damaged", "damaged_bytes"), ("deferred", "deferred_bytes"), ("slack", "slack_bytes"))


def stats_table(stats: Stats) -> str:
    """The lines of `print(stats)`, without an end of line."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    rows += [_row(f"tag {tag}", usage) for tag, usage in stats.tags.items()]
    rows += [_row(f"device {device}", usage) for device, usage in stats.devices.items()]
    rows.append(_row("total", stats.total))
    for heading, name in _RARE:
        if not getattr(stats.total, name):
            column = rows[0].index(heading)
            rows = [row[:column] + row[column + 1 :] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    lines += [_calls("pauses", stats.pauses), _calls("resumes", stats.resumes)]
    lines += _remarks(stats)
    return "\n".join(lines)


def _row(title: str, usage: Usage) -> tuple[str, ...]:
    peak = usage.resident_peak_bytes
    sizes = (
        usage.resident_bytes,
        peak,
        usage.paused_bytes,
        usage.backup_bytes,
        usage.slack_bytes,
        usage.deferred_bytes,
        usage.damaged_bytes,
    )
    return title, str(usage.allocations), *("-" if size is None else f"{size / _MIB:.1f}" for size in sizes)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    title, *cells = row
    return "  ".join([title.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])


def _calls(name: str, totals: CallTotals) -> str:
    text = f"{name}: {totals.calls} in {totals.seconds:.3f} s, {totals.bytes / _MIB:.1f} MiB, "
    text += f"{totals.copied_bytes / _MIB:.1f} MiB copied"
    return text + (f"; {totals.failures} failed" if totals.failures else "")


def _remarks(stats: Stats) -> list[str]:
    lines = []
    if stats.host_resident_bytes:
        pooled = f", {stats.host_pooled_bytes / _MIB:.1f} of them idle in the pool" if stats.host_pooled_bytes else ""
        lines.append(f"host memory for backups: {stats.host_resident_bytes / _MIB:.1f} MiB{pooled}")
    if stats.counters["disk_backup_bytes"]:
        lines.append(f"backup files: {stats.counters['disk_backup_bytes'] / _MIB:.1f} MiB")
    if stats.stranded_bytes:
        lines.append(f"stranded: {stats.stranded_bytes / _MIB:.1f} MiB of partly used segments that no region uses any more")
    if stats.failed_allocations:
        lines.append(f"failed allocations: {stats.failed_allocations}")
    if stats.guard:
        lines.append(f"guard mode is on: {stats.guarded_bytes / _MIB:.1f} MiB show 0xFF")
    return lines
