"""Bugs in releases of cached memory, in what environment variables start, and in memory logs."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_SOURCES = "torch_memory_saver/"
_TESTS = "tests/unit/python/observe/memory/"
_RELEASE = _TESTS + "test_release.py::"
_LOG = _TESTS + "test_log.py::"

_RELEASES = (
    Mutant(
        "a-release-during-a-capture-elsewhere",
        _SOURCES + "observe/memory/release.py",
        'torch.is_capturing() or bool(_core.counters()["visible_captures"])',
        "torch.is_capturing()",
        (_RELEASE + "test_a_visible_capture_puts_it_off", "torch:tests/gpu/test_memory_release.py"),
    ),
    Mutant(
        "captures-begin-during-a-release",
        _SOURCES + "observe/memory/release.py",
        "            with capture_gate.held():\n",
        "            with contextlib.nullcontext():\n",
        (_RELEASE + "test_a_capture_cannot_begin_while_garbage_is_collected_and_caches_emptied",),
    ),
    Mutant(
        "garbage-is-collected-where-captures-may-begin",
        _SOURCES + "observe/memory/release.py",
        "            with capture_gate.held():\n",
        "            gc.collect()\n            with capture_gate.held():\n",
        (_RELEASE + "test_a_capture_cannot_begin_while_garbage_is_collected_and_caches_emptied",),
    ),
    Mutant(
        "a-capture-leaves-the-gate-before-it-is-visible",
        _SOURCES + "_torch/binding/captures.py",
        "        _core.within(capture_gate.held(), self._report)",
        "        self._report()",
        ("tests/unit/python/torch/test_captures.py::test_a_capture_passes_the_gate_until_it_is_visible",),
    ),
    Mutant(
        "the-cool-down-is-forgotten",
        _SOURCES + "observe/memory/release.py",
        "        self._last = self._clock()\n",
        "        self._last, now = None, self._clock()\n        self._last = now - options.cool_down\n",
        (_RELEASE + "test_the_cool_down",),
    ),
    Mutant(
        "a-release-is-not-repeated",
        _SOURCES + "observe/memory/release.py",
        "if options.repeat_bytes is None or held",
        "if True or held",
        (_RELEASE + "test_a_release_is_repeated_while_it_frees_enough",),
    ),
    Mutant(
        "an-inner-context-releases",
        _SOURCES + "observe/memory/release.py",
        "        if _depth.get() == 0:\n",
        "        if True:\n",
        (_RELEASE + "test_nested_ones_release_once_at_the_outermost_end",),
    ),
    Mutant(
        "paused-memory-counts-as-physical",
        _SOURCES + "_torch/memory/ordinary_memory.py",
        "        return self.reserved - self.paused\n",
        "        return self.reserved\n",
        (
            "torch:tests/gpu/test_memory_release.py::test_paused_memory_that_is_freed_was_no_physical_memory",
            "torch:tests/gpu/test_memory_log.py::test_a_pause_lowers_what_is_physical_and_not_torchs_counters",
        ),
    ),
)
_ENVIRONMENT = (
    Mutant(
        "a-release-that-was-put-off-waits-for-the-next-period",
        _SOURCES + "observe/memory/release.py",
        'if _release() == "capture" else None',
        'if _release() == "captures" else None',
        (_TESTS + "test_release_from_environment.py::test_a_release_that_a_capture_put_off_is_tried_again_soon",),
    ),
    Mutant(
        "periodic-work-ends-with-its-first-failure",
        _SOURCES + "_engine/background.py",
        '        logger.warning("%s failed", name, exc_info=True)\n        return None\n',
        '        logger.warning("%s failed", name, exc_info=True)\n        raise\n',
        (_TESTS + "test_release_from_environment.py::test_a_failure_is_logged_and_the_work_goes_on",),
    ),
    Mutant(
        "periodic-work-ends-with-a-fork",
        _SOURCES + "_engine/background.py",
        "        periodic.restart()\n",
        "        pass\n",
        (_LOG + "test_a_log_in_a_forked_child",),
    ),
)
_LOGS = (
    Mutant(
        "another-process-with-this-number-is-taken-for-this-one",
        _SOURCES + "observe/_nvml.py",
        " and process.bytes is not None and process.bytes >= known:",
        " and process.bytes is not None:",
        (_TESTS + "test_nvml.py::test_a_hidden_share",),
    ),
    Mutant(
        "every-append-writes-a-header",
        _SOURCES + "observe/memory/log.py",
        "        if os.fstat(file.fileno()).st_size == 0:\n",
        "        if os.fstat(file.fileno()).st_size >= 0:\n",
        (_LOG + "test_several_processes_append_to_one_file",),
    ),
    Mutant(
        "a-failed-row-ends-the-call",
        _SOURCES + "observe/memory/log.py",
        '            logger.warning("no row of the memory log %s: it could not be taken", label, exc_info=True)\n',
        "            raise\n",
        (_LOG + "test_a_row_that_cannot_be_taken_does_not_end_the_call",),
    ),
    Mutant(
        "the-first-device-is-every-device-of-nvml",
        "csrc/simulator/devices/budget.c",
        "if (sim_state.visible[device] != machine_index || !(own->used || own->contexts)) continue;",
        "if (!(own->used || own->contexts)) continue;",
        ("tests/unit/simulator/test_management.c",),
    ),
)

MUTANTS = (*_RELEASES, *_ENVIRONMENT, *_LOGS)
