#include "core/model/pending_resumes.h"

#include "device/wait.h"

void tms_pending_resumes_init(tms_pending_resumes_t *pending_resumes) {
    pthread_mutex_init(&pending_resumes->lock, NULL);
    tms_wait_condition_init(&pending_resumes->ended);
    pending_resumes->running = pending_resumes->abandoned = 0;
    atomic_init(&pending_resumes->cancelled, false);
}

void tms_pending_resumes_close(tms_pending_resumes_t *pending_resumes, double deadline) {
    atomic_store(&pending_resumes->cancelled, true);
    pthread_mutex_lock(&pending_resumes->lock);
    while (pending_resumes->running > pending_resumes->abandoned &&
           tms_wait_until(&pending_resumes->ended, &pending_resumes->lock, deadline)) {
    }
    pending_resumes->abandoned = pending_resumes->running;
    atomic_store(&pending_resumes->cancelled, pending_resumes->abandoned > 0);
    pthread_mutex_unlock(&pending_resumes->lock);
}

void tms_pending_resumes_after_fork_in_child(tms_pending_resumes_t *pending_resumes) {
    tms_pending_resumes_init(pending_resumes);
}

void tms_pending_resumes_count(tms_pending_resumes_t *pending_resumes, int change) {
    pthread_mutex_lock(&pending_resumes->lock);
    pending_resumes->running += change;
    if (pending_resumes->abandoned > pending_resumes->running) pending_resumes->abandoned = pending_resumes->running;
    if (change < 0) pthread_cond_broadcast(&pending_resumes->ended);
    pthread_mutex_unlock(&pending_resumes->lock);
}

int32_t tms_pending_resumes_is_cancelled(void *pending_resumes) {
    return atomic_load(&((tms_pending_resumes_t *)pending_resumes)->cancelled);
}
