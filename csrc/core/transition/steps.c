#include "core/transition/steps.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/allocation/reclaim.h"
#include "core/model/captures.h"
#include "core/model/inspect.h"
#include "core/model/turn.h"
#include "core/transition/observers.h"
#include "core/transition/pending.h"

/* ---- captures ---- */

/* Nothing may synchronise during a capture, so a capture is reported before anything changes. */
static tms_status_t check_visible_captures(tms_transition_t *t, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    return tms_capture_table_count(t->saver) == 0 ? TMS_OK : tms_error_set(error, TMS_CAPTURE_IN_PROGRESS, &context, NULL);
}

static tms_status_t check_capture(tms_transition_t *t, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    tms_status_t status = check_visible_captures(t, error);
    if (status != TMS_OK) return status;
    if (!t->requested.selection->has_stream) return TMS_OK;
    CUresult result = t->driver->cuStreamIsCapturing
                          ? t->driver->cuStreamIsCapturing(t->requested.selection->stream, &capturing)
                          : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && capturing != CU_STREAM_CAPTURE_STATUS_NONE)
        return tms_error_set(error, TMS_CAPTURE_IN_PROGRESS, &context, NULL);
    /* A thread without a context has no stream that could be capturing. */
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_CONTEXT) return TMS_OK;
    return tms_driver_fail(t->driver, &context, "cuStreamIsCapturing", result, error);
}

/* ---- selection ---- */

/* Finds the tags, once for each call and without the saver's lock. Counts the tags that no allocation ever had. */
static tms_status_t find_tags(tms_transition_t *t, tms_error_t *error) {
    const tms_selection_t *selection = t->requested.selection;
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    if (!selection->tags) return TMS_OK;
    t->requested.tags = calloc(selection->tag_count + 1, sizeof(void *));
    if (!t->requested.tags) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    for (size_t i = 0; i < selection->tag_count; i++) {
        tms_tag_t *tag = tms_tag_find(&t->saver->regions->tags, selection->tags[i]);
        if (tag) t->requested.tags[t->requested.tag_count++] = tag;
        if (tag && atomic_load(&tag->used)) continue;
        t->done.report.unknown_tags++;
    }
    return TMS_OK;
}

void tms_steps_begin_scan(tms_transition_t *t) {
    t->mark = ++t->saver->marks;
    for (size_t i = 0; i < t->requested.tag_count; i++) t->requested.tags[i]->mark = t->mark;
    t->saver->steps += t->requested.tag_count;
}

static bool has_selected_tag(const tms_transition_t *t, const tms_segment_t *segment) {
    t->saver->steps++;
    return !t->requested.tags || segment->tag->mark == t->mark;
}

static bool is_at(const tms_segment_t *segment, uint64_t address) {
    return address >= tms_segment_address(segment) && address - tms_segment_address(segment) < tms_segment_reserved(segment);
}

bool tms_steps_selects(const tms_transition_t *t, const tms_segment_t *segment) {
    if (t->requested.address != 0 && !is_at(segment, t->requested.address)) return false;
    if (t->pending && segment->paused_by > tms_pending_begun(t->pending)) return false;
    return segment->state == t->requested.from && (t->planned.collectable >> segment->device & 1) &&
           has_selected_tag(t, segment);
}

bool tms_steps_discards(const tms_transition_t *t, const tms_segment_t *segment) {
    bool paused = segment->state == TMS_SEGMENT_PAUSED || segment->state == TMS_SEGMENT_DAMAGED ||
                  segment->state == TMS_SEGMENT_REPAIRING;
    return t->requested.discards && paused && segment->backup.saved && has_selected_tag(t, segment);
}

bool tms_steps_skips_damaged(const tms_transition_t *t, const tms_segment_t *segment) {
    /* REPAIRING: another thread is trying to repair it and may fail. */
    bool damaged = segment->state == TMS_SEGMENT_DAMAGED || segment->state == TMS_SEGMENT_REPAIRING;
    return damaged && t->requested.address == 0 && has_selected_tag(t, segment);
}

tms_status_t tms_steps_quiesce(tms_transition_t *t, tms_quiesced_t *quiesced, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    const uint64_t began = tms_observers_begin_phase(t, TMS_PHASE_SYNCHRONIZE);
    tms_status_t status =
        tms_quiesce(&t->wait, t->saver->devices, t->planned.affected, quiesced, NULL, t->saver->log, &context, error);
    tms_observers_end_phase(t, TMS_PHASE_SYNCHRONIZE, began, status);
    return status;
}

uint64_t tms_steps_mark(tms_transition_t *t) {
    pthread_mutex_lock(&t->saver->lock);
    const uint64_t mark = ++t->saver->marks;
    pthread_mutex_unlock(&t->saver->lock);
    return mark;
}

