"""Bugs of the out-of-memory reports."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/observe/_out_of_memory/"
_FOLDER = "tests/unit/python/observe/out_of_memory/test_folder.py::"
_REPORTER = "tests/unit/python/observe/out_of_memory/test_reporter.py::"
_OBSERVER = "tests/unit/python/observe/out_of_memory/test_observer.py::"
_CONTENT = "tests/unit/python/observe/out_of_memory/test_content.py::"
_STACKS = "tests/unit/python/observe/out_of_memory/test_stacks.py::"
_ADVICE = "tests/unit/python/observe/out_of_memory/test_advice.py::"

MUTANTS = (
    Mutant(
        "the-first-report-of-a-process-is-removed",
        _SOURCES + "folder.py",
        "self._own.pop(1)",
        "self._own.pop(0)",
        (_FOLDER + "test_a_process_keeps_its_first_report_and_its_latest",),
    ),
    Mutant(
        "a-folder-keeps-its-first-reports",
        _SOURCES + "folder.py",
        "for name in sorted(found)[:",
        "for name in sorted(found, reverse=True)[:",
        (_FOLDER + "test_a_folder_keeps_the_latest_reports_of_all_processes",),
    ),
    Mutant(
        "everybody-can-read-a-report",
        _SOURCES + "folder.py",
        '"the report was")',
        '"the report was", mode=0o644)',
        (_FOLDER + "test_only_this_user_can_read_them_whatever_the_umask",),
    ),
    Mutant(
        "an-error-inside-of-a-report-is-reported",
        _SOURCES + "reporter.py",
        "        if self._thread.inside:\n            return\n",
        "",
        (_REPORTER + "test_an_error_inside_of_a_report_makes_no_other",),
    ),
    Mutant(
        "a-report-that-fails-replaces-the-error",
        _SOURCES + "reporter.py",
        "        except Exception:\n            with",
        "        except ZeroDivisionError:\n            with",
        (_REPORTER + "test_nothing_is_raised_and_the_error_is_as_it_was",),
    ),
    Mutant(
        "the-observer-is-attached-twice",
        _SOURCES + "reporter.py",
        "    _observed.append(torch)\n",
        "",
        (_OBSERVER + "test_the_observer_is_attached_once_when_cuda_is_initialised",),
    ),
    Mutant(
        "each-wait-makes-a-report",
        "torch_memory_saver/_engine/calls/pending.py",
        "if next(self._failures) == 0:",
        "if next(self._failures) >= 0:",
        ("torch:tests/gpu/test_oom_report.py::test_a_resume_in_the_background_makes_one_however_often_it_is_awaited",),
    ),
    Mutant(
        "an-attempt-that-is-repeated-is-reported",
        "torch_memory_saver/_torch/memory/resume_preparation.py",
        "    except OutOfMemoryError as error:\n        failure = error\n    more",
        "    except OutOfMemoryError as error:\n        failure = error\n"
        "        from torch_memory_saver._engine import implementation\n\n"
        "        implementation.reporter.explain(error, tags)\n    more",
        (_REPORTER + "test_a_resume_that_succeeds_after_the_cache_is_emptied_makes_none",),
    ),
    Mutant(
        "the-latest-events-have-the-levels-of-all",
        _SOURCES + "content.py",
        "before=levels_before(log.after, kept)",
        "before=log.before",
        (_CONTENT + "test_the_latest_events_have_true_levels",),
    ),
    Mutant(
        "paused-memory-is-a-large-holder",
        _SOURCES + "content.py",
        "for block in () if segment.paused else segment.blocks:",
        "for block in segment.blocks:",
        (_STACKS + "test_what_is_paused_holds_no_memory",),
    ),
    Mutant(
        "a-report-starts-addr2line",
        _SOURCES + "content.py",
        "    if may_have_native_frames(torch.torch):\n",
        "    if False:\n",
        (_STACKS + "test_names_of_native_frames_are_not_looked_up",),
    ),
    Mutant(
        "a-ledger-starts-addr2line",
        "torch_memory_saver/_torch/memory/ordinary_memory.py",
        "    if may_have_native_frames(torch.torch):\n",
        "    if False:\n",
        (_STACKS + "test_names_of_native_frames_are_not_looked_up",),
    ),
    Mutant(
        "a-resume-is-told-to-pause-what-it-resumes",
        _SOURCES + "account.py",
        "if part.bytes and part.name not in (failure.tags or ())]",
        "if part.bytes]",
        (_ADVICE + "test_managed_memory_holds_most",),
    ),
)
