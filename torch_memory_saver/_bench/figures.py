"""Results: repeated times, the limit that they are compared with, their ratio, and whether the ratio meets its target.

Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = [
    "AT_LEAST",
    "AT_MOST",
    "GAIN",
    "MEMORY",
    "PARITY",
    "PEER",
    "Row",
    "Samples",
    "Target",
    "merge",
    "parity_rows",
    "peer_rows",
    "row_from_json",
]

#: What a ratio means. AT_LEAST: the limit's time divided by ours, which is our speed as a part of the limit's. AT_MOST: our
#: time divided by the limit's. GAIN: how many times faster we are than the limit, which is another way to do the same work.
#: MEMORY: not a ratio, but the bytes that we use beyond the limit.
AT_LEAST, AT_MOST, GAIN, MEMORY = "at least", "at most", "gain", "memory"
#: The suffix of an operation that is compared with the same operation of another shape.
PARITY = " parity"
#: The suffix of an operation that is compared with the C++ package's.
PEER = " C++"
_KINDS = (AT_LEAST, AT_MOST, GAIN, MEMORY)


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity in one unit, in the order in which they were made.

    Raises:
        ValueError: There is no measurement, or one is negative.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 0:
            raise ValueError(f"measurements must be one or more non-negative numbers, not {self.values!r}")

    @classmethod
    def of(cls, values: Iterable[float]) -> Samples:
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest measurement."""
        return min(self.values), max(self.values)

    def as_json(self) -> dict[str, Any]:
        low, high = self.spread
        return {"median": self.median, "min": low, "max": high, "values": list(self.values)}


@dataclass(frozen=True)
class Target:
    """What a ratio has to be; the kinds are explained above. `value` None: the ratio is reported only."""

    kind: str = AT_LEAST
    value: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"the kind of a target must be one of {', '.join(_KINDS)}, not {self.kind!r}")

    def ratio(self, ours: Samples, limit: Samples) -> float:
        """The median of the ratios of all pairs of our measurements and the limit's. For MEMORY, the bytes by which our
        median exceeds the limit's.

        The ratio of the medians would be less stable. A virtual machine may make the same calls at two speeds. A median then
        falls on one of the two by chance, and two equal sides would differ as much as the speeds do. The median over all
        pairs is the estimator of Hodges and Lehmann (1963, doi:10.1214/aoms/1177704172), of logarithms.
        """
        if self.kind == MEMORY:
            return ours.median - limit.median
        above, below = (ours, limit) if self.kind == AT_MOST else (limit, ours)
        # A time of 0, of work that is shorter than a tick of the clock, makes the ratio infinite.
        return statistics.median(a / b if b else float("inf") for a in above.values for b in below.values)

    def is_met(self, ratio: float) -> bool | None:
        """Whether the ratio meets the target; None without a target."""
        if self.value is None:
            return None
        return ratio <= self.value if self.kind in (AT_MOST, MEMORY) else ratio >= self.value


