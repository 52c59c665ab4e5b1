#include "core/transition/resume.h"

#include <unistd.h>

#include "base/random.h"
#include "base/thread.h"
#include "core/allocation/free.h"
#include "core/allocation/reclaim.h"
#include "core/model/kinds.h"
#include "core/model/peers.h"
#include "core/model/turn.h"
#include "core/transition/completion.h"
#include "core/transition/crew.h"
#include "core/transition/guard_mode.h"
#include "core/transition/layout.h"
#include "core/transition/observers.h"
#include "core/transition/pending.h"
#include "core/transition/restore.h"
#include "core/transition/steps.h"

/* The delay before another attempt, doubled from the first to the maximum, with jitter, so that two processes that fail
 * together do not retry together. */
#define FIRST_DELAY_SECONDS 0.001
#define MAX_DELAY_SECONDS   0.1

/* The memory that the selected segments need now, by device. */
typedef struct demand {
    tms_device_mask_t owners; /* damaged segments count: they may be repaired before the next attempt */
    uint64_t bytes[TMS_MAX_DEVICES];
    uint64_t guarded[TMS_MAX_DEVICES];  /* number of segments that are guarded */
    uint64_t returned[TMS_MAX_DEVICES]; /* bytes of the guard page, if no other segment needs it */
} demand_t;

/* A device that lacks memory; `missing` is 0 if none does. */
typedef struct shortage {
    int device;
    uint64_t needed, free, missing;
} shortage_t;

typedef struct backoff {
    double delay; /* seconds */
    uint32_t random;
} backoff_t;

/* ---- one attempt ---- */

/* Whether a device may still be copying to the run. If so, the memory stays mapped and is damaged, with its backup, until
 * the device has been synchronized. */
static bool may_be_in_use(tms_transition_t *t, const tms_run_t *run) {
    return run->mapped && (atomic_load(&t->done.busy) >> run->device & 1);
}

/* Restores the guard page of a segment that stays PAUSED. */
static void guard_again(tms_transition_t *t, tms_segment_t *segment) {
    tms_error_context_t context = tms_transition_context_of(t, segment);
    tms_device_mask_t peers = 0;
    if (!t->requested.guards) return;
    (void)tms_devices_peers(t->saver->devices, segment->device, &peers, &context, NULL); /* else only the owner reads */
    tms_guard_mode_cover(t, segment, peers | (tms_device_mask_t)1 << segment->device);
}

/* Releases a run that this call has made. */
static void undo_run(tms_transition_t *t, tms_run_t *run) {
    tms_error_t reason;
    const tms_error_context_t context = tms_transition_context_of_run(t, run);
    if (may_be_in_use(t, run)) {
        t->done.damaged = true;
        return;
    }
    if (tms_run_depopulate(run, tms_quiesced_without_users(), t->driver, &context, &reason) == TMS_OK) return;
    t->done.damaged = true;
    tms_log_recurring(t->saver->log, TMS_LOG_DAMAGED, TMS_LOG_ERROR, &reason,
                      "This call was part of undoing a failed resume. The memory is damaged: it stays allocated, and later "
                      "calls try again to release it.");
}

static void undo(tms_transition_t *t) {
    const uint64_t began = tms_observers_begin_phase(t, TMS_PHASE_UNMAP), mark = tms_steps_mark(t);
    TMS_FOR_EACH(segment, t) {
        if (segment->run && segment->run->mark != mark) {
            segment->run->mark = mark;
            undo_run(t, segment->run);
        }
        if (!tms_segment_has_memory(segment)) guard_again(t, segment);
    }
    tms_guard_mode_end(t);
    tms_observers_end_phase(t, TMS_PHASE_UNMAP, began, TMS_OK);
}

static tms_contents_t contents_of(const tms_transition_t *t, const tms_segment_t *segment) {
    if (!tms_segment_lacks_contents(segment)) return TMS_CONTENTS_RESTORED;
    if (t->requested.selection->zero) return TMS_CONTENTS_ZEROED;
    return t->requested.guards ? TMS_CONTENTS_GUARD : TMS_CONTENTS_UNDEFINED;
}

