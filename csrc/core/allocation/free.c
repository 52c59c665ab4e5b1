#include "core/allocation/free.h"

#include <stddef.h>
#include <stdlib.h>

#include "core/allocation/orphans.h"
#include "core/model/captures.h"
#include "core/model/kinds.h"
#include "core/model/ranges.h"

/* ---- guard pages ---- */

void tms_free_drop_guard(tms_saver_t *saver, int device) {
    pthread_mutex_lock(&saver->lock);
    tms_segment_t *page = tms_guard_drop(&saver->guard, device);
    pthread_mutex_unlock(&saver->lock);
    if (page) (void)tms_free_release_segment(saver, page, tms_quiesced_without_users());
}

tms_status_t tms_free_unguard(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced,
                              const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    uint64_t bytes = segment->guarded;
    tms_status_t status = tms_guard_unmap(segment, quiesced, driver, context, error);
    if (status != TMS_OK || bytes == 0) return status;
    atomic_fetch_sub_explicit(&saver->stats.guarded_bytes, bytes, memory_order_relaxed);
    tms_free_drop_guard(saver, segment->device);
    return TMS_OK;
}

/* ---- the devices' locks ---- */

void tms_free_retain_lock(tms_saver_t *saver, tms_segment_t *segment) {
    if (segment->exclusive) return;
    tms_device_locks_retain(&saver->device_locks, segment->device);
    segment->exclusive = true;
}

void tms_free_release_lock(tms_saver_t *saver, tms_segment_t *segment) {
    if (!segment->exclusive) return;
    segment->exclusive = false;
    tms_device_locks_release(&saver->device_locks, (tms_device_mask_t)1 << segment->device);
}

/* ---- the memory of a run ---- */

/* Releases a run to which nothing refers. Returns 0 if the run is gone, else the resources that it still holds. */
static tms_quarantine_mask_t release_run(tms_saver_t *saver, tms_run_t *run, tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    const tms_error_context_t context = {.operation = "free",
                                         .device = run->device,
                                         .bytes = tms_run_bytes(run),
                                         .address = run->begin,
                                         .tag = run->tag->name};
    tms_status_t status = tms_run_depopulate(run, run->quiesced, driver, &context, error);
    bool gone = status == TMS_OK || tms_driver_is_gone(error);
    if (run->first && (gone || !run->mapped)) { /* nothing is mapped at its addresses */
        pthread_mutex_lock(&saver->lock);
        tms_range_t *range = run->first->range;
        tms_space_settle(run->first, run->end);
        run->first = NULL;
        range = tms_ranges_remove_bare(saver, range);
        pthread_mutex_unlock(&saver->lock);
        tms_ranges_free(saver, range);
    }
    if (!gone) return (run->has_handle ? TMS_QUARANTINE_BIT(HANDLE) : 0) | (run->first ? TMS_QUARANTINE_BIT(RANGE) : 0);
    free(run);
    return 0;
}

static tms_quarantine_mask_t retry_run(tms_quarantined_t *node) {
    tms_run_t *run = (tms_run_t *)(void *)((char *)node - offsetof(tms_run_t, quarantined));
    tms_saver_t *saver = node->context;
    tms_error_t reason;
    tms_quarantine_mask_t holds = release_run(saver, run, &reason);
    if (holds)
        tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_WARNING, &reason,
                          "The memory is still allocated; later calls try again.");
    return holds;
}

void tms_free_release_run(tms_saver_t *saver, tms_run_t *run, tms_quiesced_t quiesced) {
    tms_error_t reason;
    run->quiesced = quiesced;
    tms_quarantine_mask_t holds = release_run(saver, run, &reason);
    if (!holds) return;
    tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, &reason,
                      "The memory stays allocated; later calls try again to release it.");
    run->quarantined = (tms_quarantined_t){.retry = retry_run, .context = saver, .holds = holds};
    tms_quarantine_add(&saver->quarantine, &run->quarantined);
}

/* The result of drop_run. */
typedef enum drop_outcome {
    DROPPED,      /* the segment holds neither memory nor addresses any more */
    MUST_WAIT,    /* nothing has changed: a device has got access since the wait and must be waited for */
    OWNER_RETIRES /* a call owns the run and retires the segment at its end */
} drop_outcome_t;

/* Takes memory and addresses from a freed segment without a guard page. Memory becomes slack, or is released with the last
 * segment of the run. Resources that the driver fails to release are quarantined, with a log line. */
