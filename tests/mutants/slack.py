"""Bugs of region(runs=) and of what shows slack."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/"
_TESTS = "tests/unit/python/engine/test_slack.py"

_SETTINGS = (
    Mutant(
        "a-region-forgets-its-runs",
        "torch_memory_saver/_torch/base/region_settings.py",
        "[(*options, follows)])",
        "[(*options[:4], True, follows)])",
        (
            "tests/unit/python/engine/test_options.py::test_a_region_and_a_capture_give_the_core_every_field",
            f"{_TESTS}::test_a_region_without_runs_has_no_slack",
        ),
    ),
    Mutant(
        "the-extension-turns-runs-around",
        "csrc/python/region_functions.c",
        "    settings->own_handles = !runs;",
        "    settings->own_handles = runs;",
        ("tests/unit/python/core/test_functions.py::test_regions_nest_and_belong_to_their_thread",),
    ),
)
_SHOWN = (
    Mutant(
        "slack-is-not-attributed",
        _SOURCES + "observe/_ledger/sources.py",
        "lines = [_managed_line(sources), *_lines_of_freed(sources), ",
        "lines = [_managed_line(sources), ",
        ("tests/unit/python/observe/ledger/test_ledger.py::test_slack_has_a_line_and_is_attributed",),
    ),
    Mutant(
        "a-warning-of-pytorchs-shortage-does-not-name-slack",
        _SOURCES + "observe/_out_of_memory/reporter.py",
        "limit_sentence(device, allowed), account.slack_sentence, *points",
        "limit_sentence(device, allowed), *points",
        ("tests/unit/python/observe/out_of_memory/test_reporter.py::test_the_observer_names_slack",),
    ),
    Mutant(
        "an-error-names-slack-twice",
        _SOURCES + "observe/_out_of_memory/reporter.py",
        "account.sentence), *points),)",
        "account.sentence), account.slack_sentence, *points),)",
        ("tests/unit/python/observe/out_of_memory/test_reporter.py::test_a_failed_resume_names_slack_once",),
    ),
    Mutant(
        "the-table-hides-slack",
        _SOURCES + "reports/usage.py",
        "        if not getattr(stats.total, name):",
        "        if not stats.total.damaged_bytes:",
        ("tests/unit/python/engine/test_stats.py::test_slack_has_a_column_where_there_is_any",),
    ),
)

MUTANTS = _SETTINGS + _SHOWN
