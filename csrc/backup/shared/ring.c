#include "backup/shared/ring.h"

#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread.h"

/* One run, shared by its lanes. */
typedef struct run {
    tms_shared_store_t *store;
    const tms_copier_t *copier;
    tms_shared_work_t work;
    void *context;
    const tms_error_context_t *where;
    size_t count, first;
    tms_host_buffer_t *buffers[TMS_MAX_SHARED_LANES];
    _Atomic size_t taken;   /* objects that lanes have begun */
    _Atomic size_t started; /* lanes */
    _Atomic bool cancelled;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t ended;
    int running; /* threads */
    tms_status_t status;
    tms_error_t error;
} run_t;

/* ---- a lane ---- */

static void drop_buffer(void *buffer) { tms_host_buffer_drop(buffer); }

static tms_status_t open_lane(tms_shared_lane_t *lane, const run_t *run, tms_host_buffer_t *buffer, tms_error_t *error) {
    const tms_copier_t *copier = run->copier;
    *lane = (tms_shared_lane_t){.buffer = buffer, .cancelled = &run->cancelled};
    tms_status_t status = tms_copier_open(&lane->copier, copier->copying, copier->device, NULL, run->where, error);
    if (status != TMS_OK) return status;
    lane->copier.done = copier->done;
    status = tms_copier_hold(&lane->copier, buffer, drop_buffer, run->where, error);
    if (status == TMS_OK) tms_host_buffer_acquire(buffer);
    return status;
}

/* Returns the bytes from the beginning of the buffer that one copy may cover, at most `bytes`. */
static tms_status_t usable(const tms_shared_lane_t *lane, uint64_t bytes, uint64_t *part, const tms_error_context_t *context,
                           tms_error_t *error) {
    tms_status_t status = tms_host_buffer_await(lane->buffer, 0, NULL, part, context, error);
    if (*part > bytes) *part = bytes;
    return status;
}

static tms_status_t check(const tms_shared_lane_t *lane, const tms_error_context_t *context, tms_error_t *error) {
    if (!atomic_load(lane->cancelled)) return TMS_OK;
    return tms_error_set(error, TMS_INTERRUPTED, context, "another part of the call has ended");
}

/* Counts the time since *began, which becomes now. */
static void count_time(_Atomic uint64_t *nanoseconds, uint64_t *began) {
    const uint64_t now = tms_clock_nanoseconds();
    atomic_fetch_add(nanoseconds, now - *began);
    *began = now;
}

tms_status_t tms_shared_lane_write(tms_shared_lane_t *lane, tms_shared_store_t *store, const tms_shared_object_t *object,
                                   CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    void *memory = lane->buffer->memory;
    tms_status_t status = TMS_OK;
    for (uint64_t part = 0, done = 0; status == TMS_OK && done < object->bytes; done += part) {
        uint64_t began = tms_clock_nanoseconds();
        status = usable(lane, object->bytes - done, &part, context, error);
        if (status == TMS_OK) status = tms_copier_to_host(&lane->copier, memory, address + done, part, context, error);
        if (status == TMS_OK) status = tms_copier_wait(&lane->copier, context, error);
        if (status == TMS_OK) status = check(lane, context, error);
        count_time(&store->copy_nanoseconds, &began);
        if (status == TMS_OK)
            status =
                tms_shared_entry_write(&store->folder, &object->name, object->claim, memory, part, done, context, error);
        count_time(&store->file_nanoseconds, &began);
    }
    return status;
}

tms_status_t tms_shared_lane_read(tms_shared_lane_t *lane, tms_shared_store_t *store, const tms_shared_object_t *object,
                                  CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    void *memory = lane->buffer->memory;
    const int fd = object->known ? tms_shared_entry_open(&store->folder, &object->name) : -1;
    tms_status_t status = TMS_OK;
    for (uint64_t part = 0, done = 0; status == TMS_OK && done < object->bytes; done += part) {
        status = usable(lane, object->bytes - done, &part, context, error);
        if (status == TMS_OK) status = check(lane, context, error);
        if (status != TMS_OK) break;
        uint64_t began = tms_clock_nanoseconds();
        if (fd < 0 || !tms_shared_entry_read(fd, memory, part, done)) memcpy(memory, object->memory + done, part);
        count_time(&store->file_nanoseconds, &began);
        status = tms_copier_to_device(&lane->copier, address + done, memory, part, context, error);
        if (status == TMS_OK) status = tms_copier_wait(&lane->copier, context, error);
        count_time(&store->copy_nanoseconds, &began);
    }
    if (fd >= 0) close(fd);
    return status;
}

/* ---- a run ---- */

static void note(run_t *run, tms_status_t status, const tms_error_t *reason) {
    if (status == TMS_OK) return;
    pthread_mutex_lock(&run->lock);
    if (run->status == TMS_OK) {
        run->status = status;
        run->error = *reason;
    }
    atomic_store(&run->cancelled, true);
    pthread_mutex_unlock(&run->lock);
}

