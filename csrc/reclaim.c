/* What goes back: freed segments, and what waits until the driver takes it. Declared in saver.h. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "saver.h"

/* ---- the quarantine's segments ---- */

/* What the driver holds of a segment goes back to it. False: something stayed, the flags of the segment say what. */
static bool give_back(tms_saver_t *saver, tms_segment_t *segment, tms_error_t *error) {
    tms_error_context_t context = tms_saver_context("free", segment);
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    tms_status_t status = tms_segment_depopulate(segment, driver, &context, error);
    if (status == TMS_OK) status = tms_segment_unreserve(segment, driver, &context, error);
    return status == TMS_OK || tms_driver_is_gone(error);
}

/* Enters the range of a segment that goes to the quarantine among those that are aside; what the segment holds. Nothing
 * where the driver had taken the range back although it said otherwise, and another allocation has it by now. */
static tms_quarantine_mask_t set_aside(tms_saver_t *saver, tms_segment_t *segment) {
    pthread_mutex_lock(&saver->lock);
    if (segment->has_range && tms_registry_overlapping(&saver->registry, segment->node.begin, segment->node.end))
        segment->has_range = segment->mapped = false;
    if (segment->has_range) {
        tms_registry_insert(&saver->aside, &segment->node);
        segment->is_aside = true;
    }
    pthread_mutex_unlock(&saver->lock);
    return (segment->has_handle ? TMS_QUARANTINE_BIT(HANDLE) : 0) | (segment->is_aside ? TMS_QUARANTINE_BIT(RANGE) : 0);
}

/* Takes it out again, to be tried: once the driver has the range back another thread may get it. */
static void take_from_aside(tms_saver_t *saver, tms_segment_t *segment) {
    pthread_mutex_lock(&saver->lock);
    if (segment->is_aside) {
        tms_registry_remove(&saver->aside, &segment->node);
        segment->is_aside = false;
    } else {
        segment->has_range = segment->mapped = false; /* somebody else has it: tms_saver_claim_range */
    }
    pthread_mutex_unlock(&saver->lock);
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    tms_segment_t *segment = (tms_segment_t *)(void *)((char *)node - offsetof(tms_segment_t, quarantined));
    tms_saver_t *saver = node->context;
    tms_error_t reason;
    take_from_aside(saver, segment);
    if (give_back(saver, segment, &reason)) {
        free(segment);
        return 0;
    }
    tms_log_recurring(saver->log, TMS_LOG_KEPT_ASIDE, TMS_LOG_WARNING, &reason, "It is still kept aside.");
    tms_quarantine_mask_t holds = set_aside(saver, segment);
    if (!holds) free(segment);
    return holds;
}

tms_status_t tms_saver_claim_range(tms_saver_t *saver, const tms_segment_t *segment, const tms_error_context_t *context,
                                   tms_error_t *error) {
    uint64_t begin = segment->node.begin, end = segment->node.end;
    tms_registry_node_t *lost;
    pthread_mutex_lock(&saver->lock);
    bool in_use = tms_registry_overlapping(&saver->registry, begin, end) != NULL;
    while (!in_use && (lost = tms_registry_overlapping(&saver->aside, begin, end))) {
        tms_registry_remove(&saver->aside, lost);
        tms_segment_of(lost)->is_aside = false;
    }
    pthread_mutex_unlock(&saver->lock);
    return in_use ? tms_error_set(error, TMS_DRIVER, context,
                                  "the driver reserved the addresses from 0x%llx to 0x%llx, which are in use",
                                  (unsigned long long)begin, (unsigned long long)end)
                  : TMS_OK;
}

/* ---- frees ---- */

void tms_saver_let_go_of_lock(tms_saver_t *saver, tms_segment_t *segment) {
    if (!segment->exclusive) return;
    segment->exclusive = false;
    tms_device_locks_release(&saver->device_locks, (tms_device_mask_t)1 << segment->device);
}

void tms_saver_dispose(tms_saver_t *saver, tms_segment_t *segment) {
    tms_error_t reason;
    tms_backup_destroy(&segment->backup, &saver->stores);
    bool gone = give_back(saver, segment, &reason);
    tms_saver_let_go_of_lock(saver, segment);
    if (gone) {
        free(segment);
        return;
    }
    tms_log_recurring(saver->log, TMS_LOG_KEPT_ASIDE, TMS_LOG_ERROR, &reason,
                      "It is kept aside and tried again by later calls.");
    tms_quarantine_mask_t holds = set_aside(saver, segment);
    if (!holds) {
        free(segment);
        return;
    }
    segment->quarantined = (tms_quarantined_t){.retry = retry, .context = saver, .holds = holds};
    tms_quarantine_add(&saver->quarantine, &segment->quarantined);
}

/* Whether the devices may still use a mapped segment. */
typedef enum use {
    UNUSED,
    UNTIL_CAPTURE_ENDS, /* nobody may ask before that */
    PERHAPS_IN_USE
} use_t;