static void collect(tms_transition_t *t) {
    t->planned.first = NULL;
    t->planned.end = &t->planned.first;
    t->planned.owners = t->planned.affected = 0;
    t->planned.incomplete = false;
    t->planned.discard_count = 0;
    t->planned.runs = NULL;
    pthread_mutex_lock(&t->saver->lock);
    tms_steps_begin_scan(t);
    t->planned.peers_seen = t->saver->peers.seen;
    for (tms_registry_node_t *node = t->saver->registry.first; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        if (tms_steps_skips_damaged(t, segment)) t->planned.incomplete = true;
        t->planned.discard_count += tms_steps_discards(t, segment);
        if (!tms_steps_selects(t, segment)) continue;
        tms_account_own(segment, t->requested.through);
        if (t->requested.to == TMS_SEGMENT_PAUSED) segment->paused_by = t->mark;
        segment->next_in_transition = NULL;
        *t->planned.end = segment;
        t->planned.end = &segment->next_in_transition;
        t->planned.owners |= (tms_device_mask_t)1 << segment->device;
        t->planned.affected |= tms_segment_accessible(segment);
        if (segment->run) tms_run_own(segment->run, &t->planned.runs);
    }
    if (t->planned.first) tms_observers_notify(t, TMS_MOVES_BEGIN);
    pthread_mutex_unlock(&t->saver->lock);
}

/* ---- skipped segments ---- */

/* Selected segments that the call did not move, with the driver's failure. */
typedef struct skipped {
    uint64_t allocations, bytes;
    tms_error_context_t context; /* context of the first */
    char call[TMS_ERROR_NAME_BYTES];
    int result;
    bool is_damaged; /* the first: no other thread is repairing it, or has just repaired it */
    bool has_other_tags;
} skipped_t;

static skipped_t find_skipped(tms_transition_t *t) {
    skipped_t found = {.allocations = 0};
    pthread_mutex_lock(&t->saver->lock);
    tms_steps_begin_scan(t);
    for (tms_registry_node_t *node = t->saver->registry.first; node; node = node->next) {
        const tms_segment_t *segment = tms_segment_of(node);
        /* PAUSED after a resume: another thread has just repaired it. */
        if (!tms_steps_skips_damaged(t, segment) &&
            !(t->requested.from == TMS_SEGMENT_PAUSED && tms_steps_selects(t, segment)))
            continue;
        if (found.allocations++ == 0) {
            found.context = tms_transition_context_of(t, segment);
            found.is_damaged = segment->state == TMS_SEGMENT_DAMAGED;
            if (segment->run) memcpy(found.call, segment->run->refused_call, sizeof found.call);
            if (segment->run) found.result = segment->run->refused_result;
        }
        found.bytes += tms_segment_reserved(segment);
        if (found.context.tag != segment->tag->name) found.has_other_tags = true; /* interned: one tag, one name */
    }
    pthread_mutex_unlock(&t->saver->lock);
    return found;
}

/* Reports the segments that a finished call skipped. A pause only logs them, because their contents are safe. A resume
 * fails, because its caller would assume that everything is resident. */
static tms_status_t report_skipped(tms_transition_t *t, tms_error_t *error) {
    tms_error_t own;
    skipped_t found = find_skipped(t);
    if (found.allocations == 0) return TMS_OK;
    tms_status_t status = found.call[0]
                              ? tms_driver_fail(t->driver, &found.context, found.call, (CUresult)found.result, &own)
                              : tms_error_set(&own, TMS_DRIVER, &found.context,
                                              found.is_damaged ? "its memory could not be released yet"
                                                               : "another thread is trying to release its memory");
    tms_error_append(&own, " %llu allocation%s (", (unsigned long long)found.allocations, found.allocations == 1 ? "" : "s");
    tms_error_append_bytes(&own, found.bytes);
    tms_error_append(&own, ") with the tag '%s'%s %s still damaged", found.context.tag,
                     found.has_other_tags ? " and other tags" : "", found.allocations == 1 ? "is" : "are");
    if (t->requested.from == TMS_SEGMENT_ACTIVE) {
        tms_error_append(&own, "; later calls try again.");
        tms_log_write(t->saver->log, TMS_LOG_ERROR, "%s", own.message);
        return TMS_OK;
    }
    tms_error_append(&own, "; everything else has been resumed. Call resume() again, and do not use the damaged memory "
                           "before that call has succeeded. Its addresses stay reserved.");
    t->done.damaged = true;
    if (error) *error = own;
    return status;
}

/* ---- the call ---- */

/* The preconditions, checked before a call changes anything. */
static tms_status_t check(tms_transition_t *t, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_status_t status = tms_saver_check_process(t->saver, &context, error);
    if (status == TMS_OK) status = tms_saver_check_settings(t->saver, error);
    if (status != TMS_OK) return status;
    /* Succeeds on a machine without a driver if there is nothing to do. Reclaiming may wait for a device, which a capture
     * forbids. */
    if (!t->requested.any_memory && !tms_saver_has_segments(t->saver) && !tms_reclaim_is_needed(t->saver)) return TMS_OK;
    status = tms_devices_load(t->saver->devices, &t->driver, &t->devices, &context, error);
    return status == TMS_OK ? check_capture(t, error) : status;
}

