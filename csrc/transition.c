#include "transition.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* One call of pause or resume. The segments on its list are in its state (PAUSING or RESUMING) and nobody else touches them.
 */
typedef struct transition {
    tms_saver_t *saver;
    const char *operation;
    tms_segment_state_t from, through, to;
    tms_segment_t *first, **end; /* in order of allocation */
    tms_device_mask_t owners;    /* devices that own a segment on the list */
    tms_device_mask_t affected;  /* devices that can access one */
    tms_device_mask_t copying;   /* devices that own a segment with contents to copy */
    const tms_driver_table_t *driver;
    const tms_device_table_t *devices; /* NULL: there was nothing to act on, and the driver has not been asked for */
    tms_report_t report;
} transition_t;

#define FOR_EACH(segment, t) for (tms_segment_t *segment = (t)->first; segment; segment = segment->next_in_transition)

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static tms_error_context_t context_of(const transition_t *t, const tms_segment_t *segment) {
    return (tms_error_context_t){.operation = t->operation,
                                 .device = segment->device,
                                 .bytes = tms_segment_reserved(segment),
                                 .address = tms_segment_address(segment),
                                 .tag = segment->tag->name};
}

static tms_error_context_t context_of_call(const transition_t *t, int device) {
    return (tms_error_context_t){.operation = t->operation, .device = device};
}

/* ---- turns and captures ---- */

static tms_status_t take_turn(transition_t *t, tms_error_t *error) {
    tms_saver_t *saver = t->saver;
    tms_error_context_t context = context_of_call(t, TMS_NO_DEVICE);
    tms_status_t status = TMS_OK;
    pthread_mutex_lock(&saver->lock);
    if (saver->transition_running && pthread_equal(saver->transition_owner, pthread_self())) {
        status = tms_error_set(
            error, TMS_INVALID_STATE, &context,
            "this thread is inside pause() or resume() already; do not call them from callbacks or finalisers");
    } else {
        while (saver->transition_running) pthread_cond_wait(&saver->turn, &saver->lock);
        saver->transition_running = true;
        saver->transition_owner = pthread_self();
    }
    pthread_mutex_unlock(&saver->lock);
    return status;
}

static void end_turn(tms_saver_t *saver) {
    pthread_mutex_lock(&saver->lock);
    saver->transition_running = false;
    pthread_cond_signal(&saver->turn);
    pthread_mutex_unlock(&saver->lock);
}

/* Nothing may synchronise during a capture; better said before anything has changed. */
static tms_status_t check_capture(transition_t *t, const tms_selection_t *selection, tms_error_t *error) {
    tms_error_context_t context = context_of_call(t, TMS_NO_DEVICE);
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    int visible = tms_capture_visible(&t->saver->capture);
    if (visible > 0)
        return tms_error_set(error, TMS_CAPTURE_IN_PROGRESS, &context, "%d stream capture%s under way; end %s first",
                             visible, visible == 1 ? " is" : "s are", visible == 1 ? "it" : "them");
    if (!selection->has_stream) return TMS_OK;
    CUresult result =
        t->driver->cuStreamIsCapturing ? t->driver->cuStreamIsCapturing(selection->stream, &capturing) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && capturing != CU_STREAM_CAPTURE_STATUS_NONE)
        return tms_error_set(error, TMS_CAPTURE_IN_PROGRESS, &context,
                             "the current stream is capturing; end the capture first");
    /* A thread without a context has no stream that could be capturing. */
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_CONTEXT) return TMS_OK;
    return tms_driver_fail(t->driver, &context, "cuStreamIsCapturing", result, error);
}

/* ---- selection ---- */

static bool is_selected(const tms_selection_t *selection, const tms_tag_t *tag) {
    if (!selection->tags) return true;
    for (size_t i = 0; i < selection->tag_count; i++) {
        if (strcmp(selection->tags[i], tag->name) == 0) return true;
    }
    return false;
}