static void commit(tms_transition_t *t) {
    tms_host_policy_t requested = (tms_host_policy_t)t->requested.selection->host_policy;
    const uint64_t began = tms_observers_begin_phase(t, TMS_PHASE_DISCARD);
    TMS_FOR_EACH(segment, t) {
        segment->contents = contents_of(t, segment);
        tms_host_policy_t policy = requested != TMS_HOST_DEFAULT ? requested : segment->backup.policy;
        tms_backup_discard(&segment->backup, &t->saver->stores, tms_saver_host_policy(t->saver, policy));
        if (t->requested.selection->exclusive) tms_free_retain_lock(t->saver, segment);
    }
    tms_observers_end_phase(t, TMS_PHASE_DISCARD, began, TMS_OK);
}

static tms_status_t resume_all(tms_transition_t *t, tms_error_t *error) {
    TMS_FOR_EACH(segment, t) t->planned.total_bytes += tms_backup_held_bytes(&segment->backup);
    tms_pending_expect(t->pending, t->planned.incomplete ? 0 : t->planned.owners);
    tms_layout_plan(t);
    tms_restore_sort(t);
    /* Late reads of guarded memory may be in flight. Without guarded memory there is nothing to wait for. */
    tms_status_t status = t->planned.affected ? tms_steps_quiesce(t, &t->done.quiesced, error) : TMS_OK;
    if (status == TMS_OK) status = tms_crew_perform(t, t->planned.owners, tms_restore_device, error);
    if (status == TMS_FORKED) return status; /* in a forked child: the segments on the list belong to the parent */
    if (status == TMS_OK) {
        t->done.report.copied_bytes = t->planned.total_bytes;
        tms_steps_report_progress(t);
        commit(t);
    } else if (tms_pending_may_undo(t->pending)) {
        undo(t);
    } else {
        /* Kernels of the program may use the memory. The segments become damaged, with their memory and backups. */
        t->done.damaged = true;
    }
    tms_completion_finish(t, status == TMS_OK);
    return status;
}

/* ---- waiting for memory ---- */

static demand_t measure_demand(tms_transition_t *t) {
    demand_t demand = {0};
    pthread_mutex_lock(&t->saver->lock);
    tms_steps_begin_scan(t);
    for (tms_registry_node_t *node = t->saver->registry.first; node; node = node->next) {
        const tms_segment_t *segment = tms_segment_of(node);
        bool selected = tms_steps_selects(t, segment);
        if (selected || tms_steps_skips_damaged(t, segment)) demand.owners |= (tms_device_mask_t)1 << segment->device;
        if (selected) demand.bytes[segment->device] += tms_segment_reserved(segment);
        if (selected && segment->guarded > 0) demand.guarded[segment->device]++;
    }
    for (int device = 0; device < t->devices->count; device++) {
        const tms_segment_t *page = t->saver->guard.by_device[device].page;
        if (page && demand.guarded[device] == t->saver->guard.by_device[device].references)
            demand.returned[device] = tms_segment_reserved(page);
    }
    pthread_mutex_unlock(&t->saver->lock);
    return demand;
}

/* Replaces *found if the device lacks memory, or if no device was examined before. Skips devices without selected memory. */
static tms_status_t examine(tms_transition_t *t, const demand_t *demand, int device, shortage_t *found, tms_error_t *error) {
    if (device < 0 || !(demand->owners >> device & 1)) return TMS_OK;
    uint64_t free_bytes = 0, total_bytes = 0, needed = demand->bytes[device];
    tms_error_context_t context = tms_transition_context(t, device);
    tms_status_t status = tms_devices_memory(t->saver->devices, device, &free_bytes, &total_bytes, &context, error);
    if (status != TMS_OK) return status;
    free_bytes += demand->returned[device];
    uint64_t missing = needed > free_bytes ? needed - free_bytes : 0;
    if (found->device == TMS_NO_DEVICE || missing > 0)
        *found = (shortage_t){.device = device, .needed = needed, .free = free_bytes, .missing = missing};
    return TMS_OK;
}

/* Finds a device that lacks memory. Examines `likely` first, unless it is TMS_NO_DEVICE. If no device lacks memory, finds
 * the first device that was examined. */
static tms_status_t find_shortage(tms_transition_t *t, int likely, shortage_t *shortage, tms_error_t *error) {
    demand_t demand = measure_demand(t);
    shortage_t found = {.device = TMS_NO_DEVICE};
    tms_status_t status = examine(t, &demand, likely, &found, error);
    for (int device = 0; status == TMS_OK && device < t->devices->count && found.missing == 0; device++)
        status = examine(t, &demand, device, &found, error);
    if (status == TMS_OK) *shortage = found;
    return status;
}

