"""Bugs of compact(), of its hooks, and of what shows slack."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/"
_COMPACTING = _SOURCES + "_saver/compacting.py"
_CALLS = _SOURCES + "_saver/hook_calls.py"
_TESTS = "tests/unit/python/saver/test_compact.py"
_HOOKS = "tests/unit/python/saver/test_compact_hooks.py"

_CALL = (
    Mutant(
        "cached-segments-do-not-become-slack-before-the-hooks",
        _COMPACTING,
        "        with self._prepared(layer.in_use()):\n            pass",
        "        if True:\n            pass",
        (f"{_TESTS}::test_hooks_are_called_for_what_torch_only_caches",),
    ),
    Mutant(
        "a-compaction-copies-only-memory-with-a-backup",
        _COMPACTING,
        "every_backup=True",
        "every_backup=False",
        (f"{_TESTS}::test_free_blocks_are_not_copied_unless_requested",),
    ),
    Mutant(
        "memory-that-a-compaction-left-paused-is-handed-out",
        _COMPACTING,
        "                    leave_paused_pools()",
        "                    pass",
        (f"{_TESTS}::test_the_second_half_fails",),
    ),
    Mutant(
        "receivers-of-tags-without-slack-matter",
        _COMPACTING,
        "tags=tuple({tag for tag, _ in slack_by_place(options.tags)})",
        "tags=options.tags",
        (f"{_TESTS}::test_memory_that_others_may_still_use",),
    ),
    Mutant(
        "a-compaction-that-runs-out-is-not-explained",
        _COMPACTING,
        "            reporter.explain(error, options.tags)\n",
        "            pass\n",
        ("tests/unit/python/out_of_memory/test_reporter.py::test_a_compaction_that_runs_out_is_reported",),
    ),
)
_OF_HOOKS = (
    Mutant(
        "all-memory-of-a-compaction-concerns-hooks",
        _CALLS,
        "    return [row for row in rows if (row.tag, row.device) in with_slack]",
        "    return rows if with_slack else []",
        (f"{_HOOKS}::test_slack_of_one_device_does_not_concern_another",),
    ),
    Mutant(
        "hooks-of-resumes-are-not-called-by-a-compaction",
        _CALLS,
        '    "compact": {"pause": _PAUSED, "resume": frozenset()},',
        '    "compact": {"pause": _PAUSED},',
        (_HOOKS,),
    ),
    Mutant(
        "a-compaction-that-changed-nothing-has-resumed",
        _CALLS,
        '    "compact": {"pause": _PAUSED, "resume": frozenset()},',
        '    "compact": {"pause": _PAUSED, "resume": frozenset({_core.STATE_ACTIVE})},',
        (f"{_HOOKS}::test_every_driver_call_fails", f"{_HOOKS}::test_the_second_half_fails"),
    ),
    Mutant(
        "a-compaction-suspends-nccl",
        _SOURCES + "nccl.py",
        "        if call.operation != _COMPACT:\n            self.suspend()",
        "        self.suspend()",
        ("tests/unit/python/saver/test_nccl.py::test_a_compaction_suspends_nothing",),
    ),
)
_SETTINGS = (
    Mutant(
        "a-region-forgets-its-runs",
        _SOURCES + "_saver/native.py",
        "        host_policy=options.host_policy,\n        runs=options.runs,\n    )\n\n\ndef begin_capture",
        "        host_policy=options.host_policy,\n    )\n\n\ndef begin_capture",
        ("tests/unit/python/saver/test_options.py::test_the_core_gets_every_field", f"{_TESTS}"),
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
        "slack-of-other-tags-is-counted",
        _SOURCES + "_saver/slack.py",
        " and row.slack_bytes and selects(tags, row.tag)",
        " and row.slack_bytes",
        (f"{_TESTS}::test_only_the_tags_of_the_call",),
    ),
    Mutant(
        "slack-is-not-attributed",
        _SOURCES + "_saver/ledger.py",
        "lines = [_managed_line(sources), *_slack_lines(sources), ",
        "lines = [_managed_line(sources), ",
        ("tests/unit/python/saver/test_ledger.py::test_slack_has_a_line_and_is_attributed",),
    ),
    Mutant(
        "a-warning-of-pytorchs-shortage-does-not-name-slack",
        _SOURCES + "_out_of_memory/reporter.py",
        "use, names_slack=True)",
        "use)",
        ("tests/unit/python/out_of_memory/test_reporter.py::test_the_observer_names_slack",),
    ),
    Mutant(
        "an-error-names-slack-twice",
        _SOURCES + "_out_of_memory/reporter.py",
        'account.slack_sentence if names_slack else ""',
        "account.slack_sentence",
        ("tests/unit/python/out_of_memory/test_reporter.py::test_a_failed_resume_names_slack_once",),
    ),
    Mutant(
        "the-table-hides-slack",
        _SOURCES + "_saver/usage_table.py",
        "        if not getattr(stats.total, name):",
        "        if not stats.total.damaged_bytes:",
        ("tests/unit/python/saver/test_stats.py::test_slack_has_a_column_where_there_is_any",),
    ),
)

MUTANTS = _CALL + _OF_HOOKS + _SETTINGS + _SHOWN