tms_status_t tms_steps_attempt(tms_transition_t *t, tms_error_t *error) {
    uint64_t unknown_tags = t->done.report.unknown_tags;
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    const uint64_t began = tms_observers_begin_phase(t, TMS_PHASE_TURN);
    tms_status_t status = tms_turn_take(t->saver, &t->wait, &context, error);
    tms_observers_end_phase(t, TMS_PHASE_TURN, began, status);
    if (status != TMS_OK) return status;
    t->has_turn = true;
    tms_backup_stores_enter_call(&t->saver->stores);
    t->done.report = (tms_report_t){.unknown_tags = unknown_tags}; /* discards the report of an earlier attempt */
    t->done.notes = (tms_transition_notes_t){.dropped_bytes = 0};
    t->planned.total_bytes = t->planned.unchanged_bytes = 0;
    atomic_store(&t->done.copied_bytes, 0);
    /* Checked again: a capture may have begun while this call waited for its turn or for memory. */
    if (t->devices) status = check_visible_captures(t, error);
    if (status == TMS_OK) {
        tms_reclaim_within(t->saver, &t->wait);
        status = tms_wait_check(&t->wait, &context, error);
    }
    if (status == TMS_OK && t->devices) collect(t);
    if (status == TMS_OK && (t->planned.first || t->planned.discard_count > 0 || t->requested.any_memory)) {
        tms_observers_sample_memory(t);
        status = t->act(t, error);
        if (status != TMS_FORKED) tms_observers_sample_memory(t);
    }
    if (status == TMS_OK && t->planned.incomplete) status = report_skipped(t, error);
    tms_backup_stores_leave_call(&t->saver->stores);
    t->has_turn = false;
    tms_turn_end(t->saver);
    return status;
}

/* A call that waits for its turn, or for memory, delays no capture. So its callbacks are not recorded, and do not hide the
 * callbacks of the call that has the turn. */
static void begin_callback(const tms_transition_t *t) {
    if (t->has_turn) tms_turn_callback_begin(t->saver);
}

static void end_callback(const tms_transition_t *t) {
    if (t->has_turn) tms_turn_callback_end(t->saver);
}

void tms_steps_report_progress(tms_transition_t *t) {
    const tms_selection_t *selection = t->requested.selection;
    if (!selection->on_progress || t->planned.total_bytes == 0) return;
    begin_callback(t);
    selection->on_progress(selection->on_progress_context, atomic_load(&t->done.copied_bytes), t->planned.total_bytes);
    end_callback(t);
}

/* `interrupted` of the call's tms_wait_t: reports progress and polls for cancellation. */
static int32_t poll(void *context) {
    tms_transition_t *t = context;
    tms_steps_report_progress(t);
    if (!t->requested.selection->interrupted) return 0;
    begin_callback(t);
    int32_t stop = t->requested.selection->interrupted(t->requested.selection->interrupt_context);
    end_callback(t);
    return stop;
}

static tms_status_t check_selection(const tms_transition_t *t, tms_error_t *error) {
    const tms_selection_t *selection = t->requested.selection;
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    if (selection->has_backup && selection->backup != TMS_BACKUP_NONE &&
        !tms_backup_stores_find(&t->saver->stores, (tms_backup_kind_t)selection->backup))
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "there is no backup kind %d for one pause",
                             (int)selection->backup);
    if (selection->host_policy < TMS_HOST_DEFAULT || selection->host_policy > TMS_HOST_RETAIN)
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "there is no host memory policy %d",
                             (int)selection->host_policy);
    return TMS_OK;
}

tms_status_t tms_steps_perform(tms_transition_t *t, tms_error_t *error) {
    const tms_selection_t *selection = t->requested.selection;
    bool asks = selection->interrupted || selection->on_progress;
    tms_wait_begin(&t->wait, asks ? poll : NULL, t, selection->timeout_seconds);
    t->planned.collectable = ~(tms_device_mask_t)0;
    t->requested.guards = atomic_load(&t->saver->guard.on);
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_observers_notify(t, TMS_CALL_BEGINS);
    tms_status_t status = tms_turn_enter(&context, error);
    if (status == TMS_OK) {
        status = check_selection(t, error);
        if (status == TMS_OK) status = check(t, error);
        if (status == TMS_OK) status = find_tags(t, error);
        if (status == TMS_OK) status = t->perform ? t->perform(t, error) : tms_steps_attempt(t, error);
        tms_turn_leave();
        free(t->requested.tags);
    }
    t->done.report.seconds = tms_wait_elapsed(&t->wait);
    t->done.status = status;
    t->done.driver_result = status != TMS_OK && error ? error->driver_result : 0;
    tms_observers_notify(t, TMS_CALL_ENDS);
    return tms_inspect_explain_loss(t->saver, status, error);
}