/* Rewrites the error of the last attempt: needed, free and missing memory first, then the rest as points. */
static void describe_shortage(tms_transition_t *t, tms_error_t *error) {
    shortage_t shortage;
    if (!error || find_shortage(t, error->device, &shortage, NULL) != TMS_OK || shortage.device == TMS_NO_DEVICE) return;
    error->device = shortage.device;
    error->message[0] = '\0';
    tms_error_append(error, "%s: device %d needs ", error->operation, shortage.device);
    tms_error_append_bytes(error, shortage.needed);
    tms_error_append(error, " and has ");
    tms_error_append_bytes(error, shortage.free);
    if (shortage.missing > 0) {
        tms_error_append(error, " free: ");
        tms_error_append_bytes(error, shortage.missing);
        tms_error_append(error, " are missing");
    } else {
        tms_error_append(error, " free now, but had too little free memory before");
    }
    if (t->requested.selection->timeout_seconds > 0)
        tms_error_append(error, " after %.1f seconds", tms_wait_elapsed(&t->wait));
    tms_error_append(
        error,
        ".\n- Everything stays paused, and resume() can be called again.\n- If this process holds the memory, "
        "pause other tags, delete tensors and empty the framework's cache.\n- If other processes hold the memory, "
        "pause or end them; resume(timeout=seconds) waits for them.\n- %s failed with %s (%d)",
        error->call, error->result_name, (int)error->driver_result);
    if (error->bytes) {
        tms_error_append(error, " for ");
        tms_error_append_bytes(error, error->bytes);
    }
    if (error->tag[0]) tms_error_append(error, " of tag '%s'", error->tag);
    tms_error_append(error, ".");
}

/* Returns a seed that is not 0 and differs in two processes that begin at the same time. */
static uint32_t seed(const tms_transition_t *t) {
    const double nanoseconds = 1e9;
    const uint32_t spread = 2654435761u; /* a large odd number, which spreads neighbouring process ids */
    return ((uint32_t)(uint64_t)(t->wait.started * nanoseconds) ^ (uint32_t)getpid() * spread) | 1;
}

static double next_delay(backoff_t *backoff) {
    double delay = backoff->delay * (0.5 + 0.5 * (double)tms_random_next(&backoff->random) / (double)UINT32_MAX);
    backoff->delay = backoff->delay * 2 < MAX_DELAY_SECONDS ? backoff->delay * 2 : MAX_DELAY_SECONDS;
    return delay;
}

/* Waits until enough memory is free: an attempt that cannot succeed would take memory from other waiting processes.
 * TMS_OUT_OF_DEVICE_MEMORY at the deadline; *error is unchanged then. */
static tms_status_t await_memory(tms_transition_t *t, backoff_t *backoff, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    shortage_t shortage = {0};
    do {
        if (tms_wait_remaining(&t->wait) <= 0) return TMS_OUT_OF_DEVICE_MEMORY;
        tms_status_t status = tms_wait_sleep(&t->wait, next_delay(backoff), &context, error);
        if (status != TMS_OK) return status;
        tms_reclaim_within(t->saver, &t->wait); /* it may release the missing memory */
        status = tms_wait_check(&t->wait, &context, error);
        if (status == TMS_OK) status = find_shortage(t, TMS_NO_DEVICE, &shortage, error);
        if (status != TMS_OK) return status;
    } while (shortage.missing > 0);
    return TMS_OK;
}

static tms_status_t attempt_until_memory_suffices(tms_transition_t *t, tms_error_t *error) {
    backoff_t backoff = {.delay = FIRST_DELAY_SECONDS, .random = seed(t)};
    for (;;) {
        tms_status_t status = tms_steps_attempt(t, error);
        /* Another attempt would skip damaged segments, and so succeed with the rest. */
        if (status == TMS_OUT_OF_DEVICE_MEMORY && !t->done.damaged) {
            const bool waits = tms_wait_remaining(&t->wait) > 0;
            const uint64_t began = waits ? tms_observers_begin_phase(t, TMS_PHASE_WAIT) : 0;
            status = await_memory(t, &backoff, error);
            if (waits) tms_observers_end_phase(t, TMS_PHASE_WAIT, began, status);
            if (status == TMS_OUT_OF_DEVICE_MEMORY) describe_shortage(t, error);
            if (status == TMS_OK) continue;
        }
        if (status == TMS_OUT_OF_DEVICE_MEMORY && error) tms_kinds_explain_slack(t->saver, error->device, error);
        return status;
    }
}

