"""Bugs of the event ring and of its exports."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_RING = "tests/unit/base/test_events.c"
_COPY = "tests/unit/core/test_event_copy.c"
_PHASES = "tests/unit/core/transition/test_phases.c"

MUTANTS = (
    Mutant(
        "a-wrapped-ring-begins-at-its-first-slot",
        "csrc/base/events.c",
        "    size_t first = (size_t)((events->recorded - count) % events->capacity);",
        "    size_t first = 0;",
        (_RING,),
    ),
    Mutant(
        "a-ring-that-is-off-reads-the-clock",
        "csrc/base/events.h",
        "{ return tms_events_are_on(events) ? events->clock() : 0; }",
        "{ return events->clock(); }",
        (_RING, _PHASES),
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
        "csrc/core/transition/transition.c",
        "        tms_footprint_record_moves(&moves);\n        tms_saver_unpublish(t->saver, segment);",
        "        tms_saver_unpublish(t->saver, segment);",
        (_PHASES,),
    ),
    Mutant(
        "damaged-memory-is-told-as-gone",
        "csrc/core/footprint.c",
        "        .resident_bytes = segment->mapped ? bytes : 0,",
        "        .resident_bytes = segment->state == TMS_SEGMENT_ACTIVE ? bytes : 0,",
        (_COPY, _PHASES),
    ),
    Mutant(
        "backups-are-not-told",
        "csrc/core/footprint.c",
        "        .backup_bytes = is_settled(segment) ? tms_backup_taken_bytes(&segment->backup, stores) : 0,",
        "        .backup_bytes = segment->state == TMS_SEGMENT_PAUSED ? segment->backup.held.bytes : 0,",
        (_COPY,),
    ),
    Mutant(
        "samples-are-taken-without-being-asked-for",
        "csrc/base/events.h",
        "    return tms_events_are_on(events) && atomic_load_explicit(&events->samples, memory_order_relaxed);",
        "    return tms_events_are_on(events);",
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
        "csrc/core/transition/phases.c",
        "    event.phase = which;\n    event.device = device;",
        "    event.phase = which;",
        (_PHASES,),
    ),
)
