"""Bugs of the hooks around pauses and resumes, and of the NCCL hook."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_CALLS = "torch_memory_saver/_engine/calls/hook_calls.py"
_TURNS = "torch_memory_saver/_engine/calls/call_turns.py"
_PENDING_RESUMES = "torch_memory_saver/_engine/calls/pending.py"
_NCCL = "torch_memory_saver/nccl.py"
_COMMUNICATORS_FILE = "torch_memory_saver/_torch/distributed/nccl_communicators.py"
_TESTS = "tests/unit/python/engine/test_hooks.py"
_FAILURES = "tests/unit/python/engine/test_hooks_failures.py"
_PENDING = "tests/unit/python/engine/test_hooks_pending.py"
_INTERRUPTED = "tests/unit/python/engine/test_hooks_interrupted.py"
_THREADS = "tests/unit/python/engine/test_hooks_threads.py"
_NCCL_TESTS = "tests/unit/python/engine/test_nccl.py"
_NCCL_HANDLES = "tests/unit/python/engine/test_nccl_handles.py"

_ORDER = (
    Mutant(
        "after-callbacks-in-the-order-of-registration",
        _CALLS,
        "        while self._hooks:\n",
        "        self._hooks.reverse()\n        while self._hooks:\n",
        (_TESTS, _FAILURES),
    ),
    Mutant(
        "hooks-are-called-where-nothing-changes",
        _CALLS,
        "if row.state not in skipped and selects(tags, row.tag)",
        "if selects(tags, row.tag)",
        (_TESTS,),
    ),
    Mutant(
        "the-tags-of-a-hook-are-ignored",
        _CALLS,
        "mine = [row for row in rows if selects(names, row.tag)]",
        "mine = rows",
        (_TESTS,),
    ),
    Mutant(
        "a-hook-that-was-removed-during-the-call-is-called",
        _CALLS,
        "            if matched.hook.removed:\n                continue\n",
        "",
        (_TESTS,),
    ),
    Mutant(
        "results-of-callbacks-are-kept",
        _CALLS,
        "map(type, map(function, self._arguments))",
        "map(function, self._arguments)",
        (f"{_TESTS}::test_what_a_callback_returns_is_dropped", "preload:tests/gpu/test_hooks.py"),
    ),
    Mutant(
        "a-callback-may-pause",
        _CALLS,
        "if _thread.inside or _core.in_transition():",
        "if _core.in_transition():",
        (f"{_TESTS}::test_pause_and_resume_are_refused_inside",),
    ),
)

_FAILED = (
    Mutant(
        "a-before-callback-that-raised-is-cancelled",
        _CALLS,
        'return _Once("cancelled", self.hook.cancelled, error) if self.before.results else None',
        'return _Once("cancelled", self.hook.cancelled, error) if self.before.begun else None',
        (f"{_FAILURES}::test_a_before_callback_raises",),
    ),
    Mutant(
        "paused-memory-is-taken-for-a-cancelled-pause",
        _CALLS,
        "has_changed = error is None or not changed.isdisjoint(matched.addresses)",
        "has_changed = error is None",
        (f"{_FAILURES}::test_memory_that_is_damaged_has_been_paused",),
    ),
    Mutant(
        "a-late-interrupt-is-only-logged",
        _CALLS,
        "(isinstance(first, Exception) and not isinstance(raised, Exception))",
        "(isinstance(first, Exception) and raised is None)",
        (f"{_FAILURES}::test_what_ends_the_program_is_raised_in_place_of_an_ordinary_exception",),
    ),
    Mutant(
        "hooks-are-called-during-a-capture",
        "torch_memory_saver/_engine/preparation.py",
        'if has_inherited_memory() or _core.counters()["visible_captures"] or (torch is not None and must_not_free(torch)):',
        "if is_forked:",
        (f"{_FAILURES}::test_a_visible_capture_calls_no_hook",),
    ),
    Mutant(
        "hooks-are-called-in-a-forked-child",
        _CALLS,
        '_inherited_memory = _core.counters()["allocations"] > 0',
        "_inherited_memory = False",
        (f"{_THREADS}::test_the_child_of_a_process_with_memory_calls_no_hook",),
    ),
    Mutant(
        "hooks-are-called-while-another-thread-is-in-the-region",
        "torch_memory_saver/_engine/preparation.py",
        "    await_regions(pool_store, options.tags, options.deadline)\n",
        "",
        (f"{_FAILURES}::test_a_region_of_another_thread_calls_no_hook",),
    ),
)

_SEVERAL_THREADS = (
    Mutant(
        "calls-of-the-same-tags-do-not-wait",
        _TURNS,
        "if any(self._overlaps(other) for other in list(_running)):",
        "if False:",
        (f"{_THREADS}::test_ctrl_c_while_waiting_for_a_turn",),
    ),
    Mutant(
        "each-wait-calls-the-after-callbacks",
        _CALLS,
        "_core.move(self._hooks.uncalled, self.callbacks)",
        "self.callbacks += self._hooks.uncalled",
        (f"{_PENDING}::test_a_signal_while_the_callbacks_begin_leaves_no_thread_waiting",),
    ),
    Mutant(
        "a-resume-without-a-wait-loses-its-after-callbacks",
        _PENDING_RESUMES,
        "                pending._call_hooks()",
        "                pass",
        (f"{_PENDING}::test_the_next_call_of_its_tags_calls_what_no_wait_has_called",),
    ),
)

_SIGNALS = (
    Mutant(
        "an-interrupted-call-keeps-its-turn",
        _TURNS,
        "    _end = give_back\n",
        "",
        (f"{_INTERRUPTED}::test_an_interrupted_call_gives_its_turn_back_and_calls_what_follows",),
    ),
    Mutant(
        "a-signal-before-a-callback-counts-as-its-failure",
        _CALLS,
        "            if not once.begun:\n                raise\n",
        "",
        (f"{_INTERRUPTED}::test_an_interrupted_call_gives_its_turn_back_and_calls_what_follows",),
    ),
    Mutant(
        "an-interrupted-begin-of-a-resume-is-not-pending",
        _CALLS,
        "        if not self._begun:\n            super()._end()\n            return\n",
        "        if not self._begun or self._error is not None:\n            super()._end()\n            return\n",
        (
            f"{_INTERRUPTED}::test_a_resume_that_has_begun_is_pending_after_an_interruption",
            f"{_INTERRUPTED}::test_a_signal_just_after_a_resume_without_hooks_has_begun",
        ),
    ),
)

_COMMUNICATORS = (
    Mutant(
        "communicators-are-suspended-before-the-pause",
        _NCCL,
        'register_hook("pause", tag, "after", self._after_pause)',
        'register_hook("pause", tag, "before", self._after_pause)',
        (_NCCL_TESTS,),
    ),
    Mutant(
        "communicators-that-do-not-exist-are-suspended",
        _COMMUNICATORS_FILE,
        "return pointer is None or pointer() != 0",
        "return pointer is None or pointer() is not None",
        (_NCCL_TESTS,),
    ),
    Mutant(
        "an-old-nccl-is-asked",
        "torch_memory_saver/_torch/distributed/nccl_handles.py",
        "version >= _FIRST_NCCL",
        "version >= (2,)",
        (f"{_NCCL_TESTS}::test_an_old_nccl_is_not_asked",),
    ),
    Mutant(
        "a-communicator-that-failed-to-resume-is-forgotten",
        _NCCL,
        "            nccl_communicators.resume(communicator)\n            self._suspended.pop(name, None)\n",
        "            self._suspended.pop(name, None)\n            nccl_communicators.resume(communicator)\n",
        (f"{_NCCL_TESTS}::test_a_group_that_fails_to_resume",),
    ),
    Mutant(
        "a-suspension-is-recorded-after-the-call",
        _COMMUNICATORS_FILE,
        "        suspended[communicator.name] = communicator\n        _kept_bytes",
        "        _kept_bytes",
        (f"{_NCCL_TESTS}::test_a_signal_at_the_end_of_a_suspension",),
    ),
    Mutant(
        "a-communicator-that-its-owner-has-suspended-is-suspended-again",
        _COMMUNICATORS_FILE,
        "if statistics is None or statistics.suspended:",
        "if statistics is None:",
        (f"{_NCCL_HANDLES}::test_what_its_owner_suspends_is_left_alone",),
    ),
    Mutant(
        "a-communicator-that-its-owner-has-resumed-is-resumed-again",
        _COMMUNICATORS_FILE,
        "if statistics is not None and statistics.suspended:",
        "if statistics is not None:",
        (f"{_NCCL_HANDLES}::test_what_its_owner_has_resumed_is_not_resumed_again",),
    ),
    Mutant(
        "a-destroyed-communicator-keeps-the-others-from-being-resumed",
        "torch_memory_saver/_torch/distributed/nccl_handles.py",
        "        if result == _INVALID_ARGUMENT:\n            return None\n",
        "",
        (f"{_NCCL_HANDLES}::test_a_communicator_that_is_destroyed_meanwhile",),
    ),
    Mutant(
        "the-ledger-does-not-name-communicators-by-handle",
        _COMMUNICATORS_FILE,
        "[*communicators(None), *communicators(_handles)]",
        "communicators(None)",
        (f"{_NCCL_HANDLES}::test_an_old_library_beside_a_new_one",),
    ),
)

MUTANTS = _ORDER + _FAILED + _SEVERAL_THREADS + _SIGNALS + _COMMUNICATORS
