#include "backup/host/types.h"

#include "base/thread.h"

/* ---- log lines ---- */

void tms_host_warn_no_thread(tms_host_store_t *store, int os_error) {
    tms_log_once(
        store->log, &store->warned_no_threads, TMS_LOG_WARNING,
        "preparing host memory for backups takes longer, because a thread could not be started (pthread_create: %s)",
        TMS_OS_TEXT(os_error));
}

void tms_host_warn_not_pinned(tms_host_store_t *store, const tms_error_t *reason) {
    tms_log_once(
        store->log, &store->warned_not_pinned, TMS_LOG_WARNING,
        "%s The memory is not pinned, and copies from and to it are slower. The limit of locked memory (ulimit -l) may "
        "be too low.",
        reason->message);
}

/* ---- threads and driver calls ---- */

int tms_host_thread_detach(tms_host_store_t *store, void *(*run)(void *), void *argument) {
    pthread_t thread;
    pthread_mutex_lock(&store->lock);
    store->threads++;
    pthread_mutex_unlock(&store->lock);
    int os_error = tms_thread_start(&thread, run, argument);
    if (os_error == 0) return 0;
    tms_host_thread_end(store);
    tms_host_warn_no_thread(store, os_error);
    return os_error;
}

void tms_host_thread_end(tms_host_store_t *store) {
    pthread_mutex_lock(&store->lock);
    store->threads--;
    pthread_cond_broadcast(&store->changed);
    pthread_mutex_unlock(&store->lock);
}

bool tms_host_call_begin(tms_host_store_t *store) {
    if (store->closing) return false;
    store->calls++;
    return true;
}

void tms_host_call_end(tms_host_store_t *store) {
    store->calls--;
    if (store->abandoned_calls > store->calls) store->abandoned_calls = store->calls;
    if (store->closing) pthread_cond_broadcast(&store->changed);
}
