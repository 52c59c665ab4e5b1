"""Bugs in the benchmarks: what times are compared with."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        "the-ratio-is-that-of-the-medians",
        "benchmarks/results.py",
        'return statistics.median(limit / ours if ours else float("inf") for limit in self.limit for ours in self.ours)',
        "return statistics.median(self.limit) / (statistics.median(self.ours) or 1e-300)",
        ("tests/benchmarks/test_results.py::test_two_equal_sides_at_two_speeds_are_equal",),
    ),
)
