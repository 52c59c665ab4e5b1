"""The ledger as text: a table for each device, and its notes as sentences below."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_memory_saver.holders import DeviceLedger, Ledger

__all__ = ["ledger_table"]

_MIB = 1 << 20
_WIDTH = 80  # of notes
_NOTHING = "no device is in use by this process"


def ledger_table(ledger: Ledger) -> str:
    """The lines of `print(ledger)`, without an end of line."""
    blocks = [_device_table(device) for device in ledger.devices] or [_NOTHING]
    return "\n".join(["\n\n".join(blocks), *ledger.remarks])


def _device_table(device: DeviceLedger) -> str:
    rows = [(f"device {device.device}", "MiB", "allocations")]
    notes: list[str] = []
    for line in device.lines:
        mark = ""
        if line.note:
            notes.append(f"({len(notes) + 1}) {line.note}")
            mark = f" ({len(notes)})"
        rows.append((line.name + mark, _size(line.bytes), _number(line.allocations)))
        rows += [(f"  {part.name}", _size(part.bytes), _number(part.allocations)) for part in line.parts]
    rows.append(("used", _size(device.used_bytes), ""))
    rows.append(("total", _size(device.total_bytes), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        f"{name.ljust(widths[0])}  {size.rjust(widths[1])}  {count.rjust(widths[2])}".rstrip() for name, size, count in rows
    ]
    return "\n".join(table + [wrapped for note in notes for wrapped in wrap(note, _WIDTH, subsequent_indent="    ")])


def _size(size: int | None) -> str:
    return "-" if size is None else f"{size / _MIB:.1f}"


def _number(number: int | None) -> str:
    return "" if number is None else str(number)