/* If exclusive, acquires the locks of the devices concerned. This happens before the turn is taken, so that other threads of
 * this process can pause during the wait. */
static tms_status_t perform(tms_transition_t *t, tms_error_t *error) {
    tms_error_context_t context = tms_transition_context(t, TMS_NO_DEVICE);
    if (!t->requested.selection->exclusive || !t->devices) return attempt_until_memory_suffices(t, error);
    tms_device_locks_t *locks = &t->saver->device_locks;
    tms_reclaim_within(t->saver, &t->wait); /* repaired segments are resumed as well, so their devices are concerned */
    tms_status_t status = tms_wait_check(&t->wait, &context, error);
    if (status != TMS_OK) return status;
    tms_device_mask_t concerned = measure_demand(t).owners;
    status = tms_device_locks_acquire(locks, concerned, &t->wait, &context, error);
    if (status != TMS_OK) return status;
    t->planned.collectable = concerned;
    status = attempt_until_memory_suffices(t, error);
    tms_device_locks_release(locks, concerned);
    return status;
}

static tms_status_t resume(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t *pending,
                           tms_report_t *report, tms_error_t *error) {
    tms_transition_t t = {.saver = saver,
                          .requested = {.selection = selection,
                                        .operation = "resume",
                                        .from = TMS_SEGMENT_PAUSED,
                                        .through = TMS_SEGMENT_RESUMING,
                                        .to = TMS_SEGMENT_ACTIVE},
                          .pending = pending,
                          .act = resume_all,
                          .perform = perform,
                          .calls = &saver->stats.resumes,
                          .report = report};
    tms_status_t status = tms_steps_perform(&t, error);
    if (status == TMS_BACKUP_IO && error)
        tms_error_append(error, " If these contents are lost, pause(tag, backup=\"discard\") gives them up, and resume(tag) "
                                "then brings the memory back without them.");
    tms_backup_stores_after_resume(&saver->stores);
    /* This is done even after a call that failed because it skipped damaged segments. */
    if (t.done.report.allocations > 0 && t.devices->count > 1) {
        /* A device may have come into use while the memory was being mapped. A failure does not fail the resume. */
        tms_error_t reason;
        tms_saver_log_peer_failure(saver, tms_peers_refresh(saver, &reason), &reason);
    }
    return status;
}

tms_status_t tms_resume_perform(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                tms_error_t *error) {
    return resume(saver, selection, NULL, report, error);
}

tms_status_t tms_resume_run_pending(tms_saver_t *saver, tms_pending_t *pending, tms_report_t *report, tms_error_t *error) {
    return resume(saver, tms_pending_selection(pending), pending, report, error);
}

/* ---- in the background ---- */

/* The thread holds a reference to `pending`; the saver outlives the thread (tms_pending_resumes_close). */
static void *run(void *argument) {
    tms_pending_t *pending = argument;
    tms_saver_t *saver = tms_pending_saver(pending);
    tms_report_t report = {0};
    tms_error_t error;
    tms_error_clear(&error);
    tms_status_t status = tms_resume_run_pending(saver, pending, &report, &error);
    tms_pending_end(pending, status, &report, &error);
    tms_pending_resumes_count(&saver->pending_resumes, -1);
    return NULL;
}

tms_status_t tms_resume_begin(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t **pending,
                              tms_error_t *error) {
    const tms_error_context_t context = {.operation = "resume", .device = TMS_NO_DEVICE};
    tms_pending_t *made = NULL;
    pthread_t thread;
    tms_status_t status = tms_saver_check_process(saver, &context, error);
    if (status == TMS_OK && tms_turn_is_inside())
        status = tms_error_set(error, TMS_INVALID_STATE, &context, "this thread is inside pause() or resume() already");
    if (status == TMS_OK) status = tms_pending_create(saver, selection, &made, &context, error);
    if (status != TMS_OK) return status;
    tms_pending_resumes_count(&saver->pending_resumes, 1);
    int os_error = tms_thread_start(&thread, run, made);
    if (os_error == 0) {
        pthread_detach(thread);
    } else {
        tms_log_write(saver->log, TMS_LOG_WARNING,
                      "resume(wait=False): no thread could be started (pthread_create: %s), so the whole resume is done "
                      "before the call returns",
                      TMS_OS_TEXT(os_error));
        (void)run(made);
    }
    *pending = made;
    return TMS_OK;
}
