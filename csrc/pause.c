#include "transition_call.h"

/* ---- what is kept ---- */

/* Where the contents of a segment go this time. */
static tms_backup_kind_t kind_of(const tms_transition_t *t, const tms_segment_t *segment) {
    const tms_selection_t *selection = t->selection;
    if (!selection->has_backup) return segment->backup.kind;
    bool keeps_backend = selection->backup == TMS_BACKUP_PINNED && segment->backup.kind == TMS_BACKUP_MMAP;
    return keeps_backend ? TMS_BACKUP_MMAP : (tms_backup_kind_t)selection->backup;
}

static bool needs_host_memory(const tms_transition_t *t) {
    TMS_FOR_EACH(segment, t) {
        tms_backup_kind_t kind = kind_of(t, segment);
        if (kind == TMS_BACKUP_PINNED || kind == TMS_BACKUP_MMAP) return true;
    }
    return false;
}

static bool keeps_contents(const tms_transition_t *t) {
    TMS_FOR_EACH(segment, t) {
        if (kind_of(t, segment) != TMS_BACKUP_NONE) return true;
    }
    return false;
}

/* What a device's copies do instead of waiting for the bus. */
typedef struct ahead {
    struct tms_host_batch *batch;
    int device;
} ahead_t;

static tms_status_t lock_ahead(void *context, bool *more, tms_error_t *error) {
    const ahead_t *ahead = context;
    (void)error; /* a failure is for who waits for the piece */
    *more = tms_host_batch_help(ahead->batch, ahead->device);
    return TMS_OK;
}

/* `copying`: the devices that own a segment with contents to copy. */
static tms_status_t plan_all(tms_transition_t *t, const tms_live_t *live, tms_device_mask_t *copying, tms_error_t *error) {
    tms_backup_stores_t *stores = &t->saver->stores;
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_status_t status = TMS_OK;
    if (needs_host_memory(t)) status = tms_host_batch_create(&t->batch, &stores->host, &context, error);
    TMS_FOR_EACH(segment, t) {
        if (status != TMS_OK) return status;
        tms_error_context_t here = tms_transition_context_of(t, segment);
        const tms_backup_wish_t wish = {.kind = kind_of(t, segment),
                                        .policy = tms_saver_host_policy(t->saver, segment->backup.policy),
                                        .device = segment->device,
                                        .group = segment->tag,
                                        .address = tms_segment_address(segment),
                                        .live = live,
                                        .batch = t->batch,
                                        .wait = &t->wait};
        status = tms_backup_plan(&segment->backup, stores, &wish, &here, error);
        if (status != TMS_OK) return status;
        status = tms_wait_check(&t->wait, &here, error);
        if (segment->backup.planned.bytes == 0) continue;
        *copying |= (tms_device_mask_t)1 << segment->device;
        t->total_bytes += segment->backup.planned.bytes;
    }
    if (status == TMS_OK && t->batch) status = tms_host_batch_start(t->batch, &context, error);
    return status;
}

static tms_status_t save_device(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error) {
    tms_copier_t copier = {.open = false};
    tms_error_context_t context = tms_transition_context(t, device);
    tms_status_t status = tms_copier_open(&copier, &t->saver->stores, device, wait, &context, error);
    copier.done = &t->done_bytes;
    ahead_t ahead = {.batch = t->batch, .device = device};
    if (t->batch) copier.meanwhile = lock_ahead;
    copier.meanwhile_context = &ahead;
    TMS_FOR_EACH(segment, t) {
        if (status != TMS_OK) break;
        if (segment->device != device) continue;
        tms_error_context_t here = tms_transition_context_of(t, segment);
        status = tms_backup_save(&segment->backup, &copier, tms_segment_address(segment), &here, error);
    }
    if (status == TMS_FORKED) return status; /* in the child now: the stream and its context are the parent's */
    if (status == TMS_OK) status = tms_copier_wait(&copier, &context, error);
    (void)tms_copier_close(&copier); /* what is ACTIVE stays mapped, and the copier keeps the host memory if need be */
    return status;
}

/* Which bytes are live, if the caller knows; else NULL in *known. It can be asked only once the devices have nothing to do
 * any more, and it may have failed, which `interrupted` then tells. */
static tms_status_t find_live(tms_transition_t *t, tms_live_t *live, const tms_live_t **known, tms_error_t *error) {
    const tms_selection_t *selection = t->selection;
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    *known = NULL;
    if (!selection->find_live || !keeps_contents(t)) return TMS_OK;
    tms_saver_callback_begin(t->saver);
    if (selection->find_live(selection->live_context, live) == 0) *known = live;
    tms_saver_callback_end(t->saver);
    return tms_wait_ask(&t->wait, &context, error);
}

static tms_status_t save_contents(tms_transition_t *t, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_device_mask_t copying = 0;
    tms_live_t live = {0};
    const tms_live_t *known = NULL;
    /* First, although host memory could be prepared meanwhile: a call that is to stop would have to give page-locked memory
     * back, which waits for the device and lets nobody launch anything until then (cuMemHostUnregister, seen on an H200). */
    tms_status_t status =
        tms_wait_for_devices(&t->wait, t->saver->devices, t->affected, NULL, t->saver->log, &context, error);
    if (status == TMS_OK) status = find_live(t, &live, &known, error);
    if (status == TMS_OK) status = plan_all(t, known, &copying, error);
    if (status == TMS_OK) status = tms_transition_on_devices(t, copying, save_device, error);
    if (status == TMS_FORKED) return status;
    tms_host_batch_destroy(t->batch);
    t->batch = NULL;
    if (status == TMS_OK) {
        t->report.copied_bytes = t->total_bytes;
        tms_transition_report_progress(t);
    }
    return status;
}

/* ---- giving the memory back ---- */

/* After the commit point: goes on whatever happens, and reports the first of it. */
static tms_status_t release_memory(tms_transition_t *t, tms_error_t *error) {
    tms_status_t first_status = TMS_OK;
    uint64_t refused = 0, bytes = 0;
    tms_error_t first = {0};
    TMS_FOR_EACH(segment, t) {
        tms_error_t reason;
        tms_error_context_t context = tms_transition_context_of(t, segment);
        tms_backup_commit(&segment->backup, &t->saver->stores);
        tms_status_t status = tms_segment_depopulate(segment, t->driver, &context, &reason);
        if (status == TMS_OK) continue;
        if (refused++ == 0) {
            first_status = status;
            first = reason;
        }
        bytes += tms_segment_reserved(segment);
        tms_log_recurring(t->saver->log, TMS_LOG_DAMAGED, TMS_LOG_ERROR, &reason,
                          "The allocation is damaged; its address stays reserved.");
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
