#include "core/transition/pause.h"

#include "backup/pass.h"
#include "core/allocation/free.h"
#include "core/model/turn.h"
#include "core/transition/completion.h"
#include "core/transition/crew.h"
#include "core/transition/discard.h"
#include "core/transition/guard_mode.h"
#include "core/transition/observers.h"
#include "core/transition/save.h"
#include "core/transition/steps.h"
#include "core/transition/verification.h"

/* ---- contents ---- */

/* Returns the kind of backup that the call or the region chooses for a segment. */
static tms_backup_kind_t chosen_kind(const tms_transition_t *t, const tms_segment_t *segment) {
    const tms_selection_t *selection = t->requested.selection;
    return selection->has_backup ? (tms_backup_kind_t)selection->backup : segment->backup.kind;
}

/* Returns the kind of backup of a segment in this pause. `live` is the result of find_live, or NULL. */
static tms_backup_kind_t kind_of(const tms_transition_t *t, const tms_segment_t *segment, const tms_live_t *live) {
    tms_backup_kind_t kind = chosen_kind(t, segment);
    const tms_selection_t *selection = t->requested.selection;
    bool may_be_preserved = kind == TMS_BACKUP_NONE && !selection->has_backup && selection->preserves && live;
    return may_be_preserved && tms_live_lists(live, tms_segment_address(segment)) ? TMS_BACKUP_PINNED : kind;
}

static bool keeps_contents(const tms_transition_t *t) {
    if (t->requested.selection->preserves) return true;
    TMS_FOR_EACH(segment, t) {
        if (chosen_kind(t, segment) != TMS_BACKUP_NONE) return true;
    }
    return false;
}

static tms_status_t choose_all(tms_transition_t *t, const tms_live_t *live, tms_error_t *error) {
    TMS_FOR_EACH(segment, t) {
        const tms_backup_kind_t kind = kind_of(t, segment, live);
        segment->only_preserved = kind != chosen_kind(t, segment);
        tms_status_t status = tms_save_choose(t, segment, &segment->backup, kind, live, error);
        if (status != TMS_OK) return status;
    }
    return TMS_OK;
}

/* Computes the fingerprints without which a store cannot plan. */
static tms_status_t find_fingerprints(const tms_transition_t *t, tms_pass_t *pass, tms_error_t *error) {
    TMS_FOR_EACH(segment, t) {
        tms_backup_t *backup = &segment->backup;
        if (tms_backup_needs_fingerprints(backup, &t->saver->stores))
            tms_pass_add(pass, backup, &backup->planned, tms_segment_address(segment), segment->device);
    }
    return tms_pass_perform(pass, error);
}

/* Plans the backup of every segment. *copying becomes the devices that own a segment with contents to copy. `pass` is
 * empty. */
static tms_status_t plan_all(tms_transition_t *t, tms_pass_t *pass, const tms_live_t *live, tms_device_mask_t *copying,
                             tms_error_t *error) {
    tms_status_t status = choose_all(t, live, error);
    if (status == TMS_OK) status = find_fingerprints(t, pass, error);
    TMS_FOR_EACH(segment, t) {
        if (status == TMS_OK) status = tms_save_plan(t, segment, segment->backup.policy, copying, error);
        if (status != TMS_OK) break;
        const uint64_t bytes = tms_backup_copied(&segment->backup)->bytes;
        t->planned.total_bytes += bytes;
        t->planned.unchanged_bytes += segment->backup.planned.bytes - bytes;
    }
    return status;
}

static tms_status_t save_device(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error) {
    tms_phase_t copying = {.began = tms_observers_now(t)};
    TMS_FOR_EACH(segment, t) {
        if (segment->device != device) continue;
        const uint64_t bytes = tms_backup_copied(&segment->backup)->bytes;
        copying.allocations += bytes > 0;
        copying.bytes += bytes;
    }
    tms_observers_push(t, TMS_PHASE_COPY, copying.bytes);
    copying.status = tms_save_copy_counted(t, device, &t->done.copied_bytes, wait, error);
    tms_observers_pop(t);
    tms_observers_record_phase(t, TMS_PHASE_COPY, device, &copying);
    return copying.status;
}