static void count_unknown_tags(transition_t *t, const tms_selection_t *selection) {
    for (size_t i = 0; selection->tags && i < selection->tag_count; i++) {
        tms_tag_t *tag = tms_tag_find(&t->saver->regions->tags, selection->tags[i]);
        if (tag && atomic_load(&tag->used)) continue;
        t->report.unknown_tags++;
        tms_log_write(t->saver->log, TMS_LOG_WARNING, "%s: no allocation ever had the tag '%s'; nothing to do for it",
                      t->operation, selection->tags[i]);
    }
}

static bool has_contents(const transition_t *t, const tms_segment_t *segment) {
    return t->from == TMS_SEGMENT_ACTIVE ? segment->backup.kind != TMS_BACKUP_NONE : segment->backup.saved;
}

static void collect(transition_t *t, const tms_selection_t *selection) {
    t->end = &t->first;
    pthread_mutex_lock(&t->saver->lock);
    for (tms_registry_node_t *node = t->saver->registry.first; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        if (segment->state != t->from || !is_selected(selection, segment->tag)) continue;
        segment->state = t->through;
        segment->next_in_transition = NULL;
        *t->end = segment;
        t->end = &segment->next_in_transition;
        t->owners |= (tms_device_mask_t)1 << segment->device;
        t->affected |= segment->accessible;
        if (has_contents(t, segment)) t->copying |= (tms_device_mask_t)1 << segment->device;
    }
    pthread_mutex_unlock(&t->saver->lock);
}

/* ---- ending ---- */

/* Under the lock: where a segment ends up, in the books. `moved`: it did what the call is for. */
static void settle(transition_t *t, tms_segment_t *segment, bool moved) {
    tms_stats_t *stats = &t->saver->stats;
    uint64_t bytes = tms_segment_reserved(segment);
    bool was_active = t->from == TMS_SEGMENT_ACTIVE;
    bool damaged = moved ? was_active && (segment->mapped || segment->has_handle)
                         : !was_active && (segment->mapped || segment->has_handle);
    segment->state = damaged ? TMS_SEGMENT_DAMAGED : moved ? t->to : t->from;
    bool is_active = segment->state == TMS_SEGMENT_ACTIVE;
    if (was_active && !segment->mapped) tms_stats_subtract(&stats->resident_bytes, bytes);
    if (!was_active && segment->mapped) tms_stats_add(&stats->resident_bytes, bytes);
    if (!was_active && segment->state != TMS_SEGMENT_PAUSED) tms_stats_subtract(&stats->paused_bytes, bytes);
    if (was_active && segment->state == TMS_SEGMENT_PAUSED) tms_stats_add(&stats->paused_bytes, bytes);
    if (damaged) t->saver->damaged++;
    if (was_active && !is_active) atomic_fetch_add_explicit(&segment->tag->paused, 1, memory_order_relaxed);
    if (!was_active && is_active) atomic_fetch_sub_explicit(&segment->tag->paused, 1, memory_order_relaxed);
    if (moved && !damaged) {
        t->report.allocations++;
        t->report.bytes += bytes;
    }
}

/* Counts one pause for each tag that it changed. */
static void advance_epochs(transition_t *t) {
    FOR_EACH(segment, t) {
        bool counted = false;
        for (tms_segment_t *before = t->first; before != segment && !counted; before = before->next_in_transition)
            counted = before->tag == segment->tag;
        if (!counted) atomic_fetch_add_explicit(&segment->tag->pause_epoch, 1, memory_order_relaxed);
    }
}

/* Publishes every segment's new state, and finishes the frees that came meanwhile. */
static void finish(transition_t *t, bool moved) {
    tms_segment_t *freed = NULL;
    pthread_mutex_lock(&t->saver->lock);
    if (moved && t->from == TMS_SEGMENT_ACTIVE) advance_epochs(t);
    for (tms_segment_t *next, *segment = t->first; segment; segment = next) {
        next = segment->next_in_transition;
        settle(t, segment, moved);
        if (!segment->free_requested) continue;
        tms_saver_unpublish(t->saver, segment);
        segment->next_in_transition = freed;
        freed = segment;
    }
    t->first = NULL;
    pthread_mutex_unlock(&t->saver->lock);
    for (tms_segment_t *next, *segment = freed; segment; segment = next) {
        next = segment->next_in_transition;
        tms_saver_retire(t->saver, segment);
    }
}

