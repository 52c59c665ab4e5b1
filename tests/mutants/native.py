"""Bugs in the C sources: transitions, what they keep, frees, the devices' locks, and the interposers."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_TRANSITIONS = (
    Mutant(
        "the-rest-of-a-log-line-is-lost",
        "csrc/base/log.c",
        "            length -= (size_t)written;",
        "            length = 0;",
        ("tests/unit/base/test_log.c",),
    ),
    Mutant(
        "a-pending-resume-undoes-a-later-pause",
        "csrc/core/transition/steps.c",
        "    if (t->pending && segment->paused_by > tms_pending_begun(t->pending)) return false;\n",
        "",
        ("tests/unit/core/transition/test_pending.c",),
    ),
    Mutant(
        "a-pause-unlocks-the-device-before-the-memory-is-back",
        "csrc/core/transition/pause.c",
        "status = release(t, quiesced, error);",
        "TMS_FOR_EACH(segment, t) tms_free_release_lock(t->saver, segment);\nstatus = release(t, quiesced, error);",
        ("tests/unit/core/transition/test_resume_exclusive.c",),
    ),
    Mutant(
        "a-free-unlocks-the-device-before-the-memory-is-back",
        "csrc/core/allocation/free.c",
        "    drop_outcome_t outcome = drop_run(",
        "    tms_free_release_lock(saver, segment);\n    drop_outcome_t outcome = drop_run(",
        ("tests/unit/core/transition/test_resume_exclusive.c",),
    ),
    Mutant(
        "a-segment-takes-a-second-share-of-a-lock",
        "csrc/core/allocation/free.c",
        "    if (segment->exclusive) return;\n",
        "",
        ("tests/unit/core/transition/test_resume_exclusive.c",),
    ),
    Mutant(
        "what-is-dropped-is-not-waited-for",
        "csrc/core/transition/pause.c",
        "    tms_status_t status = tms_steps_quiesce(t, &quiesced, error);\n"
        "    if (status == TMS_OK) status = save(t, error);",
        "    tms_status_t status = TMS_OK;\n"
        "    quiesced = tms_quiesced_without_users();\n"
        "    if (keeps_contents(t)) status = tms_steps_quiesce(t, &quiesced, error);\n"
        "    if (status == TMS_OK) status = save(t, error);",
        (
            "tests/unit/core/transition/test_pause_and_resume.c",
            "tests/unit/core/transition/test_interrupt.c",
            "tests/unit/core/transition/test_capture_begin.c",
        ),
    ),
    Mutant(
        "only-owners-are-waited-for",
        "csrc/core/transition/steps.c",
        "        t->planned.affected |= tms_segment_accessible(segment);",
        "        t->planned.affected |= (tms_device_mask_t)1 << segment->device;",
        ("tests/unit/core/transition/test_pause_and_resume.c",),
    ),
    Mutant(
        "no-second-look-for-captures",
        "csrc/core/transition/steps.c",
        "    if (t->devices) status = check_visible_captures(t, error);",
        "    if (t->devices && t->perform) status = check_visible_captures(t, error);",
        ("tests/unit/core/transition/test_capture_turn.c",),
    ),
    Mutant(
        "no-last-scan-for-peers",
        "csrc/core/transition/resume.c",
        "t.devices->count > 1)",
        "t.devices->count > TMS_MAX_DEVICES)",
        ("tests/unit/core/transition/test_interrupt_of_parts.c",),
    ),
    Mutant(
        "a-failed-pause-is-committed",
        "csrc/core/transition/pause.c",
        "    bool committed = status == TMS_OK;",
        "    bool committed = true;",
        ("tests/unit/core/transition/test_pause_and_resume_failed.c",),
    ),
    Mutant(
        "a-failed-pause-counts-as-one",
        "csrc/core/transition/completion.c",
        "    if (moved && t->requested.from == TMS_SEGMENT_ACTIVE)",
        "    if (t->requested.from == TMS_SEGMENT_ACTIVE)",
        ("tests/unit/core/transition/test_pause_and_resume_failed.c",),
    ),
    Mutant(
        "a-resume-forgets-what-waits-when-memory-is-missing",
        "csrc/core/transition/resume.c",
        "        tms_reclaim_within(t->saver, &t->wait); /* it may release",
        "        /* it may release",
        ("tests/unit/core/transition/test_resume_wait.c",),
    ),
    Mutant(
        "a-shortage-names-the-first-device",
        "csrc/core/transition/resume.c",
        "tms_status_t status = examine(t, &demand, likely, &found, error);",
        "(void)likely;\n    tms_status_t status = TMS_OK;",
        ("tests/unit/core/transition/test_resume_wait.c",),
    ),
    Mutant(
        "a-resume-tries-again-over-what-it-damaged",
        "csrc/core/transition/resume.c",
        "status == TMS_OUT_OF_DEVICE_MEMORY && !t->done.damaged",
        "status == TMS_OUT_OF_DEVICE_MEMORY",
        ("tests/unit/core/transition/test_resume_wait.c",),
    ),
    Mutant(
        "an-exclusive-resume-takes-devices-that-it-has-not-locked",
        "csrc/core/transition/resume.c",
        "    t->planned.collectable = concerned;\n",
        "",
        ("tests/unit/core/transition/test_resume_exclusive.c",),
    ),
    Mutant(
        "a-resume-without-room-copies-first",
        "csrc/core/transition/restore.c",
        "    *fits = free_bytes >= needed;",
        "    *fits = true;",
        ("tests/unit/core/transition/test_pause_and_resume_failed.c",),
    ),
    Mutant(
        "a-device-that-was-stopped-hides-the-failure",
        "csrc/core/transition/crew.c",
        "if (!failed || failed->status == TMS_INTERRUPTED) failed = &parts[i];",
        "if (!failed) failed = &parts[i];",
        ("tests/unit/core/transition/test_interrupt.c",),
    ),
    Mutant(
        "a-failure-stops-no-other-device",
        "csrc/core/transition/crew.c",
        "    if (part->status != TMS_OK) stop(part->crew, wait);",
        "",
        ("tests/unit/core/transition/test_interrupt.c",),
    ),
    Mutant(
        "a-forked-child-closes-its-parents-copier",
        "csrc/core/transition/save.c",
        "    if (status == TMS_FORKED) return status; /* in a forked child: the stream",
        "    /* in a forked child: the stream",
        ("tests/unit/core/transition/test_interrupt_of_parts.c",),
    ),
    Mutant(
        "a-device-that-stops-because-another-failed-leaves-its-staging-memory-pinned",
        "csrc/backup/disk/staging.c",
        "keep_pinned = tms_wait_ends_call(wait);",
        "keep_pinned = wait && wait->cancelled;",
        ("tests/unit/core/transition/test_interrupt.c",),
    ),
    Mutant(
        "a-cancelled-call-waits-to-unpin-on-the-other-devices",
        "csrc/core/transition/crew.c",
        "    if (tms_wait_ends_call(wait)) atomic_store(&crew->call_cancelled, true);\n",
        "    (void)wait;\n",
        ("tests/unit/core/transition/test_interrupt.c",),
    ),
)

_BACKUPS = (
    Mutant(
        "every-pause-discards-what-is-paused",
        "csrc/core/transition/pause.c",
        "discards = selection->has_backup && selection->backup == TMS_BACKUP_NONE;",
        "discards = true;",
        ("tests/unit/core/transition/test_discard.c",),
    ),
    Mutant(
        "a-failed-pause-discards-backups",
        "csrc/core/transition/pause.c",
        "tms_discard_end(t, &discard, status == TMS_OK);",
        "tms_discard_end(t, &discard, true);",
        ("tests/unit/core/transition/test_discard.c",),
    ),
    Mutant(
        "a-live-range-that-begins-before-its-segment",
        "csrc/backup/content.c",
        "range->begin > begin ? range->begin : begin",
        "range->begin",
        ("tests/unit/core/transition/test_backup_choice_live.c",),
    ),
    Mutant(
        "a-live-range-that-ends-behind-its-segment",
        "csrc/backup/content.c",
        "range->end < end ? range->end : end",
        "range->end",
        ("tests/unit/core/transition/test_backup_choice_live.c",),
    ),
    Mutant(
        "copies-of-a-backup-end-at-4-gib",
        "csrc/backup/host/copy.c",
        "uint64_t packed = extents[i].packed + done,",
        "uint64_t packed = (uint32_t)(extents[i].packed + done),",
        ("tests/unit/backup/test_backup.c",),
    ),
    Mutant(
        "plans-of-a-backup-end-at-4-gib",
        "csrc/backup/content.c",
        "        packed += size;",
        "        packed = (uint32_t)(packed + size);",
        ("tests/unit/backup/test_backup.c",),
    ),
)

_INTERPOSERS = (
    Mutant(
        "allocations-inside-an-allocation-are-managed",
        "csrc/preload/hooks.c",
        "if (!count.nested && count.state && address",
        "if (count.state && address",
        ("tests/unit/preload/test_process.py::test_allocations_inside_an_allocation_are_not_the_programs",),
    ),
    Mutant(
        "a-managed-allocation-makes-no-context",
        "csrc/preload/hooks.c",
        "    if (!initialize) return TMS_OK;",
        "    return TMS_OK;",
        ("tests/unit/preload/test_memory.py::test_the_first_cuda_call_of_a_process_may_be_a_managed_allocation",),
    ),
    Mutant(
        "a-capture-lends-its-settings-to-cudamalloc",
        "csrc/preload/hooks.c",
        "region = tms_region_current(&count.state->regions, NULL);",
        "region = tms_saver_settings(&count.state->saver);",
        ("tests/unit/preload/test_capture.py",),
    ),
    Mutant(
        "peer-access-that-was-enabled-before-is-not-looked-at",
        "csrc/preload/hooks.c",
        "result == TMS_CUDA_SUCCESS || result == TMS_CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;",
        "result == TMS_CUDA_SUCCESS;",
        ("tests/unit/preload/test_memory.py",),
    ),
    Mutant(
        "a-capture-that-failed-to-begin-goes-on",
        "csrc/preload/hooks.c",
        "if (failed && !begun->known)",
        "if (false)",
        ("tests/unit/preload/test_capture.py",),
    ),
    Mutant(
        "a-capture-whose-end-failed-has-ended",
        "csrc/preload/hooks.c",
        "(result == TMS_CUDA_SUCCESS || !goes_on(state, target))",
        "true",
        ("tests/unit/preload/test_capture.py::test_a_capture_whose_end_failed_still_counts",),
    ),
    Mutant(
        "threads-share-their-own-default-stream",
        "csrc/device/capture_stream.c",
        "static _Thread_local char own_stream;",
        "static char own_stream;",
        ("tests/unit/preload/test_capture.py::test_default_streams_of_threads_are_different_streams",),
    ),
    Mutant(
        "a-capture-outlives-its-stream",
        "csrc/preload/hooks.c",
        "size_t count = state && stream ?",
        "size_t count = state && !stream ?",
        ("tests/unit/preload/test_capture.py",),
    ),
    Mutant(
        "an-interposer-takes-itself-for-the-runtime",
        "csrc/preload/resolve.c",
        "return address && !is_ours(address) ? address : NULL;",
        "return address;",
        ("tests/unit/preload/test_process.py::test_library_that_is_taken_for_the_runtime_does_not_call_itself",),
    ),
)

_CAPTURES = (
    Mutant(
        "an-end-is-that-of-the-last-capture",
        "csrc/device/capture.c",
        "        if (entry->announced != identity && entry->begun != identity) continue;",
        "",
        ("tests/unit/device/test_capture.c",),
    ),
    Mutant(
        "what-another-thread-announced-is-taken-for-ones-own",
        "csrc/device/capture.c",
        "!entry->begun && entry->thread == this_thread()",
        "!entry->begun",
        ("tests/unit/device/test_capture.c",),
    ),
    Mutant(
        "a-stream-is-asked-before-its-capture-has-begun",
        "csrc/device/capture.c",
        "bool may_be_queried = entry->begun && (!entry->beginner || entry->beginner == this_thread());",
        "bool may_be_queried = entry->begun;",
        ("tests/unit/device/test_capture_ended.c",),
    ),
    Mutant(
        "a-call-that-waits-for-its-turn-hides-a-callback",
        "csrc/core/transition/steps.c",
        "if (t->has_turn) tms_turn_callback_end(t->saver);",
        "tms_turn_callback_end(t->saver);",
        ("tests/unit/core/transition/test_capture_turn.c",),
    ),
    Mutant(
        "captures-that-have-ended-unseen-count",
        "csrc/core/transition/steps.c",
        "return tms_capture_table_count(t->saver) == 0",
        "return tms_capture_visible(&t->saver->capture) == 0",
        ("tests/unit/device/test_capture_ended.c",),
    ),
    Mutant(
        "a-stream-of-a-context-that-is-gone-is-asked",
        "csrc/device/capture_stream.c",
        "        ended = now != where->context;",
        "        ended = false;",
        ("tests/unit/device/test_capture_ended.c",),
    ),
)

_USAGE = (
    Mutant(
        "a-peak-falls-with-what-is-mapped",
        "csrc/base/stats.h",
        "    if (now > tms_stats_read(&gauge->peak)) atomic_store_explicit",
        "    atomic_store_explicit",
        ("tests/unit/core/model/test_usage.c",),
    ),
    Mutant(
        "mapped-memory-is-counted-again",
        "csrc/core/model/account.c",
        "    const tms_holding_t before = segment->counted;\n",
        "    tms_holding_t before = segment->counted;\n    before.resident_bytes = 0;\n",
        ("tests/unit/core/model/test_usage.c", "tests/unit/core/transition/test_pause_and_resume_failed.c"),
    ),
    Mutant(
        "paused-segments-of-a-tag-are-not-counted",
        "csrc/core/model/account.c",
        "    if (inactive != 0) atomic_fetch_add_explicit",
        "    if (inactive < 0) atomic_fetch_add_explicit",
        ("tests/unit/core/transition/test_pause_and_resume.c",),
    ),
    Mutant(
        "usage-of-a-tag-counts-every-device",
        "csrc/core/model/inspect.c",
        " && (device == TMS_NO_DEVICE || segment->device == device);",
        ";",
        ("tests/unit/core/model/test_usage.c",),
    ),
    Mutant(
        "memory-of-deferred-frees-is-counted-nowhere",
        "csrc/core/model/inspect.c",
        "        if (row) row->deferred_bytes += deferred_bytes(segment);\n",
        "",
        ("tests/unit/core/model/test_usage.c",),
    ),
)

_LOG = (
    Mutant(
        "lines-of-the-log-wait-between-calls",
        "csrc/base/log_queue.c",
        "    if (atomic_load(&queue->calls) == 0) return false;\n",
        "",
        ("tests/unit/base/test_log_queue.c",),
    ),
    Mutant(
        "a-forked-child-writes-its-parents-lines",
        "csrc/base/log.c",
        "    if (log->queue) tms_log_queue_after_fork_in_child(log->queue);\n",
        "",
        ("tests/unit/base/test_log_queue.c",),
    ),
    Mutant(
        "lines-that-are-left-at-exit-are-lost",
        "csrc/abi/process.c",
        "    tms_log_at_exit(&state->log);\n",
        "",
        ("tests/unit/python/engine/test_native_log.py::test_what_is_left_at_exit_is_written",),
    ),
    Mutant(
        "lines-of-python-code-ignore-the-variable",
        "csrc/abi/api.c",
        "if (!state || tms_log_enabled(&state->log, (tms_log_level_t)level)) tms",
        "tms",
        ("tests/unit/python/engine/test_native_log.py::test_lines_of_python_code_follow_the_variable",),
    ),
    Mutant(
        "lines-that-a-variable-asks-for-are-dropped-by-logging",
        "torch_memory_saver/_engine/native_log.py",
        "    elif enabled or _LEVELS[level] < logging.WARNING:",
        "    elif enabled:",
        ("tests/unit/python/engine/test_native_log.py::test_lines_that_a_variable_asks_for",),
    ),
)

_PENDING = "csrc/core/transition/pending.c"
_TEST_PENDING = "tests/unit/core/transition/test_pending.c"
_WAITS = (
    Mutant(
        "a-stream-waits-for-an-earlier-attempt",
        _PENDING,
        "        if (!(pending->recorded >> pending->last_copies[i].device & 1)) continue;\n",
        "",
        (_TEST_PENDING,),
    ),
    Mutant(
        "a-failure-in-the-background-is-not-logged",
        _PENDING,
        "pending->status != TMS_INTERRUPTED && !pending->reported)",
        "pending->status != TMS_INTERRUPTED && pending->reported)",
        (_TEST_PENDING,),
    ),
    Mutant(
        "a-forked-child-waits-for-a-resume-of-its-parent",
        _PENDING,
        "if (pending->process != getpid()) return tms_wait_fail_forked(",
        "if (pending->process == -1) return tms_wait_fail_forked(",
        (_TEST_PENDING,),
    ),
    Mutant(
        "a-forked-child-releases-a-resume-of-its-parent",
        _PENDING,
        "if (!pending || pending->process != getpid()) return;",
        "if (!pending) return;",
        (_TEST_PENDING,),
    ),
    Mutant(
        "each-attempt-creates-an-event",
        _PENDING,
        "    if (*event) return TMS_OK;\n",
        "",
        (_TEST_PENDING,),
    ),
    Mutant(
        "the-background-reports-progress",
        _PENDING,
        "    pending->selection.on_progress = NULL;\n",
        "",
        (_TEST_PENDING,),
    ),
    Mutant(
        "what-a-failed-attempt-of-a-pending-resume-made-ready-stays",
        "csrc/core/transition/pending.c",
        "    pending->ready = pending->recorded = 0;\n",
        "",
        ("tests/unit/core/transition/test_pending.c",),
    ),
    Mutant(
        "each-pending-resume-gets-the-whole-timeout",
        "torch_memory_saver/_engine/calls/pending.py",
        "            pending._await(operation, deadline)",
        "            pending._await(operation, time.monotonic() + 10.0)",
        ("tests/unit/python/test_pending.py::test_all_pending_resumes_share_the_timeout_of_a_pause",),
    ),
    Mutant(
        "within-loses-the-first-exception",
        "csrc/python/scope.c",
        "    if (kept.value) {\n        keep(&kept);\n        restore(&kept);\n    }\n    return NULL;",
        "    if (kept.value) drop(&kept);\n    return NULL;",
        ("tests/unit/python/core/test_functions.py::test_within_raises_the_exception_of_the_function",),
    ),
    Mutant(
        "a-scan-for-devices-on-request-keeps-the-back-off",
        "csrc/core/model/peers.c",
        "    if (!after_allocation) scans->skip_limit = 0;\n",
        "",
        ("tests/unit/core/test_scale.c",),
    ),
    Mutant(
        "a-new-device-keeps-the-back-off",
        "csrc/core/model/peers.c",
        "    if (active & ~scans->seen) longer = 1;\n",
        "",
        ("tests/unit/core/test_scale.c",),
    ),
    Mutant(
        "a-pause-keeps-the-back-off",
        "csrc/core/transition/completion.c",
        "    t->saver->peers.skip_limit = 0; /* the segment",
        "    /* the segment",
        ("tests/unit/core/test_scale.c",),
    ),
    Mutant(
        "memory-that-scans-skipped-keeps-the-back-off",
        "csrc/core/model/peers.c",
        "    scans->complete = 0;\n    scans->skip_limit = 0;\n",
        "    scans->complete = 0;\n",
        ("tests/unit/core/test_scale.c",),
    ),
)

MUTANTS = (*_LOG, *_WAITS, *_TRANSITIONS, *_BACKUPS, *_INTERPOSERS, *_CAPTURES, *_USAGE)
