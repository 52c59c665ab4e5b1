#include "core/transition/guard_mode.h"

#include <errno.h>
#include <stdlib.h>

#include "core/allocation/free.h"
#include "core/model/ranges.h"

/* ---- the guard page ---- */

/* Fills the guard page. *idle: the device no longer writes to it. */
static tms_status_t fill(tms_transition_t *t, const tms_segment_t *page, bool *idle, const tms_error_context_t *context,
                         tms_error_t *error) {
    tms_copier_t copier = {.open = false};
    /* After the commit point nothing is cancelled. */
    tms_status_t status = tms_copier_open(&copier, &t->saver->stores.copying, page->device, NULL, context, error);
    if (status == TMS_OK)
        status =
            tms_copier_fill(&copier, tms_segment_address(page), tms_segment_reserved(page), TMS_GUARD_BYTE, context, error);
    if (status == TMS_OK) status = tms_copier_wait(&copier, context, error);
    *idle = tms_copier_close(&copier);
    return status;
}

/* Makes the guard page of a device. After a failure nothing is left except quarantined resources. */
static tms_status_t make_page(tms_transition_t *t, int device, tms_tag_t *tag, tms_segment_t **made,
                              const tms_error_context_t *context, tms_error_t *error) {
    const uint64_t bytes = t->devices->device[device].granularity;
    bool idle = true;
    tms_segment_t *page = calloc(1, sizeof *page);
    if (!page) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    *page = (tms_segment_t){.bytes = bytes, .device = device, .tag = tag, .state = TMS_SEGMENT_ACTIVE};
    tms_status_t status = tms_ranges_take_guard_page(t->saver, page, bytes, t->driver, context, error);
    if (status != TMS_OK) {
        free(page);
        return status;
    }
    status = tms_run_populate_own(page, t->driver, t->devices, 0, context, error);
    if (status == TMS_OK) status = fill(t, page, &idle, context, error);
    if (status == TMS_OK)
        *made = page;
    else if (idle)
        (void)tms_free_release_segment(t->saver, page, tms_quiesced_without_users());
    else
        tms_free_retire(t->saver, page, NULL);
    return status;
}

/* The guard page of the segment's device, made if there is none. The call holds a reference until tms_guard_mode_end, so
 * that a guard page is not made again for each segment if guarding fails. */
static tms_status_t need_page(tms_transition_t *t, const tms_segment_t *segment, tms_segment_t **page,
                              const tms_error_context_t *context, tms_error_t *error) {
    const tms_device_mask_t bit = (tms_device_mask_t)1 << segment->device;
    tms_guard_t *guard = &t->saver->guard;
    tms_segment_t *made = NULL;
    tms_status_t status = TMS_OK;
    pthread_mutex_lock(&t->saver->lock);
    tms_segment_t *found =
        t->done.guard_pages & bit ? guard->by_device[segment->device].page : tms_guard_hold(guard, segment->device);
    pthread_mutex_unlock(&t->saver->lock);
    if (!found) status = make_page(t, segment->device, segment->tag, &made, context, error);
    if (status != TMS_OK) return status;
    if (!found) {
        pthread_mutex_lock(&t->saver->lock);
        tms_guard_install(guard, made); /* only the call that has the turn makes pages */
        pthread_mutex_unlock(&t->saver->lock);
    }
    t->done.guard_pages |= bit;
    *page = found ? found : made;
    return TMS_OK;
}

/* ---- segments ---- */

void tms_guard_mode_cover(tms_transition_t *t, tms_segment_t *segment, tms_device_mask_t devices) {
    tms_error_context_t context = tms_transition_context_of(t, segment);
    tms_segment_t *page = NULL;
    tms_error_t reason;
    if (!t->requested.guards || segment->guarded > 0) return;
    tms_status_t status = need_page(t, segment, &page, &context, &reason);
    if (status == TMS_OK)
        status =
            tms_guard_map(segment, page->run->handle, tms_segment_reserved(page), devices, t->driver, &context, &reason);
    if (segment->guarded > 0) { /* also after a failure that could not be undone */
        pthread_mutex_lock(&t->saver->lock);
        (void)tms_guard_hold(&t->saver->guard, segment->device);
        pthread_mutex_unlock(&t->saver->lock);
        tms_stats_add(&t->saver->stats.guarded_bytes, segment->guarded);
    }
    if (status == TMS_OK) return;
    tms_stats_add(&t->saver->stats.guard_failures_total, 1);
    tms_log_recurring(t->saver->log, TMS_LOG_NOT_GUARDED, TMS_LOG_WARNING, &reason,
                      "The allocation is paused without a guard page: a late access to it loses the device.");
}

void tms_guard_mode_end(tms_transition_t *t) {
    for (int device = 0; device < t->devices->count; device++) {
        if (t->done.guard_pages >> device & 1) tms_free_drop_guard(t->saver, device);
    }
    t->done.guard_pages = 0;
}

tms_status_t tms_guard_mode_lift(tms_transition_t *t, int device, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    TMS_FOR_EACH(segment, t) {
        tms_error_context_t context = tms_transition_context_of(t, segment);
        if (status == TMS_OK && segment->device == device)
            status = tms_free_unguard(t->saver, segment, t->done.quiesced, &context, error);
    }
    return status;
}
