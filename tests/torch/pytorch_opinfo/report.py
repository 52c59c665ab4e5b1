"""Counts the results of a run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

__all__ = ["causes", "equal_share", "failures", "table"]

Outcome = dict[str, Any]

EQUAL, NOTHING, NOT_ON_CUDA = "equal", "nothing to check", "not on CUDA"
_CHECKS = ("forward", "backward", "inplace", "out", "noncontiguous", "errors")


def failures(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes of the checks where the simulated GPU differs from the CPU."""
    return [each for each in outcomes if each["outcome"] not in (EQUAL, NOTHING, NOT_ON_CUDA)]


def _entries(outcomes: list[Outcome]) -> dict[tuple[str, str, str], str]:
    """The combined outcome for each kind, entry and type. Any difference in a check makes it different."""
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for each in outcomes:
        found[each["kind"], each["entry"], each["dtype"]].add(each["outcome"])
    return {entry: _together(of_checks) for entry, of_checks in found.items()}


def _together(of_checks: set[str]) -> str:
    if of_checks - {EQUAL, NOTHING, NOT_ON_CUDA}:
        return "different"
    return EQUAL if EQUAL in of_checks else NOT_ON_CUDA if NOT_ON_CUDA in of_checks else NOTHING


def equal_share(outcomes: list[Outcome]) -> float:
    """The fraction (0 to 1) of pairs of entry and type that are equal in every check, among the pairs that CUDA supports."""
    counts = Counter(_entries(outcomes).values())
    compared = counts[EQUAL] + counts["different"]
    return counts[EQUAL] / compared if compared else 1.0


def table(outcomes: list[Outcome]) -> str:
    """Two Markdown tables, the outcomes by kind of entry and by check, and the share that is equal."""
    rows: list[tuple[str, ...]] = [("entries, each with each type", EQUAL, "different", NOT_ON_CUDA)]
    entries = _entries(outcomes)
    for kind in ("operator", "foreach", "module", "optimizer"):
        rows.append(_row(kind, Counter(result for entry, result in entries.items() if entry[0] == kind)))
    rows.append(_row("all", Counter(entries.values())))
    checks: list[tuple[str, ...]] = [("check", EQUAL, "different", NOT_ON_CUDA)]
    for check in _CHECKS:
        checks.append(_row(check, Counter(_together({each["outcome"]}) for each in outcomes if each["check"] == check)))
    return f"{_lines(rows)}\n\n{_lines(checks)}\n\nequal: {100 * equal_share(outcomes):.1f} % of those that CUDA has"


def _row(name: str, counts: Counter[str]) -> tuple[str, ...]:
    return (name, *(str(counts[each]) for each in (EQUAL, "different", NOT_ON_CUDA)))


def _lines(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- | ---: | ---: | ---: |", *lines[1:]])


def causes(outcomes: list[Outcome]) -> str:
    """The failures grouped by cause, the most frequent first, each with its entries. Numbers in causes are ignored."""
    found: dict[str, list[str]] = defaultdict(list)
    for each in failures(outcomes):
        cause = re.sub(r"-?\d+(\.\d+)?(e[+-]\d+)?", "#", each["cause"])[:110]
        found[f"{each['outcome']}: {cause}"].append(f"{each['entry']} {each['dtype']} {each['check']}")
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return "\n".join(f"{len(names)}  {cause}\n    " + "\n    ".join(names) for cause, names in ordered)
