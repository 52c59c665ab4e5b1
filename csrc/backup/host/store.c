#include "backup/host/store.h"

#include <errno.h>
#include <string.h>

#include "backup/host/pool.h"
#include "backup/host/work.h"

tms_status_t tms_host_store_init(tms_host_store_t *store, tms_devices_t *devices, tms_log_t *log,
                                 tms_quarantine_t *quarantine, uint64_t cap_bytes, uint64_t pool_limit_bytes,
                                 tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *store = (tms_host_store_t){.devices = devices,
                                .log = log,
                                .quarantine = quarantine,
                                .chunk_bytes = TMS_HOST_CHUNK_BYTES,
                                .pool_limit_bytes = pool_limit_bytes};
    tms_status_t status = tms_host_limits_init(&store->limits, "", cap_bytes, error);
    if (status != TMS_OK) return status;
    if (store->limits.os_error != 0)
        tms_log_write(log, TMS_LOG_WARNING,
                      "not all memory limits of this process's cgroups could be read (open: %s): backups in host memory may "
                      "exceed them. Raise the limit of open files (ulimit -n)",
                      TMS_OS_TEXT(store->limits.os_error));
    if (pthread_mutex_init(&store->lock, NULL) != 0) {
        tms_host_limits_release(&store->limits);
        return tms_error_set_os(error, &context, "pthread_mutex_init", ENOMEM, NULL);
    }
    tms_wait_condition_init(&store->changed);
    tms_registry_init(&store->gaps);
    return TMS_OK;
}

/* Ends the threads, which begin nothing new while `closing`. */
static void end_threads(tms_host_store_t *store) {
    pthread_mutex_lock(&store->lock);
    store->closing = true;
    pthread_cond_broadcast(&store->changed);
    while (store->threads > 0) pthread_cond_wait(&store->changed, &store->lock);
    store->closing = false;
    pthread_mutex_unlock(&store->lock);
}

void tms_host_store_release(tms_host_store_t *store) {
    end_threads(store);
    tms_host_store_set_pool_limit(store, 0);
    tms_host_store_settle(store);
    tms_quarantine_retry(store->quarantine);
    end_threads(store);
    tms_host_limits_release(&store->limits);
    if (store->blocks) return; /* quarantined chunks may still need the lock */
    pthread_cond_destroy(&store->changed);
    pthread_mutex_destroy(&store->lock);
}

void tms_host_store_close(tms_host_store_t *store, double deadline) {
    pthread_mutex_lock(&store->lock);
    store->closing = true;
    pthread_cond_broadcast(&store->changed);
    while (store->calls > store->abandoned_calls && tms_wait_until(&store->changed, &store->lock, deadline)) {
    }
    store->abandoned_calls = store->calls;
    pthread_mutex_unlock(&store->lock);
}

void tms_host_store_after_fork_in_child(tms_host_store_t *store) {
    (void)pthread_mutex_init(&store->lock, NULL); /* cannot fail: it succeeded on this memory before */
    tms_wait_condition_init(&store->changed);
    store->blocks = NULL;
    store->waiting = store->last_waiting = NULL;
    tms_registry_init(&store->gaps);
    memset(store->gap_lists, 0, sizeof store->gap_lists);
    store->planned_bytes = store->in_flight_bytes = store->reserving_bytes = 0;
    store->calls = store->abandoned_calls = 0;
    store->releasing[0] = store->releasing[1] = 0;
    store->threads = 0;
    store->checking = store->release_thread = store->retry_thread = store->closing = false;
    atomic_store(&store->buffer_bytes, 0);
    atomic_store(&store->resident_bytes, 0);
    atomic_store(&store->pooled_bytes, 0);
}

/* ---- the pool ---- */

void tms_host_store_set_pool_limit(tms_host_store_t *store, uint64_t bytes) {
    pthread_mutex_lock(&store->lock);
    store->pool_limit_bytes = bytes;
    uint64_t pooled = atomic_load(&store->pooled_bytes);
    if (pooled > bytes) tms_host_pool_give_up(store, pooled - bytes);
    pthread_mutex_unlock(&store->lock);
    tms_host_release_start(store);
}

void tms_host_store_trim(tms_host_store_t *store) {
    pthread_mutex_lock(&store->lock);
    tms_host_pool_give_up(store, UINT64_MAX);
    pthread_mutex_unlock(&store->lock);
    tms_host_release_start(store);
}

/* Does the work of a reservation, whose failure is only logged. */
static void make_ready(struct tms_host_batch *batch) {
    tms_host_store_t *store = batch->store;
    tms_error_t reason;
    tms_host_work_start(batch);
    tms_host_work_through(batch);
    pthread_mutex_lock(&store->lock);
    bool failed = batch->failed;
    if (failed) reason = batch->blocks[0]->failure;
    pthread_mutex_unlock(&store->lock);
    if (failed)
        tms_log_write(store->log, TMS_LOG_WARNING,
                      "%s The host memory that was prepared before this failure stays in the pool.", reason.message);
    tms_host_batch_destroy(batch);
}

static void *reserve(void *argument) {
    struct tms_host_batch *batch = argument;
    tms_host_store_t *store = batch->store;
    pthread_detach(pthread_self());
    make_ready(batch);
    tms_host_thread_end(store);
    return NULL;
}

/* Returns the number of bytes that the pool lacks to reach `bytes`. Reserved chunks count as part of the pool. */
static uint64_t missing_in_pool(tms_host_store_t *store, uint64_t bytes) {
    pthread_mutex_lock(&store->lock);
    uint64_t have = atomic_load(&store->pooled_bytes) + store->reserving_bytes;
    pthread_mutex_unlock(&store->lock);
    return bytes > have ? bytes - have : 0;
}

static void raise_pool_limit(tms_host_store_t *store, uint64_t bytes) {
    pthread_mutex_lock(&store->lock);
    if (store->pool_limit_bytes < bytes) store->pool_limit_bytes = bytes;
    pthread_mutex_unlock(&store->lock);
}

tms_status_t tms_host_store_reserve(tms_host_store_t *store, int device, uint64_t bytes, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "reserve host memory", .device = device, .bytes = bytes};
    const tms_device_table_t *table = NULL;
    struct tms_host_batch *batch = NULL;
    tms_status_t status = tms_devices_load(store->devices, NULL, &table, &context, error);
    if (status == TMS_OK) status = tms_devices_check(table, &context, error);
    if (status != TMS_OK) return status;
    uint64_t missing = missing_in_pool(store, bytes);
    if (missing > 0) {
        status = tms_host_batch_create(&batch, store, &context, error);
        if (status == TMS_OK) status = tms_host_batch_plan_pool(batch, device, missing, &context, error);
        if (status == TMS_OK) status = tms_host_batch_map(batch, &context, error);
        if (status != TMS_OK) {
            tms_host_batch_destroy(batch);
            return status;
        }
    }
    raise_pool_limit(store, bytes);
    if (!batch) return TMS_OK;
    /* If no thread can be started, this one does the work. */
    if (tms_host_thread_detach(store, reserve, batch) != 0) make_ready(batch);
    return TMS_OK;
}
