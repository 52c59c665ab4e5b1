#include "host_batch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

tms_status_t tms_host_store_init(tms_host_store_t *store, tms_devices_t *devices, const tms_log_t *log,
                                 tms_quarantine_t *quarantine, uint64_t cap_bytes, uint64_t pool_limit_bytes,
                                 tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *store = (tms_host_store_t){.devices = devices,
                                .log = log,
                                .quarantine = quarantine,
                                .piece_bytes = TMS_HOST_PIECE_BYTES,
                                .pool_limit_bytes = pool_limit_bytes};
    tms_status_t status = tms_host_limits_init(&store->limits, "", cap_bytes, error);
    if (status != TMS_OK) return status;
    if (store->limits.os_error != 0)
        tms_log_write(log, TMS_LOG_WARNING,
                      "the memory limits of this process's cgroups are not all known (open: %s): backups in host memory may "
                      "pass them. Raise the limit of open files (ulimit -n)",
                      strerror(store->limits.os_error));
    if (pthread_mutex_init(&store->lock, NULL) != 0) {
        tms_host_limits_release(&store->limits);
        return tms_error_set_os(error, &context, "pthread_mutex_init", ENOMEM, NULL);
    }
    tms_wait_condition_init(&store->changed);
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
    if (store->blocks) return; /* the quarantine may still need the lock */
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
    (void)pthread_mutex_init(&store->lock, NULL); /* the same memory served before */
    tms_wait_condition_init(&store->changed);
    store->blocks = NULL;
    store->waiting = store->last_waiting = NULL;
    memset(store->recent, 0, sizeof store->recent);
    store->planned_bytes = store->in_flight_bytes = store->reserving_bytes = 0;
    store->calls = store->abandoned_calls = 0;
    store->leaving[0] = store->leaving[1] = 0;
    store->threads = 0;
    store->checking = store->releasing = store->retrying = store->closing = false;
    atomic_store(&store->buffer_bytes, 0);
    atomic_store(&store->resident_bytes, 0);
    atomic_store(&store->pooled_bytes, 0);
}

/* ---- references ---- */

void tms_host_buffer_acquire(tms_host_buffer_t *buffer) { atomic_fetch_add(&buffer->references, 1); }

void tms_host_buffer_drop(tms_host_buffer_t *buffer) {
    if (!buffer || atomic_fetch_sub(&buffer->references, 1) != 1) return;
    if (buffer->process == getpid()) { /* what it points to belongs to the parent otherwise, which the child has forgotten */
        tms_host_store_t *store = buffer->store;
        atomic_fetch_sub(&store->buffer_bytes, buffer->bytes);
        pthread_mutex_lock(&store->lock);
        tms_host_buffer_unlink(buffer);
        struct tms_host_block *forgotten = tms_host_block_forget(buffer->block);
        pthread_mutex_unlock(&store->lock);
        tms_host_block_free(forgotten);
        tms_host_release_start(store);
    }
    free(buffer);
}

/* ---- room ---- */

bool tms_host_store_fits(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom) {
    pthread_mutex_lock(&store->lock);
    uint64_t in_flight = store->in_flight_bytes, resident = atomic_load(&store->resident_bytes);
    pthread_mutex_unlock(&store->lock);
    /* Nobody knows how much of what is in flight the system has counted already. */
    *headroom = tms_host_limits_headroom(&store->limits, resident - in_flight);
    return in_flight <= headroom->bytes && bytes <= headroom->bytes - in_flight;
}

bool tms_host_store_make_room(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom) {
    if (tms_host_store_fits(store, bytes, headroom)) return true;
    tms_host_store_settle(store);
    if (tms_host_store_fits(store, bytes, headroom)) return true;
    if (headroom->call) return false; /* nobody knows whether giving memory up would help */
    pthread_mutex_lock(&store->lock);
    uint64_t wanted = bytes + store->in_flight_bytes; /* which may be less by now than when the headroom was read */
    uint64_t missing = wanted > headroom->bytes ? wanted - headroom->bytes : 0;
    tms_host_pool_give_up(store, missing);
    bool helps = missing == 0 || store->waiting;
    pthread_mutex_unlock(&store->lock);
    if (!helps) return false;
    tms_host_store_settle(store);
    return tms_host_store_fits(store, bytes, headroom);
}

/* Counted before it is asked for, so that two claims never rely on the same room. */
tms_status_t tms_host_store_claim(tms_host_store_t *store, uint64_t bytes, const tms_error_context_t *context,
                                  tms_error_t *error) {
    tms_host_headroom_t headroom;
    pthread_mutex_lock(&store->lock);
    store->in_flight_bytes += bytes;
    atomic_fetch_add(&store->resident_bytes, bytes);
    pthread_mutex_unlock(&store->lock);
    if (tms_host_store_make_room(store, 0, &headroom)) return TMS_OK;
    tms_host_store_claim_used(store, bytes);
    tms_host_store_disclaim(store, bytes);
    return tms_host_headroom_fail(&headroom, bytes, context, error);
}

void tms_host_store_claim_used(tms_host_store_t *store, uint64_t bytes) {
    pthread_mutex_lock(&store->lock);
    store->in_flight_bytes -= bytes;
    pthread_cond_broadcast(&store->changed);
    pthread_mutex_unlock(&store->lock);
}

void tms_host_store_disclaim(tms_host_store_t *store, uint64_t bytes) { atomic_fetch_sub(&store->resident_bytes, bytes); }

void tms_host_store_say_not_locked(tms_host_store_t *store, const tms_error_t *reason) {
    tms_log_once(store->log, &store->said_not_locked, TMS_LOG_WARNING,
                 "%s Copies from and to this memory are slower. A limit of locked memory (ulimit -l) may be the reason.",
                 reason->message);
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

/* A reservation that nobody waits for. */
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
        tms_log_write(store->log, TMS_LOG_WARNING, "%s What was made ready before stays in the pool.", reason.message);
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

/* How much the pool is short of `bytes`, what is on its way counted in. */
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
    if (status != TMS_OK) return status;
    if (device < 0 || device >= table->count)
        return tms_error_set(error, TMS_INVALID_ARGUMENT, &context, "devices 0 to %d exist", table->count - 1);
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
    /* Better late than not at all: where there is no thread for it, this one does it. */
    if (tms_host_thread_detach(store, reserve, batch) != 0) make_ready(batch);
    return TMS_OK;
}