/* ---- what is live ---- */

/* Calls find_live, once the devices are idle. *known becomes `live`, or NULL if the live bytes are unknown. `interrupted`
 * reports a failure of the callback. */
static tms_status_t find_live(tms_transition_t *t, tms_live_t *live, const tms_live_t **known, tms_error_t *error) {
    const tms_selection_t *selection = t->requested.selection;
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    *known = NULL;
    if (!selection->find_live || !keeps_contents(t)) return TMS_OK;
    tms_turn_callback_begin(t->saver);
    if (selection->find_live(selection->live_context, live) == 0) *known = live;
    tms_turn_callback_end(t->saver);
    return tms_wait_poll_now(&t->wait, &context, error);
}

/* ---- what has changed ---- */

/* Returns whether a later pause can compare with the backup that this pause makes. A resume may retain a backup although its
 * region does not. */
static bool may_be_retained(const tms_transition_t *t, const tms_segment_t *segment) {
    const tms_backup_t *backup = &segment->backup;
    return backup->saved || tms_saver_host_policy(t->saver, backup->policy) == TMS_HOST_RETAIN;
}

/* Starts to compute the fingerprints of what the retained backups hold. They hold the same parts of the segments in most
 * pauses, so that this can be done before it is known what is live. */
static void begin_comparison(const tms_transition_t *t, tms_pass_t *pass) {
    TMS_FOR_EACH(segment, t) {
        tms_backup_t *backup = &segment->backup;
        if (backup->saved && backup->fingerprints.kept && chosen_kind(t, segment) == backup->held.kind)
            tms_pass_add(pass, backup, &backup->held, tms_segment_address(segment), segment->device);
    }
    tms_pass_start(pass);
}

/* Starts to compute the fingerprints that are still missing, of what is to be copied. */
static void begin_fingerprints(const tms_transition_t *t, tms_pass_t *pass) {
    TMS_FOR_EACH(segment, t) {
        tms_backup_t *backup = &segment->backup;
        if (backup->fingerprints.fresh || !may_be_retained(t, segment)) continue;
        if (tms_backup_can_compare(&t->saver->stores, backup->planned.kind))
            tms_pass_add(pass, backup, &backup->planned, tms_segment_address(segment), segment->device);
    }
    tms_pass_start(pass);
}

/* Finishes a pass, unless this is a forked child, where its kernels belong to the parent. Returns the first failure of the
 * call. */
static tms_status_t finish(tms_pass_t *pass, tms_status_t status, tms_error_t *error) {
    if (status == TMS_FORKED) return status;
    tms_status_t finished = tms_pass_finish(pass, status == TMS_OK ? error : NULL);
    return status == TMS_OK ? finished : status;
}

/* ---- the steps ---- */

/* *known becomes `live`, or NULL if the live bytes are unknown. */
static tms_status_t plan(tms_transition_t *t, tms_pass_t *pass, tms_live_t *live, const tms_live_t **known,
                         tms_device_mask_t *copying, tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    begin_comparison(t, pass);
    tms_status_t status = find_live(t, live, known, error);
    status = finish(pass, status, error);
    if (status == TMS_OK) status = plan_all(t, pass, *known, copying, error);
    return status == TMS_OK ? tms_backup_batch_start(&t->saver->stores, &t->planned.batch, &context, error) : status;
}

static tms_status_t copy(tms_transition_t *t, tms_pass_t *pass, tms_device_mask_t copying, tms_error_t *error) {
    begin_fingerprints(t, pass);
    tms_status_t status = tms_crew_perform(t, copying, save_device, error);
    return finish(pass, status, error);
}

/* From here on no memory of the call can be taken over. */
static void begin_releasing(tms_transition_t *t) {
    pthread_mutex_lock(&t->saver->lock);
    TMS_FOR_EACH(segment, t) segment->run->releasing = !segment->run->taken_over;
    pthread_mutex_unlock(&t->saver->lock);
}

