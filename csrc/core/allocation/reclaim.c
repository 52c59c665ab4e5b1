#include "core/allocation/reclaim.h"

#include <string.h>

#include "core/allocation/retire.h"
#include "core/captures.h"

/* ---- deferred frees ---- */

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

/* Takes ownership of the damaged segments. This thread finishes frees that arrive meanwhile. */
static tms_segment_t *take_damaged(tms_saver_t *saver) {
    tms_segment_t *first = NULL;
    pthread_mutex_lock(&saver->lock);
    for (tms_registry_node_t *node = saver->damaged ? saver->registry.first : NULL; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        if (segment->state != TMS_SEGMENT_DAMAGED) continue;
        segment->state = TMS_SEGMENT_REPAIRING;
        segment->next_in_transition = first;
        first = segment;
    }
    pthread_mutex_unlock(&saver->lock);
    return first;
}

/* Retries to release the memory of a damaged segment: it becomes PAUSED, or stays DAMAGED. */
static void repair(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    tms_error_context_t context = tms_saver_context("reclaim", segment);
    tms_error_t reason;
    tms_error_clear(&reason);
    tms_quiesced_t quiesced;
    bool was_mapped = segment->mapped;
    bool unused = tms_saver_await_users(saver, segment, wait, &quiesced, &reason) == TMS_UNUSED;
    bool whole = unused && tms_segment_depopulate(segment, quiesced, driver, &context, &reason) == TMS_OK;
    if (unused && !whole) tms_log_recurring(saver->log, TMS_LOG_DAMAGED, TMS_LOG_WARNING, &reason, "It is still damaged.");
    pthread_mutex_lock(&saver->lock);
    if (was_mapped && !segment->mapped) tms_usage_unmap(&saver->usage, segment);
    segment->changed_at = tms_wait_now();
    segment->state = whole ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_DAMAGED;
    memcpy(segment->refused_call, reason.call, sizeof segment->refused_call);
    segment->refused_result = reason.driver_result;
    if (whole) {
        saver->damaged--;
        tms_stats_add(&saver->stats.paused_bytes, tms_segment_reserved(segment));
    }
    tms_footprint_record(&saver->footprints, segment,
                         (tms_event_t){.kind = TMS_EVENT_REPAIR,
                                       .status = whole ? TMS_OK : reason.status,
                                       .driver_result = whole ? 0 : reason.driver_result});
    bool freed = segment->free_requested;
    if (freed) tms_saver_unpublish(saver, segment);
    tms_shared_page_publish(&saver->page);
    pthread_mutex_unlock(&saver->lock);
    if (freed) tms_saver_retire(saver, segment, wait);
    if (whole && !freed)
        tms_log_write(saver->log, TMS_LOG_INFO,
                      "a damaged allocation of %llu bytes with tag '%s' was repaired and is paused now",
                      (unsigned long long)context.bytes, context.tag);
}

static void repair_damaged(tms_saver_t *saver, tms_wait_t *wait) {
    for (tms_segment_t *next, *segment = take_damaged(saver); segment; segment = next) {
        next = segment->next_in_transition;
        repair(saver, segment, wait);
    }
}

/* ---- everything ---- */

bool tms_saver_has_reclaimable(tms_saver_t *saver) {
    if (!tms_quarantine_is_empty(&saver->quarantine) || tms_devices_unreleased(saver->devices) > 0) return true;
    pthread_mutex_lock(&saver->lock);
    bool any = saver->deferred || saver->damaged;
    pthread_mutex_unlock(&saver->lock);
    return any;
}

void tms_saver_reclaim_within(tms_saver_t *saver, tms_wait_t *wait) {
    tms_devices_settle(saver->devices);
    /* Most of the retries would wait for the device, which would invalidate a capture. */
    if (!tms_saver_has_reclaimable(saver) || tms_saver_captures(saver) > 0) return;
    tms_devices_reclaim(saver->devices);
    tms_quarantine_retry_part(&saver->quarantine, false);
    tms_backup_stores_retry(&saver->stores);
    retry_deferred(saver, wait);
    repair_damaged(saver, wait);
}

void tms_saver_reclaim(tms_saver_t *saver) { tms_saver_reclaim_within(saver, NULL); }