static drop_outcome_t drop_run(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced) {
    tms_range_t *range = NULL;
    tms_run_t *unused_run = NULL;
    drop_outcome_t outcome = DROPPED;
    pthread_mutex_lock(&saver->lock);
    tms_run_t *run = segment->run;
    if (tms_run_defer_to_owner(segment)) {
        outcome = OWNER_RETIRES;
    } else if (!run || !tms_run_has_memory(run)) {
        if (segment->span) {
            range = segment->span->range;
            tms_space_give_back(segment->span, NULL, true);
            range = tms_ranges_remove_bare(saver, range);
        }
        tms_run_detach(segment);
    } else if (run->mapped && !tms_quiesced_covers(quiesced, run->accessible)) {
        outcome = MUST_WAIT;
    } else {
        tms_kind_note_free(segment);
        tms_kind_keep_slack(saver, segment);
        if (tms_run_drop_reference(segment)) {
            unused_run = run;
            tms_kind_forget_slack(saver, run);
        }
    }
    if (outcome == DROPPED) segment->span = NULL;
    tms_shared_page_publish(&saver->shared_page);
    pthread_mutex_unlock(&saver->lock);
    tms_ranges_free(saver, range);
    if (unused_run) tms_free_release_run(saver, unused_run, quiesced);
    return outcome;
}

void tms_free_disown_runs(tms_saver_t *saver, tms_run_t *runs, bool damages, tms_segment_t **freed) {
    for (tms_run_t *next, *run = runs; run; run = next) {
        next = run->next_in_call;
        const bool has_memory = tms_run_has_memory(run);
        if (!has_memory) tms_kind_forget_slack(saver, run);
        tms_run_disown(run, damages && has_memory && !run->taken_over, freed);
    }
}

/* ---- release ---- */

/* Retries to release a segment whose guard page the driver has failed to unmap. The devices were waited for. */
static tms_quarantine_mask_t retry_segment(tms_quarantined_t *node) {
    tms_segment_t *segment = (tms_segment_t *)(void *)((char *)node - offsetof(tms_segment_t, quarantined));
    tms_saver_t *saver = node->context;
    tms_error_context_t context = tms_saver_context("free", segment);
    tms_error_t reason;
    tms_status_t status = tms_free_unguard(saver, segment, segment->quiesced, &context, &reason);
    if (status != TMS_OK && !tms_driver_is_gone(&reason)) {
        tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_WARNING, &reason,
                          "The addresses are still reserved; later calls try again.");
        return TMS_QUARANTINE_BIT(RANGE);
    }
    (void)drop_run(saver, segment, segment->quiesced); /* this succeeds, because the segment has no memory */
    free(segment);
    return 0;
}

bool tms_free_release_segment(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced) {
    tms_error_context_t context = tms_saver_context("free", segment);
    tms_error_t reason;
    tms_backup_destroy(&segment->backup, &saver->stores);
    tms_status_t status = tms_free_unguard(saver, segment, quiesced, &context, &reason);
    if (status != TMS_OK && !tms_driver_is_gone(&reason)) {
        tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, &reason,
                          "The addresses stay reserved; later calls try again to release them.");
        segment->quiesced = quiesced;
        segment->quarantined =
            (tms_quarantined_t){.retry = retry_segment, .context = saver, .holds = TMS_QUARANTINE_BIT(RANGE)};
        tms_free_release_lock(saver, segment);
        tms_quarantine_add(&saver->quarantine, &segment->quarantined);
        return true;
    }
    drop_outcome_t outcome = drop_run(saver, segment, quiesced);
    if (outcome != DROPPED) return outcome == OWNER_RETIRES;
    tms_free_release_lock(saver, segment);
    free(segment);
    return true;
}

/* ---- retire ---- */

