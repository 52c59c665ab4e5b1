"""Results: repeated measurements, the limit that they are compared with, and the table that shows them.

Times are in seconds and sizes in bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["Row", "markdown", "merge"]

_NONE = "-"
_SPEED_UNIT = 1e9


@dataclass(frozen=True)
class Row:
    """One operation of one case.

    Attributes:
        case: The name of the case, as in `--cases`.
        shape: Number and size of the allocations, such as "32 x 512 MiB".
        operation: Such as "pause".
        bytes: How many bytes the operation handles, from which the speed follows. 0: a speed would mean nothing.
        ours: The seconds of each repetition with this package.
        peer: The seconds with the C++ package. Empty: they were not measured.
        limit: The seconds of the limit, measured in turns with `ours`. Empty: there is no limit.
        limit_name: What the limit is, or why there is none.
        target: The ratio to reach. None: the ratio is reported only.
    """

    case: str
    shape: str
    operation: str
    bytes: int
    ours: Sequence[float] = ()
    peer: Sequence[float] = ()
    limit: Sequence[float] = ()
    limit_name: str = ""
    target: float | None = None
    notes: str = ""

    @property
    def ratio(self) -> float | None:
        """The limit's time divided by ours, the median over all pairs of measurements. None without a limit.

        The ratio of the two medians would be less stable. A virtual machine may make the same calls at two speeds. A median
        then falls on one of the two by chance, and two equal sides would differ as much as the speeds do. The median over
        all pairs is the estimator of Hodges and Lehmann (1963, doi:10.1214/aoms/1177704172), of logarithms.
        """
        if not self.ours or not self.limit:
            return None
        # A time of 0, of work that is shorter than a tick of the clock, makes the ratio infinite.
        return statistics.median(limit / ours if ours else float("inf") for limit in self.limit for ours in self.ours)

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches the target. Return None without a target or without a ratio."""
        return None if self.ratio is None or self.target is None else self.ratio >= self.target

    def as_json(self) -> dict[str, Any]:
        """The row with what follows from its measurements."""
        return {**asdict(self), "median": statistics.median(self.ours), "ratio": self.ratio, "met": self.met}


@dataclass
class _Merged:
    """The row of one key so far, and the measurements of its rows."""

    row: Row
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)

    def add(self, row: Row) -> None:
        if row.ours:
            self.row = row  # A row of the peer has neither a limit nor a target.
        self.ours += row.ours
        self.peer += row.peer
        self.limit += row.limit


def merge(rows: Iterable[Row]) -> list[Row]:
    """One row for each case, shape and operation that this package measured, with the measurements of all processes in their
    order. Operations that only the C++ package measured are dropped."""
    merged: dict[tuple[str, str, str], _Merged] = {}
    for row in rows:
        merged.setdefault((row.case, row.shape, row.operation), _Merged(row)).add(row)
    return [
        replace(found.row, ours=found.ours, peer=found.peer, limit=found.limit) for found in merged.values() if found.ours
    ]


def markdown(rows: Sequence[Row], machine: Mapping[str, Any], peer: str | None) -> str:
    """A table in Markdown whose columns are aligned. A case and its shape are named in the first of their rows.

    Args:
        machine: The description of the machine, as in the JSON file.
        peer: The version of the C++ package. None: it was not measured.
    """
    table = [["case", "", "median (spread)", "GB/s", "limit", "ratio", "target", *([f"C++ {peer}"] if peer else [])]]
    table.append(["---"] * len(table[0]))
    named = ""
    for row in rows:
        name = f"{row.case}, {row.shape}"
        cells = ["" if name == named else name, row.operation, f"{_ms(row.ours)} ({_spread(row.ours)})", _speed(row)]
        cells += [f"{_ms(row.limit)}, {row.limit_name}" if row.limit else row.limit_name or _NONE, _percent(row.ratio)]
        cells.append("" if row.target is None or machine.get("simulated") else f">= {row.target:.0%}{_met(row)}")
        table.append([*cells, *([_ms(row.peer)] if peer else [])])
        named = name
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [f"{machine_line(machine)}. Times are medians with the least and the most.", ""]
    if machine.get("simulated"):
        lines[:0] = ["This is the simulated GPU: its times mean nothing, and the table shows only that everything works."]
    for line in table:
        lines.append(f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |")
    return "\n".join(lines)


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine, its software and the date in one line."""
    parts = (
        machine["device"],
        f"{machine['processors']} CPUs",
        f"driver {machine['driver']}",
        f"PyTorch {machine['torch']}",
    )
    return ", ".join((*parts, machine["date"]))


def _digits(value: float) -> int:
    """How many decimal places of a number are meaningful."""
    return 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4


def _ms(seconds: Sequence[float]) -> str:
    """The median in milliseconds."""
    if not seconds:
        return _NONE
    value = statistics.median(seconds) * 1e3
    return f"{value:.{_digits(value)}f} ms"


def _spread(seconds: Sequence[float]) -> str:
    """The least and the most in milliseconds."""
    low, high = min(seconds) * 1e3, max(seconds) * 1e3
    digits = _digits(high)
    return f"{low:.{digits}f} - {high:.{digits}f}"


def _speed(row: Row) -> str:
    median = statistics.median(row.ours)
    return f"{row.bytes / median / _SPEED_UNIT:.1f}" if row.bytes and median else _NONE


def _percent(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.1%}"


def _met(row: Row) -> str:
    return {True: " ok", False: " NO", None: ""}[row.met]
