"""Bugs in the benchmarks: what times are compared with."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/_bench/"
_TESTS = "tests/unit/python/bench/"

MUTANTS = (
    Mutant(
        "the-last-large-handle-is-a-whole-one",
        _SOURCES + "bare_driver.c",
        "return i + 1 == bare.count ? bare.last_bytes : bare.bytes;",
        "return bare.bytes;",
        (_TESTS + "test_yardstick.py::test_few_large_handles_for_as_many_bytes",),
    ),
    Mutant(
        "the-c-package-is-compared-with-our-limit",
        _SOURCES + "figures.py",
        "            limit=row.peer,\n",
        "            limit=row.limit,\n",
        (_TESTS + "test_figures.py::test_the_c_package_is_compared_where_a_case_asks",),
    ),
    Mutant(
        "parity-of-later-pauses-is-that-of-the-first",
        _SOURCES + "cases.py",
        '_PARITY |= {(case, "pause"): 0.96 for case in ("pooled", "retained")}\n',
        "",
        (_TESTS + "test_figures.py::test_parity_is_asked_by_case_and_operation",),
    ),
)