/* Waits for the devices that may still use a segment. Where that fails *reason says why. */
static use_t wait_for_users(tms_saver_t *saver, const tms_segment_t *segment, tms_wait_t *wait, tms_error_t *reason) {
    tms_error_context_t context = tms_saver_context("free", segment);
    if (!segment->mapped) return UNUSED;
    if (tms_saver_captures(saver) > 0) return UNTIL_CAPTURE_ENDS;
    if (wait && wait->stopped) return PERHAPS_IN_USE;
    tms_device_mask_t at_rest = 0;
    tms_status_t status =
        tms_wait_for_devices(wait, saver->devices, segment->accessible, &at_rest, saver->log, &context, reason);
    if (status == TMS_OK) return UNUSED;
    if ((segment->accessible & ~at_rest) == 0) { /* whichever failed is lost */
        tms_log_recurring(saver->log, TMS_LOG_FREED_ON_LOST_DEVICE, TMS_LOG_WARNING, reason, "It is freed all the same.");
        return UNUSED;
    }
    if (status == TMS_INTERRUPTED || status == TMS_FORKED) return PERHAPS_IN_USE; /* the call that waits returns it */
    if (tms_driver_is_gone(reason)) return UNUSED;
    tms_log_recurring(saver->log, TMS_LOG_FREE_DEFERRED, status == TMS_CAPTURE_IN_PROGRESS ? TMS_LOG_INFO : TMS_LOG_WARNING,
                      reason, "The memory goes back later.");
    return PERHAPS_IN_USE;
}

/* False: the capture that it was to wait for has ended meanwhile, and nobody would come back to it. */
static bool defer(tms_saver_t *saver, tms_segment_t *segment, use_t use) {
    pthread_mutex_lock(&saver->lock);
    bool deferred = use != UNTIL_CAPTURE_ENDS || tms_capture_visible(&saver->capture);
    if (deferred) {
        segment->next_in_transition = saver->deferred;
        saver->deferred = segment;
    }
    pthread_mutex_unlock(&saver->lock);
    return deferred;
}

void tms_saver_retire(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait) {
    tms_error_t reason;
    use_t use;
    do {
        use = wait_for_users(saver, segment, wait, &reason);
        if (use == UNUSED) {
            tms_saver_dispose(saver, segment);
            return;
        }
    } while (!defer(saver, segment, use));
}

static void retry_deferred(tms_saver_t *saver, tms_wait_t *wait) {
    pthread_mutex_lock(&saver->lock);
    tms_segment_t *segment = saver->deferred;
    saver->deferred = NULL;
    pthread_mutex_unlock(&saver->lock);
    while (segment) {
        tms_segment_t *next = segment->next_in_transition;
        tms_saver_retire(saver, segment, wait);
        segment = next;
    }
}

/* ---- damaged segments ---- */

/* Makes the damaged segments this thread's. PAUSING says that they have an owner, whom a free leaves the rest to. */
static tms_segment_t *take_damaged(tms_saver_t *saver) {
    tms_segment_t *first = NULL;
    pthread_mutex_lock(&saver->lock);
    for (tms_registry_node_t *node = saver->damaged ? saver->registry.first : NULL; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        if (segment->state != TMS_SEGMENT_DAMAGED) continue;
        segment->state = TMS_SEGMENT_PAUSING;
        segment->next_in_transition = first;
        first = segment;
    }
    pthread_mutex_unlock(&saver->lock);
    return first;
}

/* Tries again to take the memory away from one; it then is PAUSED, else DAMAGED as before. */
static void repair(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    tms_error_context_t context = tms_saver_context("reclaim", segment);
    tms_error_t reason;
    tms_error_clear(&reason);
    bool was_mapped = segment->mapped, unused = wait_for_users(saver, segment, wait, &reason) == UNUSED;
    bool whole = unused && tms_segment_depopulate(segment, driver, &context, &reason) == TMS_OK;
    if (unused && !whole) tms_log_recurring(saver->log, TMS_LOG_DAMAGED, TMS_LOG_WARNING, &reason, "It is still damaged.");
    pthread_mutex_lock(&saver->lock);
    if (was_mapped && !segment->mapped) tms_stats_subtract(&saver->stats.resident_bytes, tms_segment_reserved(segment));
    segment->state = whole ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_DAMAGED;
    memcpy(segment->refused_call, reason.call, sizeof segment->refused_call);
    segment->refused_result = reason.driver_result;
    if (whole) {
        saver->damaged--;
        tms_stats_add(&saver->stats.paused_bytes, tms_segment_reserved(segment));
    }
    bool freed = segment->free_requested;
    if (freed) tms_saver_unpublish(saver, segment);
    pthread_mutex_unlock(&saver->lock);
    if (freed) tms_saver_retire(saver, segment, wait);
    if (whole && !freed)
        tms_log_write(saver->log, TMS_LOG_INFO, "an allocation of %llu bytes with tag '%s' is whole again: paused",
                      (unsigned long long)context.bytes, context.tag);
}

static void repair_damaged(tms_saver_t *saver, tms_wait_t *wait) {
    for (tms_segment_t *next, *segment = take_damaged(saver); segment; segment = next) {
        next = segment->next_in_transition;
        repair(saver, segment, wait);
    }
}

/* ---- all of it ---- */

bool tms_saver_has_reclaimable(tms_saver_t *saver) {
    if (!tms_quarantine_is_empty(&saver->quarantine) || tms_devices_unreleased(saver->devices) > 0) return true;
    pthread_mutex_lock(&saver->lock);
    bool any = saver->deferred || saver->damaged;
    pthread_mutex_unlock(&saver->lock);
    return any;
}

void tms_saver_reclaim_within(tms_saver_t *saver, tms_wait_t *wait) {
    tms_devices_settle(saver->devices);
    /* Much of it would wait for the device, which would break a capture. */
    if (!tms_saver_has_reclaimable(saver) || tms_saver_captures(saver) > 0) return;
    tms_devices_reclaim(saver->devices);
    tms_quarantine_retry_part(&saver->quarantine, false);
    tms_host_store_retry(&saver->stores.host);
    retry_deferred(saver, wait);
    repair_damaged(saver, wait);
}

void tms_saver_reclaim(tms_saver_t *saver) { tms_saver_reclaim_within(saver, NULL); }