/* One lane works until nothing is left, or the run has failed. */
static void work_through(run_t *run) {
    tms_shared_lane_t lane;
    tms_error_t reason;
    tms_status_t status = open_lane(&lane, run, run->buffers[atomic_fetch_add(&run->started, 1)], &reason);
    while (status == TMS_OK && !atomic_load(&run->cancelled)) {
        const size_t index = atomic_fetch_add(&run->taken, 1);
        if (index >= run->count) break;
        status = run->work(run->context, (run->first + index) % run->count, &lane, &reason);
    }
    note(run, status, &reason);
    (void)tms_copier_close(&lane.copier); /* keeps the buffer if the device may still use it */
}

static void *run_thread(void *argument) {
    run_t *run = argument;
    work_through(run);
    pthread_mutex_lock(&run->lock);
    run->running--;
    pthread_cond_signal(&run->ended);
    pthread_mutex_unlock(&run->lock);
    return NULL;
}

static int lanes_of(size_t count) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int lanes = processors > TMS_MAX_SHARED_LANES ? TMS_MAX_SHARED_LANES : (int)processors;
    if (lanes < 1) lanes = 1;
    return count < (size_t)lanes ? (int)count : lanes;
}

/* Makes a buffer for each lane in one batch, which ends before the buffers are used. */
static tms_status_t make_buffers(run_t *run, int lanes, tms_error_t *error) {
    struct tms_host_batch *batch = NULL;
    const tms_host_request_t wanted = {
        .bytes = TMS_SHARED_LANE_BYTES, .device = run->copier->device, .kind = TMS_BACKUP_PINNED, .group = run};
    tms_status_t status = tms_host_batch_create(&batch, run->store->host, run->where, error);
    for (int i = 0; status == TMS_OK && i < lanes; i++) {
        status = tms_host_batch_add(batch, &wanted, &run->buffers[i], run->where, error);
        if (status == TMS_OK) atomic_store(&run->buffers[i]->policy, TMS_HOST_POOL);
    }
    if (status == TMS_OK) status = tms_host_batch_start(batch, run->where, error);
    for (int i = 0; status == TMS_OK && i < lanes; i++) {
        for (uint64_t part, done = 0; status == TMS_OK && done < wanted.bytes; done += part)
            status = tms_host_buffer_await(run->buffers[i], done, run->copier->wait, &part, run->where, error);
    }
    tms_host_batch_destroy(batch);
    return status;
}

/* Waits for the threads, and asks whether the call is cancelled. TMS_FORKED: this is a child, which has no threads. */
static tms_status_t await(run_t *run) {
    tms_error_t reason;
    pthread_mutex_lock(&run->lock);
    while (run->running > 0) {
        tms_wait_on_condition(run->copier->wait, &run->ended, &run->lock);
        pthread_mutex_unlock(&run->lock);
        const tms_status_t status = tms_wait_check(run->copier->wait, run->where, &reason);
        if (status == TMS_FORKED) return status;
        note(run, status, &reason);
        pthread_mutex_lock(&run->lock);
    }
    pthread_mutex_unlock(&run->lock);
    return TMS_OK;
}

/* Without a thread the caller is the only lane. */
static tms_status_t work(run_t *run, int lanes) {
    pthread_t threads[TMS_MAX_SHARED_LANES];
    int count = 0;
    run->running = lanes;
    while (count < lanes && tms_thread_start(&threads[count], run_thread, run) == 0) count++;
    pthread_mutex_lock(&run->lock);
    run->running -= lanes - count;
    pthread_mutex_unlock(&run->lock);
    if (count == 0) work_through(run);
    if (await(run) == TMS_FORKED) return TMS_FORKED;
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    return run->status;
}

tms_status_t tms_shared_ring_perform(tms_shared_store_t *store, tms_copier_t *copier, size_t count, size_t first,
                                     tms_shared_work_t perform, void *context, const tms_error_context_t *where,
                                     tms_error_t *error) {
    run_t run = {.store = store,
                 .copier = copier,
                 .work = perform,
                 .context = context,
                 .where = where,
                 .count = count,
                 .first = first};
    if (count == 0) return TMS_OK;
    pthread_mutex_init(&run.lock, NULL);
    tms_wait_condition_init(&run.ended);
    const int lanes = lanes_of(count);
    tms_status_t status = make_buffers(&run, lanes, &run.error);
    if (status == TMS_OK) status = work(&run, lanes);
    if (status == TMS_FORKED) return status; /* in a forked child: the threads and their streams belong to the parent */
    for (int i = 0; i < lanes; i++) tms_host_buffer_drop(run.buffers[i]);
    if (status != TMS_OK && error) *error = run.error;
    pthread_cond_destroy(&run.ended);
    pthread_mutex_destroy(&run.lock);
    return status;
}
