#include "process.h"

#include <stdlib.h>

/* The handlers run in every fork and at exit of a process that has made the state. Locks are taken in the order of
 * saver.h (the saver's, then the leaves), so that the child's copy of what they guard is whole. */

static void before_fork(void) {
    tms_state_t *state = tms_state_if_made();
    if (!state) return;
    pthread_mutex_lock(&state->saver.lock);
    pthread_mutex_lock(&state->regions.tags.lock);
    pthread_mutex_lock(&state->saver.stores.disk.lock);
}

static void after_fork_in_parent(void) {
    tms_state_t *state = tms_state_if_made();
    if (!state) return;
    pthread_mutex_unlock(&state->saver.stores.disk.lock);
    pthread_mutex_unlock(&state->regions.tags.lock);
    pthread_mutex_unlock(&state->saver.lock);
}

static void after_fork_in_child(void) {
    tms_state_t *state = tms_state_if_made();
    if (!state) return;
    tms_saver_t *saver = &state->saver;
    /* Made anew, not unlocked: the thread that is said to hold them is another process's. */
    pthread_mutex_init(&saver->lock, NULL);
    pthread_cond_init(&saver->turn, NULL);
    tms_tag_table_after_fork_in_child(&state->regions.tags);
    tms_disk_after_fork_in_child(&saver->stores.disk);
    /* A transition that ran in the parent has no thread here that could end it. */
    saver->transition_running = false;
    /* A driver that was never initialised can be in the child. */
    if (atomic_load(&state->driver.table)) atomic_store(&saver->forked, true);
}

static void at_exit(void) {
    tms_state_t *state = tms_state_if_made();
    if (state && !atomic_load(&state->saver.forked)) tms_disk_remove_all(&state->saver.stores.disk);
}

tms_status_t tms_process_register(tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    if (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0 || atexit(at_exit) != 0) {
        return tms_error_set(error, TMS_OUT_OF_HOST_MEMORY, &context,
                             "the handlers for fork and exit were not registered: disk backups may stay behind at exit");
    }
    return TMS_OK;
}
