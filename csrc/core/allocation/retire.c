#include "core/allocation/retire.h"

#include <stddef.h>
#include <stdlib.h>

#include "core/captures.h"

/* ---- guard pages ---- */

void tms_saver_drop_guard(tms_saver_t *saver, int device) {
    pthread_mutex_lock(&saver->lock);
    tms_segment_t *page = tms_guard_drop(&saver->guard, device);
    pthread_mutex_unlock(&saver->lock);
    if (page) tms_saver_dispose(saver, page, tms_quiesced_never_handed_out());
}

/* The guard page is not mapped at the segment's addresses any more. */
static void note_unguarded(tms_saver_t *saver, const tms_segment_t *segment, uint64_t bytes) {
    if (bytes == 0) return;
    tms_stats_subtract(&saver->stats.guarded_bytes, bytes);
    tms_saver_drop_guard(saver, segment->device);
}

tms_status_t tms_saver_unguard(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced,
                               const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    uint64_t bytes = segment->guarded;
    tms_status_t status = tms_segment_unguard(segment, quiesced, driver, context, error);
    if (status == TMS_OK) note_unguarded(saver, segment, bytes);
    return status;
}

/* ---- quarantined segments ---- */

/* Releases the memory and the address range of a segment. False: the segment's flags show what is left. */
static bool release_memory(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced, tms_error_t *error) {
    tms_error_context_t context = tms_saver_context("free", segment);
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    tms_status_t status = tms_saver_unguard(saver, segment, quiesced, &context, error);
    if (status == TMS_OK) status = tms_segment_depopulate(segment, quiesced, driver, &context, error);
    if (status == TMS_OK) status = tms_segment_unreserve(segment, driver, &context, error);
    return status == TMS_OK || tms_driver_is_gone(error);
}

/* The range belongs to another segment now, with all that is mapped there. Returns the bytes that were guarded. */
static uint64_t give_up_range(tms_segment_t *segment) {
    uint64_t guarded = segment->guarded;
    segment->has_range = segment->mapped = false;
    segment->guarded = 0;
    return guarded;
}

/* Adds the range of a segment to the quarantined ranges, and returns what the segment holds. If another allocation has the
 * range, the driver freed it although it reported a failure: the segment then gives up the range. */
static tms_quarantine_mask_t quarantine_range(tms_saver_t *saver, tms_segment_t *segment) {
    uint64_t guarded = 0;
    pthread_mutex_lock(&saver->lock);
    if (segment->has_range && tms_registry_overlapping(&saver->registry, segment->node.begin, segment->node.end))
        guarded = give_up_range(segment);
    if (segment->has_range) {
        tms_registry_insert(&saver->quarantined_ranges, &segment->node);
        segment->range_is_quarantined = true;
    }
    pthread_mutex_unlock(&saver->lock);
    note_unguarded(saver, segment, guarded);
    return (segment->has_handle ? TMS_QUARANTINE_BIT(HANDLE) : 0) |
           (segment->range_is_quarantined ? TMS_QUARANTINE_BIT(RANGE) : 0);
}

/* Removes the range before a retry: once the driver has freed it, another thread may reserve it. */
static void take_from_quarantine(tms_saver_t *saver, tms_segment_t *segment) {
    uint64_t guarded = 0;
    pthread_mutex_lock(&saver->lock);
    if (segment->range_is_quarantined) {
        tms_registry_remove(&saver->quarantined_ranges, &segment->node);
        segment->range_is_quarantined = false;
    } else {
        guarded = give_up_range(segment); /* another segment owns it: tms_saver_claim_range */
    }
    pthread_mutex_unlock(&saver->lock);
    note_unguarded(saver, segment, guarded);
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    tms_segment_t *segment = (tms_segment_t *)(void *)((char *)node - offsetof(tms_segment_t, quarantined));
    tms_saver_t *saver = node->context;
    tms_error_t reason;
    take_from_quarantine(saver, segment);
    if (release_memory(saver, segment, segment->quiesced, &reason)) {
        free(segment);
        return 0;
    }
    tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_WARNING, &reason, "It is still quarantined.");
    tms_quarantine_mask_t holds = quarantine_range(saver, segment);
    if (!holds) free(segment);
    return holds;
}