static tms_status_t save(tms_transition_t *t, tms_error_t *error) {
    tms_device_mask_t copying = 0;
    tms_live_t live = {0};
    const tms_live_t *known = NULL;
    tms_pass_t pass = {.stores = &t->saver->stores, .wait = &t->wait, .operation = t->requested.operation};
    const uint64_t began = tms_observers_begin_phase(t, TMS_PHASE_PLAN);
    tms_status_t status = plan(t, &pass, &live, &known, &copying, error);
    tms_observers_end_phase(t, TMS_PHASE_PLAN, began, status);
    if (status == TMS_OK) status = copy(t, &pass, copying, error);
    if (status == TMS_FORKED) return status;
    tms_backup_batch_end(&t->saver->stores, &t->planned.batch);
    if (status == TMS_OK) begin_releasing(t);
    if (status == TMS_OK && t->saver->config->verify_backups && t->planned.unchanged_bytes > 0)
        status = tms_verification_check(t, known, error);
    if (status == TMS_OK) {
        /* Another process may have written a shared object that this one had planned to copy. */
        const uint64_t copied = atomic_load(&t->done.copied_bytes);
        t->done.report.copied_bytes = copied;
        t->done.report.unchanged_bytes = t->planned.unchanged_bytes + t->planned.total_bytes - copied;
        t->planned.total_bytes = copied;
        tms_steps_report_progress(t);
    }
    return status;
}

/* The copies of memory that the program has taken over are of no use. Their segments end with the call. */
static void commit(tms_transition_t *t) {
    tms_backup_stores_t *stores = &t->saver->stores;
    TMS_FOR_EACH(segment, t) {
        if (segment->run->releasing)
            tms_backup_commit(&segment->backup, stores);
        else
            tms_backup_cancel(&segment->backup, stores);
    }
}

static void cancel(tms_transition_t *t) { TMS_FOR_EACH(segment, t) tms_backup_cancel(&segment->backup, &t->saver->stores); }

/* What the driver has failed to release, with its first failure. */
typedef struct refused {
    uint64_t allocations, bytes;
    tms_status_t status;
    tms_error_t error;
} refused_t;

static void note_refused(const tms_transition_t *t, refused_t *refused, tms_status_t status, const tms_error_t *reason) {
    tms_log_recurring(t->saver->log, TMS_LOG_DAMAGED, TMS_LOG_ERROR, reason,
                      "The memory is damaged: it stays allocated, and later calls try again to release it.");
    if (refused->status != TMS_OK) return;
    refused->status = status;
    refused->error = *reason;
}

static void report_refused(const refused_t *refused, tms_error_t *error) {
    const bool one = refused->allocations == 1;
    if (refused->allocations == 0 || !error) return;
    *error = refused->error;
    tms_error_append(error, " %llu allocation%s (", (unsigned long long)refused->allocations, one ? "" : "s");
    tms_error_append_bytes(error, refused->bytes);
    tms_error_append(error,
                     ") could not be released and %s damaged; later calls try again to release %s. All other selected "
                     "allocations are paused.",
                     one ? "is" : "are", one ? "it" : "them");
}

/* Releases the memory, after the commit point. It continues after a failure, and reports the first one. */
static tms_status_t release(tms_transition_t *t, tms_quiesced_t quiesced, tms_error_t *error) {
    refused_t refused = {.status = TMS_OK};
    const uint64_t mark = tms_steps_mark(t);
    TMS_FOR_EACH(segment, t) {
        tms_run_t *run = segment->run;
        if (!run->releasing) continue;
        if (run->mark != mark) {
            tms_error_t reason;
            const tms_error_context_t context = tms_transition_context_of_run(t, run);
            run->mark = mark;
            run->reached = run->accessible;
            tms_status_t status = tms_run_depopulate(run, quiesced, t->driver, &context, &reason);
            if (status != TMS_OK) note_refused(t, &refused, status, &reason);
        }
        if (!tms_run_has_memory(run)) {
            tms_guard_mode_cover(t, segment, run->reached);
            continue;
        }
        refused.allocations++;
        refused.bytes += tms_segment_reserved(segment);
    }
    tms_guard_mode_end(t);
    TMS_FOR_EACH(segment, t) {
        if (segment->run->releasing) tms_free_release_lock(t->saver, segment);
    }
    report_refused(&refused, error);
    return refused.status;
}

