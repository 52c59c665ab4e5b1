"""Bugs of the event ring and of its exports, of NVTX ranges and of snapshots."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_RING = "tests/unit/base/test_events.c"
_COPY = "tests/unit/core/model/test_account.c"
_PHASES = "tests/unit/core/transition/test_phases.c"
_NVTX = "tests/unit/base/test_nvtx.c"
_RANGES = "tests/unit/core/transition/test_nvtx_ranges.c"

_SOURCES = "torch_memory_saver/"
_PYTHON = "tests/unit/python/observe/events/"

MUTANTS = (
    Mutant(
        "a-wrapped-ring-begins-at-its-first-slot",
        "csrc/base/events.c",
        "    size_t first = (size_t)((events->recorded - count) % events->capacity);",
        "    size_t first = 0;",
        (_RING,),
    ),
    Mutant(
        "a-forked-child-keeps-its-parents-events",
        "csrc/base/events.c",
        "    events->recorded = events->calls = 0;",
        "    events->calls = 0;",
        (_RING,),
    ),
    Mutant(
        "a-free-is-told-before-the-pause-that-it-waited-for",
        "csrc/core/transition/completion.c",
        "        tms_account_record_moves(&moves);\n        tms_saver_unpublish(t->saver, segment);",
        "        tms_saver_unpublish(t->saver, segment);",
        (_PHASES,),
    ),
    Mutant(
        "damaged-memory-is-told-as-gone",
        "csrc/core/model/account.c",
        "    else if (tms_segment_is_mapped(segment))",
        "    else if (state == TMS_SEGMENT_ACTIVE)",
        (_COPY, _PHASES),
    ),
    Mutant(
        "backups-are-not-told",
        "csrc/core/model/account.c",
        "    if (state == TMS_SEGMENT_ACTIVE || state == TMS_SEGMENT_PAUSED)",
        "    if (state == TMS_SEGMENT_PAUSED)",
        (_COPY,),
    ),
    Mutant(
        "samples-are-taken-without-being-asked-for",
        "csrc/base/events.h",
        "    return atomic_load_explicit(&events->samples, memory_order_relaxed);",
        "    return events->capacity > 0;",
        (_PHASES,),
    ),
    Mutant(
        "a-failed-allocation-is-no-event",
        "csrc/core/allocation/allocation.c",
        "                                                    .status = status,\n",
        "",
        (_PHASES,),
    ),
    Mutant(
        "phases-forget-their-device",
        "csrc/core/transition/observers.c",
        "    event.phase = which;\n    event.device = device;",
        "    event.phase = which;",
        (_PHASES,),
    ),
    Mutant(
        "a-report-has-no-bytes-by-tag",
        "csrc/core/transition/observers.c",
        "        t->report->tag_bytes[i] = moved->bytes[i];\n",
        "",
        ("tests/unit/python/engine/test_printed.py",),
    ),
    Mutant(
        "only-the-first-observer-is-notified",
        "csrc/core/transition/observers.c",
        "i < sizeof observers / sizeof *observers",
        "i < 1",
        (
            _PHASES,
            _RANGES,
            "tests/unit/core/transition/test_transition_log.c",
            "tests/unit/core/transition/test_pause_and_resume.c",
        ),
    ),
    Mutant(
        "levels-are-those-after-the-first-event",
        _SOURCES + "observe/events/log.py",
        "Level(event.tag, event.device, -event.resident_change, -event.paused_change, -event.backup_change)",
        "Level(event.tag, event.device, -event.resident_change, event.paused_change, -event.backup_change)",
        (_PYTHON + "test_log.py::test_levels_before_undo_the_changes",),
    ),
    Mutant(
        "phases-of-a-device-share-a-track",
        _SOURCES + "observe/events/chrome_trace.py",
        "    return _DEVICE_TRACKS + event.device * (len(_PHASES) + 1) + phase\n",
        "    return _DEVICE_TRACKS + event.device * (len(_PHASES) + 1) + 0 * phase\n",
        (_PYTHON + "test_chrome_trace.py::test_calls_phases_and_tracks",),
    ),
    Mutant(
        "times-of-a-trace-are-monotonic",
        _SOURCES + "observe/events/chrome_trace.py",
        "        self._offset = log.wall_offset_ns - base_ns\n",
        "        self._offset = -base_ns\n",
        (
            _PYTHON + "test_chrome_trace.py::test_times_refer_to_the_given_base",
            "torch:tests/gpu/test_events.py::test_a_pause_lies_inside_the_range_around_it",
        ),
    ),
    Mutant(
        "metrics-are-written-in-place",
        _SOURCES + "_files.py",
        '    hidden = f".{target.name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp"',
        "    hidden = target.name",
        (_PYTHON + "test_event_file.py::test_a_file_that_cannot_be_written_stays_as_it_is",),
    ),
    Mutant(
        "a-failed-pause-leaves-the-metrics",
        _SOURCES + "_engine/engine.py",
        "        finally:\n            after_call.run()\n        unknown = warn_of",
        "            after_call.run()\n        finally:\n            pass\n        unknown = warn_of",
        (_PYTHON + "test_from_environment.py::test_a_failed_pause_rewrites_the_metrics",),
    ),
    Mutant(
        "a-forked-child-removes-its-parents-file",
        _SOURCES + "observe/events/from_environment.py",
        "        if self._pid != os.getpid():\n",
        "        if self._pid == 0:\n",
        (_PYTHON + "test_from_environment.py::test_a_forked_child_writes_its_own_file",),
    ),
    Mutant(
        "tags-are-not-escaped",
        _SOURCES + "observe/events/metrics.py",
        "f'{label}=\"{_escape(text)}\"'",
        "f'{label}=\"{text}\"'",
        (_PYTHON + "test_metrics.py::test_the_text", _PYTHON + "test_metrics.py::test_prometheus_reads_it"),
    ),
    Mutant(
        "a-range-stays-open-when-a-copy-fails",
        "csrc/core/transition/pause.c",
        "    tms_observers_pop(t);\n    tms_observers_record_phase(t, TMS_PHASE_COPY, device, &copying);",
        "    if (copying.status == TMS_OK) tms_observers_pop(t);\n"
        "    tms_observers_record_phase(t, TMS_PHASE_COPY, device, &copying);",
        (_RANGES,),
    ),
    Mutant(
        "a-forked-child-calls-its-parents-tool",
        "csrc/base/nvtx.c",
        "{ atomic_store(&nvtx->domain, NULL); }",
        "{ (void)nvtx; }",
        (_NVTX, "tests/unit/python/core/test_nvtx.py"),
    ),
)
