#include "core/allocation/runs.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

#include "core/allocation/kinds.h"
#include "core/allocation/ranges.h"

/* ---- references ---- */

tms_run_t *tms_runs_make(const tms_segment_t *first, const tms_segment_t *last) {
    tms_run_t *run = calloc(1, sizeof *run);
    if (!run) return NULL;
    run->begin = first->node.begin;
    run->end = last->node.end;
    run->device = first->device;
    run->tag = first->tag;
    run->first = first->piece;
    return run;
}

void tms_runs_attach(tms_run_t *run, tms_segment_t *segment) {
    segment->run = run;
    run->segments++;
}

tms_status_t tms_runs_populate_own(tms_segment_t *segment, const tms_driver_table_t *driver,
                                   const tms_device_table_t *devices, tms_device_mask_t peers,
                                   const tms_error_context_t *context, tms_error_t *error) {
    if (!segment->run) {
        tms_run_t *run = tms_runs_make(segment, segment);
        if (!run) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
        tms_runs_attach(run, segment);
    }
    return tms_run_populate(segment->run, driver, devices, peers, context, error);
}

static void drop(tms_run_t *run) {
    if (--run->segments == 0) free(run);
}

void tms_runs_detach(tms_segment_t *segment) {
    if (segment->run) drop(segment->run);
    segment->run = NULL;
}

/* ---- slack ---- */

/* Under the lock: counts a change of a kind's slack, which was `before`. The caller publishes the page. */
static void recount(tms_saver_t *saver, tms_kind_t *kind, uint64_t before) {
    const uint64_t change = kind->space.backed_bytes - before;
    if (change == 0) return;
    if (before == 0) kind->row = tms_shared_page_row(&saver->page, kind->tag, kind->device);
    tms_stats_add(&saver->usage.slack[kind->device], change);
    tms_shared_page_change(&saver->page, kind->row, &(tms_shared_page_change_t){.slack_bytes = change});
}

bool tms_runs_take_slack(tms_saver_t *saver, tms_kind_t *kind, tms_segment_t *segment, uint64_t bytes) {
    const uint64_t before = kind->space.backed_bytes;
    tms_piece_t *piece = tms_space_take_backed(&kind->space, bytes, segment);
    if (!piece) return false;
    segment->piece = piece;
    segment->node.begin = piece->begin;
    segment->node.end = piece->end;
    tms_run_t *run = piece->backing;
    tms_runs_attach(run, segment);
    piece->backing = NULL;
    recount(saver, kind, before);
    return true;
}

/* Under the lock: the run has no slack any more. Its free pieces are not handed out until they are settled. */
static void forget_slack(tms_saver_t *saver, tms_run_t *run) {
    tms_kind_t *kind = tms_kind_of(run->first);
    const uint64_t before = kind->space.backed_bytes;
    tms_space_hold(run->first, run->end);
    tms_space_unback(run->first, run->end);
    recount(saver, kind, before);
}

/* ---- owners ---- */

void tms_runs_own(tms_run_t *run, tms_run_t **list) {
    if (run->owned) return;
    run->owned = true;
    run->segments++; /* the owner's reference */
    run->next_in_call = *list;
    *list = run;
    tms_space_hold(run->first, run->end);
}

void tms_runs_disown(tms_saver_t *saver, tms_run_t *run, bool damaged, tms_segment_t **freed) {
    while (run->waiting) {
        tms_segment_t *segment = run->waiting;
        run->waiting = segment->next_in_transition;
        segment->next_in_transition = *freed;
        *freed = segment;
    }
    run->owned = false;
    run->damaged = damaged;
    if (!tms_run_has_memory(run)) forget_slack(saver, run);
    if (!damaged) tms_space_settle(run->first, run->end);
    drop(run);
}

/* ---- the end of a run ---- */

/* The addresses of a run that nothing is mapped at go back. */
static void give_addresses_back(tms_saver_t *saver, tms_run_t *run) {
    pthread_mutex_lock(&saver->lock);
    tms_range_t *range = run->first->range;
    tms_space_settle(run->first, run->end);
    run->first = NULL;
    range = tms_ranges_remove_bare(saver, range);
    pthread_mutex_unlock(&saver->lock);
    tms_ranges_free(saver, range);
}

