"""Bugs of calls that follow a region on a thread pool."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_TESTS = "tests/unit/python/torch/test_following.py::"
_FOLLOWING = "torch_memory_saver/_engine/thread_pools.py"
_POOLS = "torch_memory_saver/_torch/memory/store.py"
_ADMISSION = "torch_memory_saver/_torch/routing/admission.py"

MUTANTS = (
    Mutant(
        "a-pause-leaves-a-running-call-routed",
        "torch_memory_saver/_torch/routing/regions.py",
        "        for frame in frames:\n            self.router.end(frame)\n",
        "",
        (_TESTS + "test_a_pause_takes_a_running_call_out",),
    ),
    Mutant(
        "a-call-that-was-taken-out-is-routed-again",
        "torch_memory_saver/_torch/routing/router.py",
        "    if frame.routed or frame.ended:",
        "    if frame.routed:",
        (_TESTS + "test_a_call_that_was_taken_out_stays_out",),
    ),
    Mutant(
        "a-pause-leaves-the-settings-of-a-call",
        "torch_memory_saver/_torch/routing/regions.py",
        "            _core.region_end_following(tag)\n",
        "            pass\n",
        (_TESTS + "test_the_settings_of_the_core_end_too",),
    ),
    Mutant(
        "the-thread-that-pauses-loses-its-own-region",
        "csrc/core/model/region.c",
        "stack->ended_from[index] = now + 1;",
        "stack->ended_from[index] = now;",
        ("tests/unit/core/model/test_region.c",),
    ),
    Mutant(
        "a-call-waits-for-a-pause",
        _ADMISSION,
        "        elif self._must_wait(frame):\n            raise",
        "        elif False:\n            raise",
        (_TESTS + "test_a_call_that_begins_during_a_pause_allocates_ordinary_memory",),
    ),
    Mutant(
        "any-number-of-calls-is-in-a-region",
        _ADMISSION,
        "            if self._is_crowded(frame.origin):\n                return False\n",
        "",
        (_TESTS + "test_few_calls_are_in_the_region_at_a_time",),
    ),
    Mutant(
        "every-call-waits-in-vain",
        _ADMISSION,
        "            origin.wait_timed_out = True",
        "            pass",
        (_TESTS + "test_calls_that_wait_for_one_another_are_in_the_region_at_once",),
    ),
    Mutant(
        "a-worker-takes-what-the-caller-has-idle",
        _POOLS,
        "        frame.has_threads = True\n        try:\n            if frame.managed and",
        "        frame.has_threads = True\n        try:\n            if False and",
        (_TESTS + "test_idle_memory_is_returned_once_before_the_first_call",),
    ),
    Mutant(
        "a-failed-entry-fails-the-call",
        _FOLLOWING,
        '            _warn("allocates ordinary memory", self._function, error)\n            return False',
        "            raise",
        (_TESTS + "test_a_call_whose_region_cannot_be_entered_runs_as_ordinary",),
    ),
)
