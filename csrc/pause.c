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
    /* The driver page-locks memory, and takes it back, only once the device has done its work, and heeds nobody meanwhile
     * (seen on an H200). A call that can be told to stop therefore waits first, in its own way. */
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

/* After the memory has gone: whoever waits for the lock finds it free. What the driver refused to take back does not keep
 * the lock, because nobody knows for how long. */
static void let_go_of_locks(tms_transition_t *t) {
    TMS_FOR_EACH(segment, t) {
        if (!segment->exclusive) continue;
        segment->exclusive = false;
        tms_device_locks_release(&t->saver->device_locks, (tms_device_mask_t)1 << segment->device);
    }
}

static tms_status_t pause_all(tms_transition_t *t, tms_error_t *error) {
    tms_status_t status = save_contents(t, error);
    if (status == TMS_FORKED) return status; /* in the child now: what is on the list is the parent's */
    bool committed = status == TMS_OK;
    if (committed) {
        status = release_memory(t, error);
        let_go_of_locks(t);
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