tms_status_t tms_saver_claim_range(tms_saver_t *saver, const tms_segment_t *segment, const tms_error_context_t *context,
                                   tms_error_t *error) {
    uint64_t begin = segment->node.begin, end = segment->node.end;
    tms_registry_node_t *lost;
    pthread_mutex_lock(&saver->lock);
    bool in_use = tms_registry_overlapping(&saver->registry, begin, end) != NULL;
    while (!in_use && (lost = tms_registry_overlapping(&saver->quarantined_ranges, begin, end))) {
        tms_registry_remove(&saver->quarantined_ranges, lost);
        tms_segment_of(lost)->range_is_quarantined = false;
    }
    pthread_mutex_unlock(&saver->lock);
    return in_use ? tms_error_set(error, TMS_DRIVER, context,
                                  "the driver reserved the addresses from 0x%llx to 0x%llx, which are already in use",
                                  (unsigned long long)begin, (unsigned long long)end)
                  : TMS_OK;
}

/* ---- frees ---- */

void tms_saver_release_lock(tms_saver_t *saver, tms_segment_t *segment) {
    if (!segment->exclusive) return;
    segment->exclusive = false;
    tms_device_locks_release(&saver->device_locks, (tms_device_mask_t)1 << segment->device);
}

void tms_saver_dispose(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced) {
    tms_error_t reason;
    tms_backup_destroy(&segment->backup, &saver->stores);
    bool gone = release_memory(saver, segment, quiesced, &reason);
    tms_saver_release_lock(saver, segment);
    if (gone) {
        free(segment);
        return;
    }
    tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, &reason,
                      "It is quarantined; later calls retry its release.");
    tms_quarantine_mask_t holds = quarantine_range(saver, segment);
    if (!holds) {
        free(segment);
        return;
    }
    segment->quiesced = quiesced;
    segment->quarantined = (tms_quarantined_t){.retry = retry, .context = saver, .holds = holds};
    tms_quarantine_add(&saver->quarantine, &segment->quarantined);
}

tms_use_t tms_saver_await_users(tms_saver_t *saver, const tms_segment_t *segment, tms_wait_t *wait, tms_quiesced_t *quiesced,
                                tms_error_t *reason) {
    tms_error_context_t context = tms_saver_context("free", segment);
    if (!segment->mapped && segment->guarded == 0) {
        *quiesced = tms_quiesced_never_handed_out();
        return TMS_UNUSED;
    }
    if (tms_saver_captures(saver) > 0) return TMS_USED_UNTIL_CAPTURE_ENDS;
    if (wait && wait->cancelled) return TMS_PERHAPS_IN_USE;
    tms_device_mask_t at_rest = 0;
    tms_status_t status =
        tms_quiesce(wait, saver->devices, segment->accessible, quiesced, &at_rest, saver->log, &context, reason);
    if (status == TMS_OK) return TMS_UNUSED;
    bool none_runs = (segment->accessible & ~at_rest) == 0; /* every device that failed is lost */
    if (!none_runs && (status == TMS_INTERRUPTED || status == TMS_FORKED))
        return TMS_PERHAPS_IN_USE; /* the waiting call returns the status */
    if (none_runs || tms_driver_is_gone(reason)) {
        if (none_runs)
            tms_log_recurring(saver->log, TMS_LOG_FREED_ON_LOST_DEVICE, TMS_LOG_WARNING, reason,
                              "The memory is freed nevertheless.");
        *quiesced = tms_quiesced_devices_lost(segment->accessible);
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

void tms_saver_retire(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait) {
    tms_quiesced_t quiesced;
    tms_error_t reason;
    tms_use_t use;
    do {
        use = tms_saver_await_users(saver, segment, wait, &quiesced, &reason);
        if (use == TMS_UNUSED) {
            tms_saver_dispose(saver, segment, quiesced);
            return;
        }
    } while (!defer(saver, segment, use));
}