/* ---- copies ---- */

typedef tms_status_t (*copy_t)(tms_backup_t *, tms_copier_t *, CUdeviceptr, const tms_error_context_t *, tms_error_t *);

static tms_status_t copy_device(transition_t *t, int device, copy_t copy, tms_error_t *error) {
    tms_copier_t copier = {.open = false};
    tms_error_context_t context = context_of_call(t, device);
    tms_status_t status = tms_copier_open(&copier, &t->saver->stores, device, &context, error);
    FOR_EACH(segment, t) {
        if (status != TMS_OK) break;
        if (segment->device != device || !has_contents(t, segment)) continue;
        tms_error_context_t here = context_of(t, segment);
        status = copy(&segment->backup, &copier, tms_segment_address(segment), &here, error);
        t->report.copied_bytes += segment->backup.bytes;
    }
    if (status == TMS_OK) status = tms_copier_wait(&copier, &context, error);
    tms_copier_close(&copier);
    return status;
}

static tms_status_t copy_all(transition_t *t, copy_t copy, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    for (int device = 0; device < t->devices->count && status == TMS_OK; device++) {
        if (t->copying >> device & 1) status = copy_device(t, device, copy, error);
    }
    return status;
}

/* ---- pause ---- */

static tms_status_t prepare_all(transition_t *t, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    FOR_EACH(segment, t) {
        if (status != TMS_OK) break;
        tms_error_context_t context = context_of(t, segment);
        status = tms_backup_prepare(&segment->backup, &t->saver->stores, &context, error);
    }
    return status;
}

static tms_status_t save_contents(transition_t *t, tms_error_t *error) {
    tms_error_context_t context = context_of_call(t, TMS_NO_DEVICE);
    tms_status_t status = prepare_all(t, error);
    if (status == TMS_OK) status = tms_devices_synchronize(t->saver->devices, t->affected, &context, error);
    if (status == TMS_OK) status = copy_all(t, tms_backup_save, error);
    return status;
}

/* After the commit point: goes on whatever happens, and reports the first of it. */
static tms_status_t release_memory(transition_t *t, tms_error_t *error) {
    tms_status_t first_status = TMS_OK;
    uint64_t refused = 0, bytes = 0;
    tms_error_t first = {0};
    FOR_EACH(segment, t) {
        tms_error_t reason;
        tms_error_context_t context = context_of(t, segment);
        tms_backup_commit(&segment->backup);
        tms_status_t status = tms_segment_depopulate(segment, t->driver, &context, &reason);
        if (status == TMS_OK) continue;
        if (refused++ == 0) {
            first_status = status;
            first = reason;
        }
        bytes += tms_segment_reserved(segment);
        tms_log_write(t->saver->log, TMS_LOG_ERROR, "%s The allocation is damaged; its address stays reserved.",
                      reason.message);
    }
    if (refused > 0 && error) {
        *error = first;
        tms_error_append(
            error, " In all %llu allocations of %llu bytes could not be released and are damaged; all others are paused.",
            (unsigned long long)refused, (unsigned long long)bytes);
    }
    return first_status;
}

static tms_status_t pause_all(transition_t *t, tms_error_t *error) {
    tms_status_t status = save_contents(t, error);
    bool committed = status == TMS_OK;
    if (committed) {
        status = release_memory(t, error);
    } else {
        FOR_EACH(segment, t) tms_backup_cancel(&segment->backup, &t->saver->stores);
    }
    finish(t, committed);
    return status;
}

/* ---- resume ---- */

static tms_status_t populate_all(transition_t *t, tms_error_t *error) {
    tms_device_mask_t peers[TMS_MAX_DEVICES];
    tms_status_t status = TMS_OK;
    for (int device = 0; device < t->devices->count && status == TMS_OK; device++) {
        tms_error_context_t context = context_of_call(t, device);
        if (t->owners >> device & 1) status = tms_devices_peers(t->saver->devices, device, &peers[device], &context, error);
    }
    uint64_t bytes = 0;
    FOR_EACH(segment, t) {
        if (status != TMS_OK) break;
        tms_error_context_t context = context_of(t, segment);
        status = tms_segment_populate(segment, t->driver, t->devices, peers[segment->device], &context, error);
        if (status == TMS_OK) {
            bytes += tms_segment_reserved(segment);
        } else if (status == TMS_OUT_OF_DEVICE_MEMORY && error) {
            tms_error_append(error,
                             " %llu bytes were mapped before that and have been given back: everything stays paused, and "
                             "resume() can be called again.",
                             (unsigned long long)bytes);
        }
    }
    return status;
}

