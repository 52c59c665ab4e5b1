#include "core/model/pendings.h"

#include "device/wait.h"

void tms_pendings_init(tms_pendings_t *pendings) {
    pthread_mutex_init(&pendings->lock, NULL);
    tms_wait_condition_init(&pendings->ended);
    pendings->running = pendings->abandoned = 0;
    atomic_init(&pendings->cancelled, false);
}

void tms_pendings_close(tms_pendings_t *pendings, double deadline) {
    atomic_store(&pendings->cancelled, true);
    pthread_mutex_lock(&pendings->lock);
    while (pendings->running > pendings->abandoned && tms_wait_until(&pendings->ended, &pendings->lock, deadline)) {
    }
    pendings->abandoned = pendings->running;
    atomic_store(&pendings->cancelled, pendings->abandoned > 0);
    pthread_mutex_unlock(&pendings->lock);
}

void tms_pendings_after_fork_in_child(tms_pendings_t *pendings) { tms_pendings_init(pendings); }

void tms_pendings_count(tms_pendings_t *pendings, int change) {
    pthread_mutex_lock(&pendings->lock);
    pendings->running += change;
    if (pendings->abandoned > pendings->running) pendings->abandoned = pendings->running;
    if (change < 0) pthread_cond_broadcast(&pendings->ended);
    pthread_mutex_unlock(&pendings->lock);
}

int32_t tms_pendings_is_cancelled(void *pendings) { return atomic_load(&((tms_pendings_t *)pendings)->cancelled); }
