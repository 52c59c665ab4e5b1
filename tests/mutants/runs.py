"""Bugs of runs: who is backed by one handle, what becomes of slack, and when memory is released."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_RUN = "csrc/core/model/run.c"
_FREE = "csrc/core/allocation/free.c"
_KINDS = "csrc/core/model/kinds.c"
_LAYOUT = "csrc/core/transition/layout.c"
_RESTORE = "csrc/core/transition/restore.c"
_TEST_RUNS = "tests/unit/core/allocation/test_runs.c"
_TEST_LAYOUT = "tests/unit/core/transition/test_layout.c"
_FULL_DEVICE = "tests/model/test_full_device.py"
_CHURNS = f"{_FULL_DEVICE}::test_a_churning_tag_has_no_slack_from_its_second_cycle_on"

_SLACK = (
    Mutant(
        "slack-is-handed-out-while-a-call-owns-its-run",
        _RUN,
        "    *list = run;\n    if (run->first) tms_space_hold(run->first, run->end);",
        "    *list = run;",
        (_TEST_RUNS,),
    ),
    Mutant(
        "slack-outlives-a-pause",
        _FREE,
        "        if (!has_memory) tms_kind_forget_slack(saver, run);\n",
        "",
        (_TEST_RUNS, _CHURNS),
    ),
    Mutant(
        "the-last-free-of-a-run-keeps-its-memory",
        _FREE,
        "        if (tms_run_drop_reference(segment)) {",
        "        if (tms_run_drop_reference(segment) && tms_run_bytes(run) == tms_segment_reserved(segment)) {",
        (_TEST_RUNS,),
    ),
    Mutant(
        "memory-becomes-slack-while-kernels-may-write-to-it",
        _FREE,
        "    if (!deferred) *users = tms_segment_accessible(segment);",
        "    if (!deferred) *users = segment->run && segment->run->segments > 1 ? 0 : tms_segment_accessible(segment);",
        ("tests/unit/core/allocation/test_slack_in_use.c",),
    ),
    Mutant(
        "an-allocation-with-a-handle-of-its-own-gets-slack",
        "csrc/core/allocation/allocation.c",
        "    if (region->own_handles || tms_stats_read",
        "    if (tms_stats_read",
        (_TEST_RUNS,),
    ),
    Mutant(
        "an-allocation-from-slack-gives-no-access-to-a-new-device",
        "csrc/core/allocation/allocation.c",
        "    if (status == TMS_OK && !reuse_slack(saver, region, bytes, reserved, context.device, address))",
        "    if (status == TMS_OK && reuse_slack(saver, region, bytes, reserved, context.device, address)) return TMS_OK;\n"
        "    if (status == TMS_OK)",
        (_TEST_RUNS,),
    ),
    Mutant(
        "slack-of-a-run-that-a-look-did-not-find-lacks-access",
        "csrc/core/allocation/allocation.c",
        "        tms_peers_note_reused(saver, segment->run);\n",
        "",
        (_TEST_RUNS,),
    ),
)
_FREES = (
    Mutant(
        "a-free-waits-for-devices-although-a-call-owns-its-run",
        _FREE,
        "bool deferred = tms_run_defer_to_owner(segment);",
        "bool deferred = false;",
        (_TEST_RUNS,),
    ),
    Mutant(
        "a-run-is-quarantined-although-the-driver-has-shut-down",
        _FREE,
        "    bool gone = status == TMS_OK || tms_driver_is_gone(error);\n    if (run->first",
        "    bool gone = status == TMS_OK;\n    if (run->first",
        (_TEST_RUNS,),
    ),
    Mutant(
        "slack-is-shown-in-a-row-that-another-tag-has-now",
        _KINDS,
        "    if (before == 0) kind->row =",
        "    if (!kind->row) kind->row =",
        ("tests/unit/core/model/test_shared_page_rows.c",),
    ),
    Mutant(
        "a-free-ignores-access-that-a-device-got-since-the-wait",
        _FREE,
        "run->mapped && !tms_quiesced_covers(quiesced, run->accessible)) {",
        "run->mapped && run->accessible == 0) {",
        ("tests/unit/core/allocation/test_slack_in_use.c",),
    ),
    Mutant(
        "only-one-freed-segment-of-an-owned-run-is-retired",
        _RUN,
        "    while (run->waiting) {",
        "    if (run->waiting) {",
        (_TEST_RUNS,),
    ),
    Mutant(
        "a-free-in-a-damaged-run-lists-its-slack",
        _KINDS,
        "segment->run, !segment->run->damaged);",
        "segment->run, true);",
        (_TEST_RUNS,),
    ),
)
_RECLAIM = "csrc/core/allocation/reclaim.c"
_TEST_DAMAGED = "tests/unit/core/test_damaged.c"
_REPAIRS = (
    Mutant(
        "references-to-contexts-are-not-released-later",
        _RECLAIM,
        "    tms_devices_reclaim(saver->devices);\n",
        "",
        ("tests/unit/core/allocation/test_reclaim.c",),
    ),
    Mutant(
        "a-reference-to-a-context-is-nothing-to-reclaim",
        _RECLAIM,
        " || tms_devices_unreleased(saver->devices) > 0",
        "",
        ("tests/unit/core/allocation/test_reclaim.c",),
    ),
    Mutant(
        "repaired-memory-is-still-counted",
        "csrc/core/model/account.c",
        "    if (state == TMS_SEGMENT_REPAIRING)",
        "    if (segment->counted.state == TMS_SEGMENT_DAMAGED)",
        (_TEST_DAMAGED,),
    ),
    Mutant(
        "a-repair-changes-the-state-without-its-time",
        "csrc/core/model/account.c",
        "    segment->changed_at = now;\n",
        "    if (state == TMS_SEGMENT_ACTIVE) segment->changed_at = now;\n",
        (_TEST_DAMAGED,),
    ),
    Mutant(
        "a-repair-is-no-event",
        "csrc/core/model/account.c",
        "    record(account, segment, set_state(account, segment, state, tms_wait_now()), event);",
        "    (void)event;\n    (void)set_state(account, segment, state, tms_wait_now());",
        (_TEST_DAMAGED,),
    ),
    Mutant(
        "a-failed-repair-is-recorded-as-a-success",
        _RECLAIM,
        "        run->refused_status = reason.status;\n",
        "",
        (_TEST_DAMAGED,),
    ),
)
_ADDRESSES = (
    Mutant(
        "a-refused-range-is-not-tried-smaller",
        "csrc/core/model/ranges.c",
        "status != TMS_OUT_OF_HOST_MEMORY && wanted > bytes)",
        "status != TMS_OUT_OF_HOST_MEMORY && wanted < bytes)",
        ("tests/unit/core/model/test_ranges.c",),
    ),
    Mutant(
        "addresses-come-from-the-first-hole-that-fits",
        "csrc/base/address_space.c",
        "size >= bytes && (!best || size < tms_span_bytes(best))",
        "size >= bytes && !best",
        ("tests/unit/base/test_address_space.c",),
    ),
)
_KINDS_THAT_FREE = (
    Mutant(
        "a-kind-that-frees-keeps-its-runs",
        _KINDS,
        " && kind->freed_bytes <= kind->resumed_bytes / TMS_KIND_FREED_DIVISOR;",
        ";",
        (_TEST_LAYOUT, _CHURNS),
    ),
    Mutant(
        "frees-of-memory-that-was-never-resumed-count",
        _KINDS,
        "    if (tms_segment_was_resumed(segment)) tms_kind_of",
        "    tms_kind_of",
        (_TEST_LAYOUT,),
    ),
    Mutant(
        "a-failed-resume-forgets-what-was-freed",
        "csrc/core/transition/completion.c",
        "    if (moved && t->requested.to == TMS_SEGMENT_ACTIVE) note_resumed(t);",
        "    if (t->requested.to == TMS_SEGMENT_ACTIVE) note_resumed(t);",
        (_TEST_LAYOUT,),
    ),
    Mutant(
        "frees-of-all-cycles-count",
        _KINDS,
        "    kind->resumed_bytes = kind->freed_bytes = 0;",
        "    kind->resumed_bytes = 0;",
        (_TEST_LAYOUT,),
    ),
)
_PLACES = (
    Mutant(
        "regions-of-a-process-without-runs-have-them",
        "csrc/core/model/region.c",
        " || defaults->own_handles,",
        ",",
        ("tests/unit/core/model/test_region.c",),
    ),
    Mutant(
        "memory-beside-what-was-sent-in-one-run",
        _KINDS,
        "!kind->sent && ",
        "",
        (_TEST_LAYOUT,),
    ),
    Mutant(
        "a-run-of-exactly-the-largest-size-is-split",
        _LAYOUT,
        "leader->node.begin > TMS_MAX_RUN_BYTES)",
        "leader->node.begin >= TMS_MAX_RUN_BYTES)",
        (_TEST_LAYOUT,),
    ),
    Mutant(
        "a-run-that-does-not-fit-is-not-halved",
        _RESTORE,
        "if (status != TMS_OUT_OF_DEVICE_MEMORY || !tms_layout_halve(leader)) return status;",
        "return status;",
        (_TEST_LAYOUT,),
    ),
)

MUTANTS = _SLACK + _FREES + _REPAIRS + _ADDRESSES + _KINDS_THAT_FREE + _PLACES