static void undo_resume(transition_t *t) {
    FOR_EACH(segment, t) {
        tms_error_t reason;
        tms_error_context_t context = context_of(t, segment);
        if (tms_segment_depopulate(segment, t->driver, &context, &reason) == TMS_OK) continue;
        tms_log_write(t->saver->log, TMS_LOG_ERROR, "undoing a failed resume: %s The allocation is damaged.",
                      reason.message);
    }
}

static tms_status_t resume_all(transition_t *t, tms_error_t *error) {
    tms_status_t status = populate_all(t, error);
    if (status == TMS_OK) status = copy_all(t, tms_backup_load, error);
    if (status == TMS_OK) {
        bool retain = atomic_load(&t->saver->retain_backup);
        FOR_EACH(segment, t) tms_backup_discard(&segment->backup, retain);
    } else {
        undo_resume(t);
    }
    finish(t, status == TMS_OK);
    return status;
}

/* ---- calls ---- */

/* What must hold before a call may change anything. */
static tms_status_t check(transition_t *t, const tms_selection_t *selection, tms_error_t *error) {
    tms_error_context_t context = context_of_call(t, TMS_NO_DEVICE);
    tms_status_t status = tms_saver_check_process(t->saver, &context, error);
    if (status != TMS_OK) return status;
    if (!tms_saver_has_segments(t->saver)) return TMS_OK; /* also on a machine without a driver */
    status = tms_devices_load(t->saver->devices, &t->driver, &t->devices, &context, error);
    return status == TMS_OK ? check_capture(t, selection, error) : status;
}

/* One call. `act` moves the segments on the list, or undoes what it did, and publishes where they ended up. */
static tms_status_t run(transition_t *t, const tms_selection_t *selection,
                        tms_status_t (*act)(transition_t *, tms_error_t *), _Atomic uint64_t *successes,
                        tms_report_t *report, tms_error_t *error) {
    double started = seconds_now();
    tms_status_t status = check(t, selection, error);
    if (status == TMS_OK) status = take_turn(t, error);
    if (status == TMS_OK) {
        tms_saver_reclaim(t->saver);
        count_unknown_tags(t, selection);
        if (t->devices) collect(t, selection);
        if (t->first) status = act(t, error);
        end_turn(t->saver);
    }
    tms_stats_add(status == TMS_OK ? successes : &t->saver->stats.failures_total, 1);
    t->report.seconds = seconds_now() - started;
    if (status == TMS_OK && report) *report = t->report;
    return status;
}

tms_status_t tms_transition_pause(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                  tms_error_t *error) {
    transition_t t = {.saver = saver,
                      .operation = "pause",
                      .from = TMS_SEGMENT_ACTIVE,
                      .through = TMS_SEGMENT_PAUSING,
                      .to = TMS_SEGMENT_PAUSED};
    return run(&t, selection, pause_all, &saver->stats.pauses_total, report, error);
}

tms_status_t tms_transition_resume(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                   tms_error_t *error) {
    transition_t t = {.saver = saver,
                      .operation = "resume",
                      .from = TMS_SEGMENT_PAUSED,
                      .through = TMS_SEGMENT_RESUMING,
                      .to = TMS_SEGMENT_ACTIVE};
    tms_status_t status = run(&t, selection, resume_all, &saver->stats.resumes_total, report, error);
    if (status == TMS_OK && t.report.allocations > 0 && t.devices->count > 1) {
        /* A device that came into use while the memory was being mapped. What was resumed stands whatever comes of this. */
        tms_error_t reason;
        tms_saver_note(saver, tms_saver_refresh_peers(saver, &reason), &reason);
    }
    return status;
}
