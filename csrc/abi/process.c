#include "abi/process.h"

#include <errno.h>
#include <stdlib.h>

/* The handlers run in every fork and at exit of a process that has created the state. Locks are taken in the order of
 * saver.h (the saver's, those of the stores, then the leaves), so that the child's copy of the guarded data is consistent.
 * Two threads that create a state at once register them twice. Run a second time, each does nothing more. */

/* The state whose locks this thread has taken for a fork. Another thread may publish the state during the fork. */
static _Thread_local tms_state_t *locked;

static void before_fork(void) {
    tms_state_t *state = tms_state_if_made();
    if (!state || locked) return;
    pthread_mutex_lock(&state->saver.lock);
    tms_backup_stores_lock(&state->saver.stores);
    pthread_mutex_lock(&state->regions.tags.lock);
    pthread_mutex_lock(&state->saver.quarantine.lock);
    pthread_mutex_lock(&state->saver.device_locks.mutex);
    pthread_mutex_lock(&state->saver.pending_resumes.lock);
    pthread_mutex_lock(&state->saver.descriptors.lock);
    pthread_mutex_lock(&state->late_devices.lock);
    pthread_mutex_lock(&state->saver.shared_page.opening);
    tms_events_before_fork(&state->saver.events);
    tms_ledger_before_fork(&state->ledger);
    locked = state;
}

static void after_fork_in_parent(void) {
    tms_state_t *state = locked;
    if (!state) return;
    locked = NULL;
    tms_ledger_after_fork_in_parent(&state->ledger);
    tms_events_after_fork_in_parent(&state->saver.events);
    pthread_mutex_unlock(&state->saver.shared_page.opening);
    pthread_mutex_unlock(&state->late_devices.lock);
    pthread_mutex_unlock(&state->saver.descriptors.lock);
    pthread_mutex_unlock(&state->saver.pending_resumes.lock);
    pthread_mutex_unlock(&state->saver.device_locks.mutex);
    pthread_mutex_unlock(&state->saver.quarantine.lock);
    pthread_mutex_unlock(&state->regions.tags.lock);
    tms_backup_stores_unlock(&state->saver.stores);
    pthread_mutex_unlock(&state->saver.lock);
}

static void after_fork_in_child(void) {
    locked = NULL;
    tms_state_t *state = tms_state_if_made();
    if (!state) return;
    tms_saver_t *saver = &state->saver;
    /* Reinitialised, not unlocked: the thread that holds them exists only in the parent. */
    pthread_mutex_init(&saver->lock, NULL);
    tms_wait_condition_init(&saver->turn);
    tms_tag_table_after_fork_in_child(&state->regions.tags);
    tms_quarantine_after_fork_in_child(&saver->quarantine);
    tms_backup_stores_after_fork_in_child(&saver->stores);
    tms_device_locks_after_fork_in_child(&saver->device_locks);
    tms_pending_resumes_after_fork_in_child(&saver->pending_resumes);
    tms_descriptors_after_fork_in_child(&saver->descriptors);
    tms_late_devices_after_fork_in_child(&state->late_devices);
    tms_devices_after_fork_in_child(&state->devices);
    tms_log_after_fork_in_child(&state->log);
    tms_events_after_fork_in_child(&saver->events);
    tms_nvtx_after_fork_in_child(&saver->nvtx);
    tms_ledger_after_fork_in_child(&state->ledger);
    tms_shared_page_after_fork_in_child(&saver->shared_page);
    /* The thread of a transition that ran in the parent does not exist here. */
    saver->transition_running = false;
    saver->callback_began = 0;
    /* The child may initialise a driver that the parent has not initialised. */
    if (atomic_load(&state->driver.table)) atomic_store(&saver->forked, true);
}

void tms_process_end_threads(tms_saver_t *saver) {
    tms_pending_resumes_close(&saver->pending_resumes, tms_wait_now() + TMS_EXIT_RESUME_SECONDS);
    tms_backup_stores_close(&saver->stores, tms_wait_now() + TMS_EXIT_RELEASE_SECONDS);
}

static void at_exit(void) {
    tms_state_t *state = tms_state_if_made();
    if (!state || atomic_load(&state->saver.forked)) return;
    tms_process_end_threads(&state->saver);
    tms_backup_stores_at_exit(&state->saver.stores);
    tms_shared_page_at_exit(&state->saver.shared_page);
    tms_log_summarize(&state->log, true);
    tms_log_at_exit(&state->log);
}

tms_status_t tms_process_register(tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    /* The two registrations are independent: if one fails, the other is still useful. Each fails only if memory is short. */
    bool fork_refused = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0;
    bool exit_refused = atexit(at_exit) != 0;
    if (!fork_refused && !exit_refused) return TMS_OK;
    tms_error_set_os(error, &context, fork_refused ? "pthread_atfork" : "atexit", ENOMEM, NULL);
    tms_error_append(error, " As a result, %s.",
                     fork_refused ? "a forked child must not use this library"
                                  : "files of disk backups may remain after the exit of this process");
    return TMS_OUT_OF_HOST_MEMORY;
}