/* ---- the order ---- */

static tms_status_t pause_all(tms_transition_t *t, tms_error_t *error) {
    tms_quiesced_t quiesced;
    /* Waiting is the first step, although host memory could be prepared during the wait: a cancelled call would have to
     * unpin that memory, which waits for the device and blocks launches of all threads until then. */
    tms_status_t status = tms_steps_quiesce(t, &quiesced, error);
    if (status == TMS_OK) status = save(t, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the segments on the list belong to the parent */
    bool committed = status == TMS_OK;
    if (committed) {
        commit(t);
        const uint64_t began = tms_observers_begin_phase(t, TMS_PHASE_UNMAP);
        status = release(t, quiesced, error);
        tms_observers_end_phase(t, TMS_PHASE_UNMAP, began, status);
    } else {
        cancel(t);
    }
    tms_completion_finish(t, committed);
    return status;
}

/* The pause of a call with backup="discard". */
static tms_status_t pause_and_discard(tms_transition_t *t, tms_error_t *error) {
    tms_discard_t discard;
    tms_status_t status = tms_discard_prepare(t, &discard, error);
    if (status != TMS_OK) {
        tms_completion_finish(t, false);
        return status;
    }
    if (t->planned.first) status = pause_all(t, error);
    tms_discard_end(t, &discard, status == TMS_OK);
    return status;
}

tms_status_t tms_pause_perform(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                               tms_error_t *error) {
    const bool discards = selection->has_backup && selection->backup == TMS_BACKUP_NONE;
    tms_transition_t t = {.saver = saver,
                          .requested = {.selection = selection,
                                        .operation = "pause",
                                        .from = TMS_SEGMENT_ACTIVE,
                                        .through = TMS_SEGMENT_PAUSING,
                                        .to = TMS_SEGMENT_PAUSED,
                                        .discards = discards},
                          .act = discards ? pause_and_discard : pause_all,
                          .calls = &saver->stats.pauses,
                          .report = report};
    const tms_status_t status = tms_steps_perform(&t, error);
    tms_backup_stores_after_pause(&saver->stores);
    return status;
}

/* ---- the check ---- */

/* Plans every backup as a pause does, and cancels the plans. Computes fingerprints only for a store that plans by them. */
static tms_status_t plan_and_cancel(tms_transition_t *t, tms_error_t *error) {
    const tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    tms_device_mask_t copying = 0;
    tms_live_t live = {0};
    const tms_live_t *known = NULL;
    tms_pass_t pass = {.stores = &t->saver->stores, .wait = &t->wait, .operation = t->requested.operation};
    tms_quiesced_t quiesced;
    tms_status_t status = tms_steps_quiesce(t, &quiesced, error);
    if (status == TMS_OK) status = find_live(t, &live, &known, error);
    if (status == TMS_OK) status = plan_all(t, &pass, known, &copying, error);
    if (status == TMS_OK) status = tms_backup_batch_check_room(&t->saver->stores, &t->planned.batch, &context, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the segments on the list belong to the parent */
    tms_backup_batch_end(&t->saver->stores, &t->planned.batch);
    cancel(t);
    tms_completion_finish(t, false);
    return status;
}

tms_status_t tms_pause_check(tms_saver_t *saver, const tms_selection_t *selection, tms_error_t *error) {
    tms_transition_t t = {.saver = saver,
                          .requested = {.selection = selection,
                                        .operation = "check_pause",
                                        .from = TMS_SEGMENT_ACTIVE,
                                        .through = TMS_SEGMENT_PAUSING,
                                        .to = TMS_SEGMENT_ACTIVE},
                          .act = plan_and_cancel};
    const tms_status_t status = tms_steps_perform(&t, error);
    tms_backup_stores_after_pause(&saver->stores);
    return status;
}