@dataclass(frozen=True)
class Row:
    """One operation of one case.

    Attributes:
        case: The name of the case, as in `--cases`.
        shape: Number and size of the allocations, such as "32 x 512 MiB".
        operation: Such as "pause".
        bytes: How many bytes the operation handles, from which the speed follows; 0 if a speed would mean nothing.
        ours: Our times. For a target of kind MEMORY: bytes.
        limit: The limit in the same unit; None if none could be measured.
        limit_name: What the limit is.
        target: What the ratio has to be.
        peer: The times of the C++ package.
        notes: Remarks for the JSON file.
    """

    case: str
    shape: str
    operation: str
    bytes: int
    ours: Samples | None
    limit: Samples | None = None
    limit_name: str = ""
    target: Target = field(default_factory=Target)
    peer: Samples | None = None
    notes: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.shape, self.operation

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or self.limit is None else self.target.ratio(self.ours, self.limit)

    @property
    def peer_ratio(self) -> float | None:
        return None if self.peer is None or self.limit is None else self.target.ratio(self.peer, self.limit)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target or without a ratio."""
        return None if self.ratio is None else self.target.is_met(self.ratio)

    def speed(self, samples: Samples | None) -> float | None:
        """Bytes per second at the median; None if a speed would mean nothing."""
        if samples is None or not self.bytes or self.target.kind == MEMORY or not samples.median:
            return None
        return self.bytes / samples.median

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "shape": self.shape,
            "operation": self.operation,
            "bytes": self.bytes,
            "unit": "bytes" if self.target.kind == MEMORY else "seconds",
            "ours": _json(self.ours),
            "bytes_per_second": self.speed(self.ours),
            "limit": _json(self.limit),
            "limit_name": self.limit_name,
            "ratio": self.ratio,
            "target": asdict(self.target),
            "met": self.met,
            "peer": _json(self.peer),
            "peer_ratio": self.peer_ratio,
            "notes": self.notes,
        }


def _json(samples: Samples | None) -> dict[str, Any] | None:
    return None if samples is None else samples.as_json()


def row_from_json(data: dict[str, Any]) -> Row:
    """The row that `as_json` turned into `data`."""

    def samples(name: str) -> Samples | None:
        return None if data[name] is None else Samples.of(data[name]["values"])

    fixed = {name: data[name] for name in ("case", "shape", "operation", "bytes", "limit_name", "notes")}
    return Row(**fixed, ours=samples("ours"), limit=samples("limit"), peer=samples("peer"), target=Target(**data["target"]))


def merge(rows: Iterable[Row]) -> list[Row]:
    """One row for each key, in the order of first appearance, with the samples of all rows of that key in their order."""
    merged: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        before = merged.get(row.key)
        if before is None:
            merged[row.key] = row
            continue
        # A row of the peer has neither a limit nor a target.
        described = row if before.ours is None else before
        merged[row.key] = replace(
            described,
            ours=_join(before.ours, row.ours),
            limit=_join(before.limit, row.limit),
            peer=_join(before.peer, row.peer),
        )
    return list(merged.values())


def _join(first: Samples | None, second: Samples | None) -> Samples | None:
    if first is None or second is None:
        return first or second
    return Samples(first.values + second.values)


def parity_rows(rows: Sequence[Row], targets: Mapping[tuple[str, str], float], shape: str, like: str) -> list[Row]:
    """Rows that compare `shape` with `like` byte for byte.

    Args:
        targets: The least speed of `shape`, as a part of that of `like`, by case and operation. Others are not compared.
    """
    found = {row.key: row for row in rows}
    result = []
    for row in rows:
        other, at_least = found.get((row.case, like, row.operation)), targets.get((row.case, row.operation))
        if row.shape != shape or other is None or at_least is None or row.ours is None or other.ours is None:
            continue
        by = row.bytes / other.bytes
        result.append(
            replace(
                row,
                operation=f"{row.operation}{PARITY}",
                limit=Samples.of(seconds * by for seconds in other.ours.values),
                limit_name=", ".join(filter(None, (like, "byte for byte", row.notes))),
                target=Target(AT_LEAST, at_least),
                peer=None,
            )
        )
    return result


def peer_rows(rows: Sequence[Row], targets: Mapping[tuple[str, str], float]) -> list[Row]:
    """Rows that compare our times with the C++ package's in the same run, where there are any.

    Args:
        targets: How many times as fast as the package we have to be, by case and operation. Others are not compared.
    """
    return [
        replace(
            row,
            operation=f"{row.operation}{PEER}",
            limit=row.peer,
            limit_name="the C++ package",
            target=Target(GAIN, targets[row.case, row.operation]),
            peer=None,
            notes="",
        )
        for row in rows
        if (row.case, row.operation) in targets and row.ours is not None and row.peer is not None
    ]
