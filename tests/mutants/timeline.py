"""Bugs of the timeline, and of what pages share."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/"
_TIMELINE = _SOURCES + "observe/events/timeline/"
_HTML = _SOURCES + "observe/_html/"
_TESTS = "tests/unit/python/observe/events/timeline/"
_TEXT = _TESTS + "test_timeline_page.py::test_text_of_a_file_is_never_markup"
_COMPARISON = "tests/unit/python/observe/memory/test_comparison_page.py::"

MUTANTS = (
    Mutant(
        "gpus-are-matched-by-their-ordinals",
        _TIMELINE + "merge.py",
        "members.setdefault(device.uuid or (process, ordinal), {})",
        "members.setdefault(ordinal, {})",
        (
            _TESTS + "test_merge.py::test_processes_on_one_gpu_are_one_gpu",
            _TESTS + "test_merge.py::test_a_device_without_a_uuid_is_shared_with_nobody",
        ),
    ),
    Mutant(
        "machines-are-told-apart-by-their-names",
        _TIMELINE + "merge.py",
        "groups.setdefault(log.boot_id or number, [])",
        "groups.setdefault(log.host, [])",
        (
            _TESTS + "test_merge.py::test_machines_are_apart",
            _TESTS + "test_merge.py::test_containers_of_one_machine_are_together",
        ),
    ),
    Mutant(
        "other-includes-what-the-processes-hold",
        _TIMELINE + "merge.py",
        "max(sample.total_bytes - sample.free_bytes - resident, 0)",
        "sample.total_bytes - sample.free_bytes",
        (_TESTS + "test_merge.py::test_other_is_what_is_used_less_what_the_processes_hold",),
    ),
    Mutant(
        "other-stays-where-memory-has-been-taken",
        _TIMELINE + "merge.py",
        "if known and other > max(total - resident, 0):",
        "if known and other > total:",
        (_TESTS + "test_merge.py::test_other_never_needs_more_than_the_device_has",),
    ),
    Mutant(
        "a-wrapped-ring-begins-with-the-call-of-its-first-event",
        _SOURCES + "observe/events/log.py",
        "            return self.events[0].ended_ns\n",
        "            return self.events[0].began_ns\n",
        (_TESTS + "test_levels.py::test_a_wrapped_ring_begins_when_its_first_event_was_recorded",),
    ),
    Mutant(
        "a-process-that-has-exited-holds-memory",
        _TIMELINE + "levels.py",
        "    if log.exited:\n",
        "    if not log.exited and log.capacity == 0:\n",
        (
            _TESTS + "test_levels.py::test_nothing_is_held_after_the_exit",
            _TESTS + "test_timeline_page.py::test_the_data_of_two_processes",
        ),
    ),
    Mutant(
        "the-exit-is-not-written",
        _SOURCES + "observe/events/from_environment.py",
        "if recorded == (0 if exits else self._recorded):",
        "if recorded == self._recorded:",
        ("tests/unit/python/observe/events/test_from_environment.py::test_the_last_file_says_that_nothing_follows",),
    ),
    Mutant(
        "a-reduced-timeline-loses-its-peaks",
        _TIMELINE + "html/document.py",
        "if stack not in best or total > best[stack][0]:",
        "if stack not in best:",
        (
            _TESTS + "test_reduce.py::test_the_highest_levels_stay_where_they_are",
            _TESTS + "test_reduce.py::test_a_burst_keeps_its_highest_level",
        ),
    ),
    Mutant(
        "a-reduced-timeline-separates-one-time",
        _TIMELINE + "html/document.py",
        "            rows[stop][0] == rows[stop - 1][0]\n            or ",
        "            ",
        (_TESTS + "test_reduce.py::test_changes_of_one_time_are_one_moment",),
    ),
    Mutant(
        "a-process-number-is-a-process",
        _TIMELINE + "merge.py",
        "    return events[0] == events[1] != ()\n",
        "    return True\n",
        (_TESTS + "test_merge.py::test_files_of_one_process",),
    ),
    Mutant(
        "text-ends-the-data-of-a-page",
        _HTML + "document.py",
        'encoded.replace("<", "\\\\u003c")',
        "encoded",
        (_TEXT, _COMPARISON + "test_text_of_a_snapshot_is_never_markup"),
    ),
    Mutant(
        "the-table-on-a-page-is-markup",
        _HTML + "document.py",
        "html.escape(text)",
        "text",
        (_TEXT, _COMPARISON + "test_text_of_a_snapshot_is_never_markup"),
    ),
    Mutant(
        "any-script-may-run-on-a-page",
        _HTML + "document.py",
        "script-src {_hash(script)}",
        "script-src 'unsafe-inline'",
        (_TESTS + "test_timeline_page.py::test_the_page_stands_alone", _COMPARISON + "test_the_page_stands_alone"),
    ),
)
