"""Shows the results as text: tables for a terminal of 80 columns, or one table in Markdown."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .cases import find
from .figures import AT_LEAST, AT_MOST, MEMORY, PARITY, PEER, Row, Samples

__all__ = ["amount", "groups", "machine_line", "markdown", "terminal"]

_MIB = 1 << 20
_GIB = 1 << 30
_NONE = "-"
#: Columns of a terminal.
_WIDTH = 80


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine, its software and the date in one line."""
    parts = [
        str(machine.get("device", "no device")),
        f"{machine['processors']} CPUs",
        f"driver {machine['driver']}" if machine.get("driver") else "",
        f"PyTorch {machine['torch']}" if machine.get("torch") else "without PyTorch",
        str(machine["date"]),
    ]
    return ", ".join(part for part in parts if part)


def _number(value: float) -> str:
    """The number with as many decimal places as are meaningful."""
    return f"{value:.{_digits(value)}f}"


def _digits(value: float) -> int:
    """How many decimal places of a number are meaningful."""
    return 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4


def _value(row: Row, samples: Samples | None) -> str:
    """The median in milliseconds, or in MiB if the row is about memory, without the unit."""
    if samples is None:
        return _NONE
    return f"{samples.median / _MIB:.0f}" if row.target.kind == MEMORY else _number(samples.median * 1e3)


def amount(row: Row, samples: Samples) -> str:
    """The median with its unit."""
    return f"{_value(row, samples)} {'MiB' if row.target.kind == MEMORY else 'ms'}"


def _spread(row: Row) -> str:
    if row.ours is None:
        return _NONE
    low, high = (value / _MIB if row.target.kind == MEMORY else value * 1e3 for value in row.ours.spread)
    digits = 0 if row.target.kind == MEMORY else _digits(high)
    return f"{low:.{digits}f} - {high:.{digits}f}"


def _speed(row: Row, samples: Samples | None) -> str:
    speed = row.speed(samples)
    return _NONE if speed is None else f"{speed / 1e9:.1f}" if speed < 1e12 else f"{speed / 1e9:.0f}"


def _ratio(row: Row, ratio: float | None, value: bool = False) -> str:
    """The ratio as text. `value`: it is a target, all digits of which are shown."""
    if ratio is None:
        return _NONE
    if row.target.kind == AT_LEAST:
        return f"{ratio:.0%}" if value else f"{ratio:.1%}"
    if row.target.kind == MEMORY:
        return f"{ratio / _MIB:+.0f}"
    return f"{ratio:g}x" if value else f"{ratio:.2f}x"


def _target(row: Row, judged: bool) -> str:
    """The target and whether it is met. Empty if there is none, or if it is about times and `judged` is False."""
    if row.target.value is None or not (judged or row.target.kind == MEMORY):
        return ""
    sign = "<=" if row.target.kind in (AT_MOST, MEMORY) else ">="
    met = {True: " ok", False: " NO", None: ""}[row.met]
    return f"{sign} {_ratio(row, row.target.value, value=True)}{met}"


def _title(case: str) -> str:
    found = find(case)
    return case if found is None else f"{case}: {found.title}"


def groups(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    """The rows of each case, in the order of first appearance."""
    order = list(dict.fromkeys(row.case for row in rows))
    for case, group in itertools.groupby(sorted(rows, key=lambda row: order.index(row.case)), key=lambda row: row.case):
        yield case, list(group)


def terminal(
    rows: Sequence[Row], left_out: Sequence[Mapping[str, str]], machine: Mapping[str, Any], peer: str | None
) -> str:
    """A table for each case. Times are medians in milliseconds. The speed is ours, in 10^9 bytes per second."""
    lines = [machine_line(machine)]
    judged = not machine.get("simulated")
    if not judged:
        lines.append("On the simulated GPU times mean nothing: this shows only that everything works.")
    header = ["", "ms", "min - max", "GB/s", "limit", "ratio", "target"] + (["C++"] if peer else [])
    for case, group in groups(rows):
        memory = all(row.target.kind == MEMORY for row in group)
        titles = ["", "MiB", "min - max", "", "limit", "more", "target"] + (["C++"] if peer else []) if memory else header
        table = [titles]
        for row in group:
            cells = [f"  {row.operation}", _value(row, row.ours), _spread(row), _speed(row, row.ours)]
            cells += [_value(row, row.limit), _ratio(row, row.ratio), _target(row, judged)]
            table.append([cell or "" for cell in cells] + ([_value(row, row.peer)] if peer else []))
        lines += ["", _title(case), *_limits(group)]
        lines += _aligned(table, [row.shape for row in group])
    if any(row.ratio is not None and row.target.kind != MEMORY for row in rows):
        lines += ["", "Times are medians; a ratio is the median over all pairs of a time and a limit."]
    if peer:
        lines += ["", f"C++: torch_memory_saver {peer}, the same work through its API."]
    if left_out:
        lines += ["", "Left out:"]
    for entry in left_out:
        text = f"{entry['case']}, {entry['shape']} ({entry['side']}): {entry['reason']}"
        lines += _wrapped(text)
    return "\n".join(lines)


def _limits(group: Sequence[Row]) -> list[str]:
    names: dict[str, list[str]] = {}
    for row in group:
        if row.limit is not None:
            operations = names.setdefault(row.limit_name, [])
            operation = next((end.strip() for end in (PARITY, PEER) if row.operation.endswith(end)), row.operation)
            if operation not in operations:
                operations.append(operation)
    if len(names) == 1:
        return [f"  limit: {name}" for name in names]
    lines = [f"limit of {', '.join(operations)}: {name}" for name, operations in names.items()]
    return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _aligned(table: Sequence[Sequence[str]], shapes: Sequence[str]) -> list[str]:
    # Empty columns are left out.
    used = [column for column in range(len(table[0])) if any(row[column] not in ("", _NONE) for row in table[1:])]
    table = [[row[column] for column in used] for row in table]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    lines = [line(table[0])]
    shape = ""
    for row, of in zip(table[1:], shapes, strict=True):
        if of != shape:
            shape = of
            lines.append(f" {shape}")
        lines.append(line(row))
    return lines


def markdown(rows: Sequence[Row], machine: Mapping[str, Any], peer: str | None) -> str:
    """One table for a document. A case and its shape are named only in the first of their rows."""
    header = ["case", "", "median (spread)", "GB/s", "limit", "ratio", "target", *([f"C++ {peer}"] if peer else [])]
    lines = [f"{machine_line(machine)}.", "", _markdown_row(header), _markdown_row(["---"] * len(header))]
    judged = not machine.get("simulated")
    for _, group in groups(rows):
        named = ""
        for row in group:
            name, named = "" if row.shape == named else f"{row.case}, {row.shape}", row.shape
            unit = " MiB" if row.target.kind == MEMORY else " ms"
            limit = _NONE if row.limit is None else f"{_value(row, row.limit)}{unit}, {row.limit_name}"
            cells = [name, row.operation, f"{_value(row, row.ours)}{unit} ({_spread(row)})"]
            more = " MiB" if row.target.kind == MEMORY else ""
            cells += [_speed(row, row.ours), limit, _ratio(row, row.ratio) + more, _target(row, judged)]
            lines.append(_markdown_row([*cells, *([_peer_cell(row, unit)] if peer else [])]))
    return "\n".join(lines)


def _peer_cell(row: Row, unit: str) -> str:
    if row.peer is None:
        return _NONE
    speed = _speed(row, row.peer)
    return f"{_value(row, row.peer)}{unit}" + (f", {speed} GB/s" if speed != _NONE else "")


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell or ' ' for cell in cells)} |"
