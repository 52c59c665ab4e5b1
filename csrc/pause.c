#include "transition_call.h"

static tms_status_t prepare_all(tms_transition_t *t, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    TMS_FOR_EACH(segment, t) {
        if (status != TMS_OK) break;
        tms_error_context_t context = tms_transition_context_of(t, segment);
        status = tms_backup_prepare(&segment->backup, &t->saver->stores, &t->wait, &context, error);
        if (status == TMS_OK) status = tms_wait_check(&t->wait, &context, error);
    }
    return status;
}

/* Whether a backup on the list needs page-locked memory that it does not have yet. */
static bool will_page_lock(const tms_transition_t *t) {
    TMS_FOR_EACH(segment, t) {
        if (segment->backup.kind == TMS_BACKUP_PINNED && !segment->backup.host) return true;
    }
    return false;
}

static tms_status_t save_contents(tms_transition_t *t, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_status_t status = TMS_OK;
    /* The driver takes page-locked memory back only once its device has done all work (cuMemFreeHost of 64 MiB beside a
     * kernel of 1.3 s took as long, on an H200; cuMemHostAlloc did not wait), and heeds nobody meanwhile. A call that can be
     * told to stop therefore waits first, in its own way, so that there is none to take back when it is told. */
    if (tms_wait_is_interruptible(&t->wait) && will_page_lock(t))
        status = tms_wait_for_devices(&t->wait, t->saver->devices, t->affected, t->saver->log, &context, error);
    if (status == TMS_OK) status = prepare_all(t, error);
    if (status == TMS_OK)
        status = tms_wait_for_devices(&t->wait, t->saver->devices, t->affected, t->saver->log, &context, error);
    if (status == TMS_OK) status = tms_transition_copy(t, tms_backup_save, error);
    return status;
}

/* After the commit point: goes on whatever happens, and reports the first of it. */
static tms_status_t release_memory(tms_transition_t *t, tms_error_t *error) {
    tms_status_t first_status = TMS_OK;
    uint64_t refused = 0, bytes = 0;
    tms_error_t first = {0};
    TMS_FOR_EACH(segment, t) {
        tms_error_t reason;
        tms_error_context_t context = tms_transition_context_of(t, segment);
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

static tms_status_t pause_all(tms_transition_t *t, tms_error_t *error) {
    tms_status_t status = save_contents(t, error);
    if (status == TMS_FORKED) return status; /* in the child now: what is on the list is the parent's */
    bool committed = status == TMS_OK;
    if (committed) {
        status = release_memory(t, error);
        TMS_FOR_EACH(segment, t) tms_saver_let_go_of_lock(t->saver, segment);
    } else {
        TMS_FOR_EACH(segment, t) tms_backup_cancel(&segment->backup, &t->saver->stores);
    }
    tms_transition_finish(t, committed);
    return status;
}

tms_status_t tms_transition_pause(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                  tms_error_t *error) {
    tms_transition_t t = {.saver = saver,
                          .selection = selection,
                          .operation = "pause",
                          .from = TMS_SEGMENT_ACTIVE,
                          .through = TMS_SEGMENT_PAUSING,
                          .to = TMS_SEGMENT_PAUSED,
                          .act = pause_all};
    return tms_transition_run(&t, &saver->stats.pauses_total, report, error);
}