/* Releases a run to which nothing refers. 0: it is gone; else what it still holds. */
static tms_quarantine_mask_t release(tms_saver_t *saver, tms_run_t *run, tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&saver->devices->driver->table);
    const tms_error_context_t context = {.operation = "free",
                                         .device = run->device,
                                         .bytes = tms_run_bytes(run),
                                         .address = run->begin,
                                         .tag = run->tag->name};
    tms_status_t status = tms_run_depopulate(run, run->quiesced, driver, &context, error);
    bool gone = status == TMS_OK || tms_driver_is_gone(error);
    if (run->first && (gone || !run->mapped)) give_addresses_back(saver, run);
    if (!gone) return (run->has_handle ? TMS_QUARANTINE_BIT(HANDLE) : 0) | (run->first ? TMS_QUARANTINE_BIT(RANGE) : 0);
    free(run);
    return 0;
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    tms_run_t *run = (tms_run_t *)(void *)((char *)node - offsetof(tms_run_t, quarantined));
    tms_saver_t *saver = node->context;
    tms_error_t reason;
    tms_quarantine_mask_t holds = release(saver, run, &reason);
    if (holds) tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_WARNING, &reason, "It is still quarantined.");
    return holds;
}

static void end(tms_saver_t *saver, tms_run_t *run, tms_quiesced_t quiesced) {
    tms_error_t reason;
    run->quiesced = quiesced;
    tms_quarantine_mask_t holds = release(saver, run, &reason);
    if (!holds) return;
    tms_log_recurring(saver->log, TMS_LOG_QUARANTINED, TMS_LOG_ERROR, &reason,
                      "It is quarantined; later calls retry its release.");
    run->quarantined = (tms_quarantined_t){.retry = retry, .context = saver, .holds = holds};
    tms_quarantine_add(&saver->quarantine, &run->quarantined);
}

/* ---- frees ---- */

/* Under the lock: the segment's addresses are bare. Returns the range if all of it is. */
static tms_range_t *leave_addresses(tms_saver_t *saver, tms_segment_t *segment) {
    tms_range_t *range = segment->piece->range;
    tms_space_give_back(segment->piece, NULL, true);
    return tms_ranges_remove_bare(saver, range);
}

/* Under the lock: the segment's memory becomes slack. */
static void leave_slack(tms_saver_t *saver, tms_segment_t *segment) {
    tms_kind_t *kind = tms_kind_of(segment->piece);
    const uint64_t before = kind->space.backed_bytes;
    tms_space_give_back(segment->piece, segment->run, !segment->run->damaged);
    recount(saver, kind, before);
}

bool tms_runs_leave_to_owner(tms_segment_t *segment) {
    tms_run_t *run = segment->run;
    if (!run || !run->owned) return false;
    segment->next_in_transition = run->waiting;
    run->waiting = segment;
    return true;
}

tms_leaving_t tms_runs_leave(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced) {
    tms_range_t *range = NULL;
    tms_run_t *last_of = NULL;
    tms_leaving_t leaving = TMS_LEFT;
    pthread_mutex_lock(&saver->lock);
    tms_run_t *run = segment->run;
    if (tms_runs_leave_to_owner(segment)) {
        leaving = TMS_OWNER_RETIRES;
    } else if (!run || !tms_run_has_memory(run)) {
        if (segment->piece) range = leave_addresses(saver, segment);
        tms_runs_detach(segment);
    } else if (run->mapped && !tms_quiesced_covers(quiesced, run->accessible)) {
        leaving = TMS_MUST_WAIT;
    } else {
        tms_kind_note_free(segment);
        leave_slack(saver, segment);
        segment->run = NULL;
        if (--run->segments == 0) {
            last_of = run;
            forget_slack(saver, run);
        }
    }
    if (leaving == TMS_LEFT) segment->piece = NULL;
    tms_shared_page_publish(&saver->page);
    pthread_mutex_unlock(&saver->lock);
    tms_ranges_free(saver, range);
    if (last_of) end(saver, last_of, quiesced);
    return leaving;
}