tms_use_t tms_free_await_users(tms_saver_t *saver, const tms_segment_t *segment, tms_device_mask_t users, tms_wait_t *wait,
                               tms_quiesced_t *quiesced, tms_error_t *reason) {
    tms_error_context_t context = tms_saver_context("free", segment);
    if (users == 0) {
        *quiesced = tms_quiesced_without_users();
        return TMS_UNUSED;
    }
    if (tms_capture_table_count(saver) > 0) {
        (void)tms_error_set(reason, TMS_CAPTURE_IN_PROGRESS, &context, NULL);
        return TMS_USED_UNTIL_CAPTURE_ENDS;
    }
    if (wait && wait->cancelled) {
        (void)tms_wait_check(wait, &context, reason);
        return TMS_MAYBE_IN_USE;
    }
    tms_device_mask_t idle = 0;
    tms_status_t status = tms_quiesce(wait, saver->devices, users, quiesced, &idle, saver->log, &context, reason);
    if (status == TMS_OK) return TMS_UNUSED;
    bool none_runs = (users & ~idle) == 0; /* every device that failed is lost */
    if (!none_runs && (status == TMS_INTERRUPTED || status == TMS_FORKED))
        return TMS_MAYBE_IN_USE; /* the waiting call returns the status */
    if (none_runs || tms_driver_is_gone(reason)) {
        if (none_runs)
            tms_log_recurring(saver->log, TMS_LOG_FREED_ON_LOST_DEVICE, TMS_LOG_WARNING, reason,
                              "The memory is freed nevertheless.");
        *quiesced = tms_quiesced_idle_or_lost(users);
        return TMS_UNUSED;
    }
    tms_log_recurring(saver->log, TMS_LOG_FREE_DEFERRED, status == TMS_CAPTURE_IN_PROGRESS ? TMS_LOG_INFO : TMS_LOG_WARNING,
                      reason, "The memory is released later.");
    return TMS_MAYBE_IN_USE;
}

/* Defers the free. Returns false if the capture to wait for has ended, so that no later call would run the deferred free. */
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

/* Finds the devices that may use a freed segment. Returns false if a call owns its run, which retires the segment at its
 * end. */
static bool find_users(tms_saver_t *saver, tms_segment_t *segment, tms_device_mask_t *users) {
    pthread_mutex_lock(&saver->lock);
    bool deferred = tms_run_defer_to_owner(segment);
    if (!deferred) *users = tms_segment_accessible(segment);
    pthread_mutex_unlock(&saver->lock);
    return !deferred;
}

void tms_free_retire(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait) {
    tms_device_mask_t users = 0;
    tms_quiesced_t quiesced;
    tms_error_t reason;
    tms_use_t use;
    if (tms_segment_is_of_program(segment)) {
        (void)tms_free_release_segment(saver, segment, tms_quiesced_by_program());
        tms_orphans_end(saver);
        return;
    }
    do {
        if (!find_users(saver, segment, &users)) return;
        use = tms_free_await_users(saver, segment, users, wait, &quiesced, &reason);
        if (use == TMS_UNUSED && tms_free_release_segment(saver, segment, quiesced)) return;
    } while (use == TMS_UNUSED || !defer(saver, segment, use));
}

/* ---- free ---- */

tms_status_t tms_free_address(tms_saver_t *saver, uint64_t address, tms_error_t *error) {
    tms_segment_t *retired = NULL;
    pthread_mutex_lock(&saver->lock);
    tms_registry_node_t *node = tms_registry_find(&saver->registry, address);
    tms_segment_t *segment = node ? tms_segment_of(node) : NULL;
    if (segment && tms_segment_is_of_program(segment)) segment = NULL; /* the driver refuses it: it has no such allocation */
    bool freed_before = segment && segment->free_requested;
    bool at_start = segment && tms_segment_address(segment) == address;
    tms_error_context_t context = {.operation = "free", .device = TMS_NO_DEVICE, .address = address};
    if (segment) context = tms_saver_context("free", segment);
    if (at_start && !freed_before && !atomic_load(&saver->forked)) {
        if (tms_segment_has_owner(segment)) {
            segment->free_requested = true; /* the owner finishes the free */
        } else {
            tms_saver_unpublish(saver, segment);
            tms_shared_page_publish(&saver->shared_page);
            retired = segment;
        }
    }
    pthread_mutex_unlock(&saver->lock);

    if (!segment) {
        if (error) {
            tms_error_clear(error);
            error->status = TMS_NOT_MANAGED;
        }
        return TMS_NOT_MANAGED;
    }
    if (atomic_load(&saver->forked)) return TMS_OK; /* the memory belongs to the parent */
    if (!at_start)
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context,
                             "address 0x%llx lies inside an allocation that starts at 0x%llx", (unsigned long long)address,
                             (unsigned long long)context.address);
    if (freed_before) return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "the allocation has been freed already");
    if (retired) tms_free_retire(saver, retired, NULL);
    return TMS_OK;
}
