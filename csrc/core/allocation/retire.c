#include "core/allocation/retire.h"

#include <stddef.h>
#include <stdlib.h>

#include "core/allocation/runs.h"
#include "core/captures.h"

/* ---- guard pages ---- */

void tms_saver_drop_guard(tms_saver_t *saver, int device) {
    pthread_mutex_lock(&saver->lock);
    tms_segment_t *page = tms_guard_drop(&saver->guard, device);
    pthread_mutex_unlock(&saver->lock);
    if (page) tms_saver_dispose(saver, page, tms_quiesced_never_handed_out());
}

tms_status_t tms_saver_unguard(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced,
                               const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    uint64_t bytes = segment->guarded;
    tms_status_t status = tms_segment_unguard(segment, quiesced, driver, context, error);
    if (status != TMS_OK || bytes == 0) return status;
    tms_stats_subtract(&saver->stats.guarded_bytes, bytes);
    tms_saver_drop_guard(saver, segment->device);
    return TMS_OK;
}

/* ---- quarantined segments ---- */

/* A segment whose guard page the driver did not unmap. The devices were waited for. */
static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    tms_segment_t *segment = (tms_segment_t *)(void *)((char *)node - offsetof(tms_segment_t, quarantined));
    tms_saver_t *saver = node->context;
    tms_error_context_t context = tms_saver_context("free", segment);
    tms_error_t reason;
    tms_status_t status = tms_saver_unguard(saver, segment, segment->quiesced, &context, &reason);
    if (status != TMS_OK && !tms_driver_is_gone(&reason)) {
        tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_WARNING, &reason, "It is still quarantined.");
        return TMS_QUARANTINE_BIT(RANGE);
    }
    (void)tms_runs_leave(saver, segment, segment->quiesced); /* it has no memory: it left */
    free(segment);
    return 0;
}

/* ---- the devices' locks ---- */

void tms_saver_retain_lock(tms_saver_t *saver, tms_segment_t *segment) {
    if (segment->exclusive) return;
    tms_device_locks_retain(&saver->device_locks, segment->device);
    segment->exclusive = true;
}

void tms_saver_release_lock(tms_saver_t *saver, tms_segment_t *segment) {
    if (!segment->exclusive) return;
    segment->exclusive = false;
    tms_device_locks_release(&saver->device_locks, (tms_device_mask_t)1 << segment->device);
}

/* ---- frees ---- */

/* False: a device has got access to its memory since the wait, and must be waited for. */
static bool dispose(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced) {
    tms_error_context_t context = tms_saver_context("free", segment);
    tms_error_t reason;
    tms_backup_destroy(&segment->backup, &saver->stores);
    tms_status_t status = tms_saver_unguard(saver, segment, quiesced, &context, &reason);
    if (status != TMS_OK && !tms_driver_is_gone(&reason)) {
        tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, &reason,
                          "It is quarantined; later calls retry its release.");
        segment->quiesced = quiesced;
        segment->quarantined = (tms_quarantined_t){.retry = retry, .context = saver, .holds = TMS_QUARANTINE_BIT(RANGE)};
        tms_saver_release_lock(saver, segment);
        tms_quarantine_add(&saver->quarantine, &segment->quarantined);
        return true;
    }
    tms_leaving_t leaving = tms_runs_leave(saver, segment, quiesced);
    if (leaving != TMS_LEFT) return leaving == TMS_OWNER_RETIRES;
    tms_saver_release_lock(saver, segment);
    free(segment);
    return true;
}

void tms_saver_dispose(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced) {
    (void)dispose(saver, segment, quiesced); /* `quiesced` covers every device, or the run belongs to the segment alone */
}

tms_use_t tms_saver_await_users(tms_saver_t *saver, const tms_segment_t *segment, tms_device_mask_t users, tms_wait_t *wait,
                                tms_quiesced_t *quiesced, tms_error_t *reason) {
    tms_error_context_t context = tms_saver_context("free", segment);
    if (users == 0) {
        *quiesced = tms_quiesced_never_handed_out();
        return TMS_UNUSED;
    }
    if (tms_saver_captures(saver) > 0) return TMS_USED_UNTIL_CAPTURE_ENDS;
    if (wait && wait->cancelled) return TMS_PERHAPS_IN_USE;
    tms_device_mask_t at_rest = 0;
    tms_status_t status = tms_quiesce(wait, saver->devices, users, quiesced, &at_rest, saver->log, &context, reason);
    if (status == TMS_OK) return TMS_UNUSED;
    bool none_runs = (users & ~at_rest) == 0; /* every device that failed is lost */
    if (!none_runs && (status == TMS_INTERRUPTED || status == TMS_FORKED))
        return TMS_PERHAPS_IN_USE; /* the waiting call returns the status */
    if (none_runs || tms_driver_is_gone(reason)) {
        if (none_runs)
            tms_log_recurring(saver->log, TMS_LOG_FREED_ON_LOST_DEVICE, TMS_LOG_WARNING, reason,
                              "The memory is freed nevertheless.");
        *quiesced = tms_quiesced_devices_lost(users);
        return TMS_UNUSED;
    }
    tms_log_recurring(saver->log, TMS_LOG_FREE_DEFERRED, status == TMS_CAPTURE_IN_PROGRESS ? TMS_LOG_INFO : TMS_LOG_WARNING,
                      reason, "The memory is released later.");
    return TMS_PERHAPS_IN_USE;
}

/* False: the capture to wait for has ended, and no later call would run the deferred free. */
static bool defer(tms_saver_t *saver, tms_segment_t *segment, tms_use_t use) {
    pthread_mutex_lock(&saver->lock);
    bool deferred = use != TMS_USED_UNTIL_CAPTURE_ENDS || tms_capture_visible(&saver->capture);
    if (deferred) {
        segment->next_in_transition = saver->deferred;
        saver->deferred = segment;
    }
    pthread_mutex_unlock(&saver->lock);
    return deferred;
}

/* The devices that may use a freed segment. False: a call owns its run, and retires it at its end. */
static bool find_users(tms_saver_t *saver, tms_segment_t *segment, tms_device_mask_t *users) {
    pthread_mutex_lock(&saver->lock);
    bool left = tms_runs_leave_to_owner(segment);
    if (!left) *users = tms_segment_accessible(segment);
    pthread_mutex_unlock(&saver->lock);
    return !left;
}

void tms_saver_retire(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait) {
    tms_device_mask_t users = 0;
    tms_quiesced_t quiesced;
    tms_error_t reason;
    tms_use_t use;
    do {
        if (!find_users(saver, segment, &users)) return;
        use = tms_saver_await_users(saver, segment, users, wait, &quiesced, &reason);
        if (use == TMS_UNUSED && dispose(saver, segment, quiesced)) return;
    } while (use == TMS_UNUSED || !defer(saver, segment, use));
}
