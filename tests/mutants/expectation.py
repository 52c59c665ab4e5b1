"""Bugs of a pause that copies what is expected to be live while it searches."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_EXPECTATION = "csrc/core/transition/expectation.c"
_PAUSE = "csrc/core/transition/pause.c"
_TEST = ("tests/unit/core/transition/test_expectation.c",)

MUTANTS = (
    Mutant(
        "another-answer-counts-as-expected",
        _EXPECTATION,
        "memcmp(answer->ranges, live->ranges, live->range_count * sizeof *live->ranges) == 0);",
        "true);",
        _TEST,
    ),
    Mutant(
        "an-answer-is-expected-of-part-of-its-segments",
        _EXPECTATION,
        "return last->search > 0 && count == last->segments;",
        "return last->search > 0;",
        _TEST,
    ),
    Mutant(
        "an-answer-is-expected-of-segments-at-the-same-addresses",
        _EXPECTATION,
        "        if (segment->search != last->search) return false;\n",
        "",
        _TEST,
    ),
    Mutant(
        "answers-that-vary-are-expected",
        _EXPECTATION,
        "expectation->varies = repeated && !*same;",
        "expectation->varies = false;",
        _TEST,
    ),
    Mutant(
        "retained-memory-is-overwritten-in-vain",
        _PAUSE,
        "        if (tms_backup_may_be_viewed(&segment->backup, &t->saver->stores)) return NULL;\n",
        "        (void)segment;\n",
        _TEST,
    ),
    Mutant(
        "copies-go-on-although-the-search-was-cancelled",
        _PAUSE,
        "    return search->status == TMS_OK && search->expected;",
        "    return true;",
        _TEST,
    ),
    Mutant(
        "what-was-expected-stays-planned",
        _PAUSE,
        "    TMS_FOR_EACH(segment, t) tms_backup_cancel(&segment->backup, &t->saver->stores);\n    t->planned",
        "    t->planned",
        _TEST,
    ),
    Mutant(
        "copies-in-vain-that-find-no-room-fail-the-pause",
        _PAUSE,
        "status == TMS_OUT_OF_HOST_MEMORY || status == TMS_BACKUP_IO;",
        "status == TMS_OUT_OF_HOST_MEMORY;",
        _TEST,
    ),
    Mutant(
        "copies-in-vain-leave-their-staging-memory-pinned",
        "csrc/backup/disk/staging.c",
        "keep_pinned = tms_wait_ends_call(wait);",
        "keep_pinned = wait && wait->cancelled;",
        (*_TEST, "tests/unit/core/transition/test_interrupt.c"),
    ),
    Mutant(
        "a-cancelled-call-waits-to-unpin-on-the-other-devices",
        "csrc/core/transition/devices.c",
        "    if (tms_wait_ends_call(wait)) atomic_store(&crew->call_cancelled, true);\n",
        "    (void)wait;\n",
        ("tests/unit/core/transition/test_interrupt.c",),
    ),
    Mutant(
        "copies-in-vain-count-as-progress",
        _PAUSE,
        "    atomic_store(&t->done.copied_bytes, 0);\n",
        "",
        _TEST,
    ),
)
