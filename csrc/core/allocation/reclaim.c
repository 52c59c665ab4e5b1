#include "core/allocation/reclaim.h"

#include <string.h>

#include "core/allocation/free.h"
#include "core/model/captures.h"
#include "core/model/tag_bytes.h"

/* ---- deferred frees ---- */

static void retry_deferred(tms_saver_t *saver, tms_wait_t *wait) {
    pthread_mutex_lock(&saver->lock);
    tms_segment_t *segment = saver->deferred;
    saver->deferred = NULL;
    pthread_mutex_unlock(&saver->lock);
    while (segment) {
        tms_segment_t *next = segment->next_in_transition;
        tms_free_retire(saver, segment, wait);
        segment = next;
    }
}

/* ---- damaged segments ---- */

/* The damaged segments and their runs. This thread owns them until it publishes their new states. */
typedef struct damaged {
    tms_segment_t *segments;
    tms_run_t *runs;
    uint64_t mark; /* mark of the runs that were tried */
} damaged_t;

/* Takes ownership. This thread finishes frees that arrive until it publishes the new states. */
static damaged_t take_damaged(tms_saver_t *saver) {
    damaged_t taken = {.segments = NULL};
    pthread_mutex_lock(&saver->lock);
    taken.mark = ++saver->marks;
    for (tms_registry_node_t *node = saver->account.damaged ? saver->registry.first : NULL; node; node = node->next) {
        tms_segment_t *segment = tms_segment_of(node);
        if (segment->state != TMS_SEGMENT_DAMAGED) continue;
        tms_account_own(segment, TMS_SEGMENT_REPAIRING);
        segment->next_in_transition = taken.segments;
        taken.segments = segment;
        tms_run_own(segment->run, &taken.runs);
    }
    pthread_mutex_unlock(&saver->lock);
    return taken;
}

/* Retries to release the run of a damaged segment, and records the driver's answer in the run. An attempt that ends before
 * the driver answers, because the call is cancelled or a capture is under way, keeps the answer of an earlier one. */
static void try_release(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    tms_error_context_t context = tms_saver_context("reclaim", segment);
    tms_run_t *run = segment->run;
    tms_error_t reason;
    tms_quiesced_t quiesced;
    tms_error_clear(&reason);
    context.address = run->begin;
    context.bytes = tms_run_bytes(run);
    bool unused = tms_free_await_users(saver, segment, run->accessible, wait, &quiesced, &reason) == TMS_UNUSED;
    bool whole = unused && tms_run_depopulate(run, quiesced, driver, &context, &reason) == TMS_OK;
    if (unused && !whole)
        tms_log_recurring(saver->log, TMS_LOG_DAMAGED, TMS_LOG_WARNING, &reason,
                          "The memory is still damaged; later calls try again to release it.");
    pthread_mutex_lock(&saver->lock); /* a call that skips the segments reads these fields */
    if (reason.call[0] || !run->refused_call[0]) {
        run->refused_status = reason.status;
        memcpy(run->refused_call, reason.call, sizeof run->refused_call);
        run->refused_result = reason.driver_result;
    }
    pthread_mutex_unlock(&saver->lock);
}

/* Under the lock: a segment whose run was tried becomes PAUSED, or DAMAGED again. */
static void settle(tms_saver_t *saver, tms_segment_t *segment) {
    const tms_run_t *run = segment->run;
    const bool whole = !tms_run_has_memory(run);
    const tms_event_t event = {.kind = TMS_EVENT_REPAIR,
                               .status = whole ? TMS_OK : run->refused_status,
                               .driver_result = whole ? 0 : run->refused_result};
    if (whole) tms_run_detach(segment);
    tms_account_settle(&saver->account, segment, whole ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_DAMAGED, event);
}

/* Publishes the new states. *repaired counts the bytes of the segments that are PAUSED now. Returns the freed segments. */
static tms_segment_t *publish(tms_saver_t *saver, damaged_t *taken, tms_tag_bytes_t *repaired) {
    tms_segment_t *freed = NULL;
    pthread_mutex_lock(&saver->lock);
    for (tms_segment_t *next, *segment = taken->segments; segment; segment = next) {
        next = segment->next_in_transition;
        settle(saver, segment);
        if (segment->free_requested) {
            tms_saver_unpublish(saver, segment);
            segment->next_in_transition = freed;
            freed = segment;
        } else if (segment->state == TMS_SEGMENT_PAUSED) {
            tms_tag_bytes_add(repaired, segment->tag, tms_segment_reserved(segment));
        }
    }
    tms_free_disown_runs(saver, taken->runs, true, &freed);
    tms_shared_page_publish(&saver->shared_page);
    pthread_mutex_unlock(&saver->lock);
    return freed;
}

static void log_repaired(const tms_saver_t *saver, const tms_tag_bytes_t *repaired) {
    tms_error_t text;
    if (repaired->total == 0) return;
    tms_error_clear(&text);
    tms_tag_bytes_append(repaired, &text);
    tms_log_write(saver->log, TMS_LOG_INFO, "damaged memory was repaired and is paused now: %s", text.message);
}

static void repair_damaged(tms_saver_t *saver, tms_wait_t *wait) {
    damaged_t taken = take_damaged(saver);
    tms_tag_bytes_t repaired = {.named = 0};
    if (!taken.segments) return;
    for (tms_segment_t *segment = taken.segments; segment; segment = segment->next_in_transition) {
        if (segment->run->mark == taken.mark) continue;
        segment->run->mark = taken.mark;
        try_release(saver, segment, wait);
    }
    tms_segment_t *freed = publish(saver, &taken, &repaired);
    for (tms_segment_t *next, *segment = freed; segment; segment = next) {
        next = segment->next_in_transition;
        tms_free_retire(saver, segment, wait);
    }
    log_repaired(saver, &repaired);
}

/* ---- everything ---- */

bool tms_reclaim_is_needed(tms_saver_t *saver) {
    if (!tms_quarantine_is_empty(&saver->quarantine) || tms_devices_unreleased(saver->devices) > 0) return true;
    pthread_mutex_lock(&saver->lock);
    bool any = saver->deferred || saver->account.damaged;
    pthread_mutex_unlock(&saver->lock);
    return any;
}

void tms_reclaim_within(tms_saver_t *saver, tms_wait_t *wait) {
    tms_devices_settle(saver->devices);
    /* Most of the retries would wait for the device, which would invalidate a capture. */
    if (!tms_reclaim_is_needed(saver) || tms_capture_table_count(saver) > 0) return;
    tms_devices_reclaim(saver->devices);
    tms_quarantine_retry_part(&saver->quarantine, false);
    tms_backup_stores_retry(&saver->stores);
    retry_deferred(saver, wait);
    repair_damaged(saver, wait);
}

void tms_reclaim_all(tms_saver_t *saver) { tms_reclaim_within(saver, NULL); }
