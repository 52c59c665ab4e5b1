#include "device/copier.h"

#include <errno.h>
#include <stdlib.h>

typedef struct held_memory {
    void *held;
    void (*release)(void *held);
} held_memory_t;

/* The resources that a copier releases when it is closed. Allocated when it is opened, because a resource that cannot be
 * released must be kept without allocating memory. */
struct tms_copier_holdings {
    tms_quarantined_t node; /* first */
    const tms_copying_t *copying;
    int device;
    bool busy; /* the device may still be copying: nothing is released before it has finished */
    CUstream stream;
    CUevent events[TMS_COPIER_EVENTS];
    held_memory_t *memory; /* host memory that the device writes to */
    size_t memory_count, memory_capacity;
    tms_copier_relay_t *relays; /* in the order of adding */
};

static void release_host_memory(struct tms_copier_holdings *held, const tms_driver_table_t *driver, const tms_wait_t *wait) {
    while (held->relays) {
        tms_copier_relay_t *relay = held->relays;
        held->relays = relay->next;
        relay->table->release(relay, driver, wait);
    }
    while (held->memory_count > 0) {
        const held_memory_t *last = &held->memory[--held->memory_count];
        last->release(last->held);
    }
    free(held->memory);
    held->memory = NULL;
}

/* Waits for the stream, in the device's context. False: the device may still be copying. */
static bool has_settled(const struct tms_copier_holdings *held, const tms_driver_table_t *driver, tms_error_t *reason) {
    const tms_error_context_t context = {.operation = "wait for copies", .device = held->device};
    tms_status_t status = TMS_DRIVER_CALL(driver, &context, reason, cuStreamSynchronize, held->stream);
    return status == TMS_OK || status == TMS_DEVICE_LOST || tms_driver_is_gone(reason);
}

/* Releases what it can, in the device's context, and returns what is left. `wait` is the current call's, or NULL. */
static tms_quarantine_mask_t release_holdings(struct tms_copier_holdings *held, const tms_driver_table_t *driver,
                                              const tms_wait_t *wait) {
    if (held->busy)
        return TMS_QUARANTINE_BIT(OTHER) | (held->memory_count > 0 || held->relays ? TMS_QUARANTINE_BIT(HOST) : 0);
    release_host_memory(held, driver, wait);
    for (int i = 0; i < TMS_COPIER_EVENTS; i++) {
        if (held->events[i] && TMS_RELEASED(driver, cuEventDestroy, held->events[i])) held->events[i] = NULL;
    }
    if (held->stream && TMS_RELEASED(driver, cuStreamDestroy, held->stream)) held->stream = NULL;
    bool other = held->stream || held->events[0] || held->events[1];
    return other ? TMS_QUARANTINE_BIT(OTHER) : 0;
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    struct tms_copier_holdings *held = (struct tms_copier_holdings *)node;
    tms_error_context_t context = {.operation = "reclaim", .device = held->device};
    tms_error_t reason;
    tms_devices_t *devices = held->copying->devices;
    tms_status_t status = tms_devices_enter(devices, held->device, &context, NULL);
    if (status != TMS_OK) return node->holds;
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    if (held->busy) held->busy = !has_settled(held, driver, &reason);
    tms_quarantine_mask_t left = release_holdings(held, driver, NULL);
    tms_devices_leave(devices, held->device);
    if (!left) free(held);
    return left;
}

tms_status_t tms_copier_open(tms_copier_t *copier, const tms_copying_t *copying, int device, tms_wait_t *wait,
                             const tms_error_context_t *context, tms_error_t *error) {
    *copier = (tms_copier_t){.copying = copying, .device = device, .wait = wait, .idle = true};
    tms_status_t status = tms_devices_load(copying->devices, &copier->driver, NULL, context, error);
    if (status != TMS_OK) return status;
    copier->held = calloc(1, sizeof *copier->held);
    if (!copier->held) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    copier->held->copying = copying;
    copier->held->device = device;
    status = tms_devices_enter(copying->devices, device, context, error);
    if (status != TMS_OK) goto forget;
    /* The copier has a stream of its own, without the implicit synchronisation of the legacy stream. So the work of other
     * threads continues. */
    status = TMS_DRIVER_CALL(copier->driver, context, error, cuStreamCreate, &copier->stream, CU_STREAM_NON_BLOCKING);
    if (status != TMS_OK) goto leave;
    copier->open = true;
    return TMS_OK;

leave:
    tms_devices_leave(copying->devices, device);
forget:
    free(copier->held);
    copier->held = NULL;
    return status;
}

tms_status_t tms_copier_hold(tms_copier_t *copier, void *held, void (*release)(void *held),
                             const tms_error_context_t *context, tms_error_t *error) {
    struct tms_copier_holdings *all = copier->held;
    if (all->memory_count == all->memory_capacity) {
        size_t capacity = 2 * all->memory_capacity + 1;
        held_memory_t *grown = realloc(all->memory, capacity * sizeof *grown);
        if (!grown) return tms_error_set_os(error, context, "realloc", ENOMEM, NULL);
        all->memory = grown;
        all->memory_capacity = capacity;
    }
    all->memory[all->memory_count++] = (held_memory_t){held, release};
    return TMS_OK;
}

tms_copier_relay_t *tms_copier_find_relay(const tms_copier_t *copier, const tms_copier_relay_table_t *table) {
    tms_copier_relay_t *relay = copier->held->relays;
    while (relay && relay->table != table) relay = relay->next;
    return relay;
}

void tms_copier_add_relay(tms_copier_t *copier, tms_copier_relay_t *relay) {
    tms_copier_relay_t **end = &copier->held->relays;
    while (*end) end = &(*end)->next;
    relay->next = NULL;
    *end = relay;
}

/* ---- gathered copies ---- */

static tms_status_t queue_one_by_one(const tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error) {
    const tms_gathered_t *all = &copier->gathered;
    tms_status_t status = TMS_OK;
    for (size_t i = 0; status == TMS_OK && i < all->count; i++) {
        if (all->to_host)
            status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyDtoHAsync, (void *)(uintptr_t)all->targets[i],
                                     all->sources[i], all->sizes[i], copier->stream);
        else
            status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyHtoDAsync, all->targets[i],
                                     (void *)(uintptr_t)all->sources[i], all->sizes[i], copier->stream);
    }
    return status;
}

static bool copies_at_once(const tms_driver_table_t *driver) { return driver->cuMemcpyBatchAsync && driver->cuMemGetAccess; }

/* Queues all gathered copies by one call. *refused: the driver lacks the call, or does not support it for this device. */
static tms_status_t queue_at_once(tms_copier_t *copier, bool *refused, const tms_error_context_t *context,
                                  tms_error_t *error) {
    tms_gathered_t *all = &copier->gathered;
    const tms_driver_table_t *driver = copier->driver;
    tms_copy_attributes_t attributes = {.source_order = TMS_IN_STREAM_ORDER};
    size_t first = 0;
    *refused = !copies_at_once(driver);
    if (*refused) return TMS_OK;
    CUresult result = driver->cuMemcpyBatchAsync(all->targets, all->sources, all->sizes, all->count,
                                                 (struct CUmemcpyAttributes_st *)&attributes, &first, 1, copier->stream);
    *refused = result == CUDA_ERROR_NOT_SUPPORTED;
    return *refused ? TMS_OK : tms_driver_check(driver, context, "cuMemcpyBatchAsync", result, error);
}

static tms_status_t flush(tms_copier_t *copier, tms_error_t *error) {
    tms_gathered_t *all = &copier->gathered;
    tms_error_context_t context = all->context;
    tms_status_t status = TMS_OK;
    bool one_by_one = all->count == 1;
    context.bytes = all->bytes;
    if (all->count > 0) copier->idle = false;
    if (all->count > 1) status = queue_at_once(copier, &one_by_one, &context, error);
    if (status == TMS_OK && one_by_one) status = queue_one_by_one(copier, &context, error);
    all->count = 0;
    all->bytes = 0;
    return status;
}

/* ---- copies ---- */

static void count_done(tms_copier_t *copier, uint64_t bytes) {
    if (copier->done) atomic_fetch_add(copier->done, bytes);
}

static tms_status_t call_on_idle(const tms_copier_t *copier, CUevent event, tms_error_t *error) {
    const tms_driver_table_t *driver = copier->driver;
    bool more = copier->on_idle && driver->cuEventQuery;
    tms_status_t status = TMS_OK;
    while (status == TMS_OK && more && driver->cuEventQuery(event) == CUDA_ERROR_NOT_READY)
        status = copier->on_idle(copier->on_idle_context, &more, error);
    return status;
}

/* Records an event after the copies queued since the last one, and waits for the event before it: at most two chunks are in
 * flight. */
static tms_status_t end_chunk(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error) {
    CUevent *event = &copier->events[copier->next];
    tms_status_t status = flush(copier, error);
    if (status == TMS_OK && !*event)
        status = TMS_DRIVER_CALL(copier->driver, context, error, cuEventCreate, event, CU_EVENT_DISABLE_TIMING);
    if (status == TMS_OK) status = TMS_DRIVER_CALL(copier->driver, context, error, cuEventRecord, *event, copier->stream);
    if (status != TMS_OK) return status;
    copier->behind[copier->next] = copier->queued;
    copier->queued = 0;
    copier->next = (copier->next + 1) % TMS_COPIER_EVENTS;
    uint64_t before = copier->behind[copier->next];
    if (before == 0) return TMS_OK;
    copier->behind[copier->next] = 0;
    status = call_on_idle(copier, copier->events[copier->next], error);
    if (status == TMS_OK)
        status = TMS_DRIVER_CALL(copier->driver, context, error, cuEventSynchronize, copier->events[copier->next]);
    if (status == TMS_OK) count_done(copier, before);
    return status;
}

/* Returns the number of bytes to queue in one driver call. */
static uint64_t part_of(const tms_copier_t *copier, uint64_t bytes) {
    if (!tms_wait_is_interruptible(copier->wait)) return bytes;
    uint64_t room = copier->copying->chunk_bytes - copier->queued;
    return bytes < room ? bytes : room;
}

static tms_status_t after_part(tms_copier_t *copier, uint64_t part, const tms_error_context_t *context, tms_error_t *error) {
    copier->queued += part;
    if (!tms_wait_is_interruptible(copier->wait) || copier->queued < copier->copying->chunk_bytes) return TMS_OK;
    tms_status_t status = end_chunk(copier, context, error);
    return status == TMS_OK ? tms_wait_check(copier->wait, context, error) : status;
}

tms_status_t tms_copier_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    copier->idle = false;
    for (uint64_t part, done = 0; status == TMS_OK && done < bytes; done += part) {
        part = part_of(copier, bytes - done);
        status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyDtoHAsync, (char *)host + done, address + done,
                                 part, copier->stream);
        /* A rejected copy has written nothing. A copy to memory that is not pinned may fail half-way if the device is lost.
         */
        if (status == TMS_OK || status == TMS_DEVICE_LOST) copier->begun++;
        if (status == TMS_OK) status = after_part(copier, part, context, error);
    }
    return status;
}

tms_status_t tms_copier_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                  const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    copier->idle = false;
    for (uint64_t part, done = 0; status == TMS_OK && done < bytes; done += part) {
        part = part_of(copier, bytes - done);
        status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyHtoDAsync, address + done,
                                 (const char *)host + done, part, copier->stream);
        if (status == TMS_OK) status = after_part(copier, part, context, error);
    }
    return status;
}

/* ---- parts of segments ---- */

tms_status_t tms_copier_begin_parts(const tms_copier_t *copier, CUdeviceptr segment, const tms_error_context_t *context,
                                    tms_error_t *error) {
    const CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = copier->device};
    unsigned long long access = 0;
    if (!copies_at_once(copier->driver)) return TMS_OK;
    return TMS_DRIVER_CALL(copier->driver, context, error, cuMemGetAccess, &access, &here, segment);
}

static tms_status_t gather(tms_copier_t *copier, bool to_host, CUdeviceptr target, CUdeviceptr source, uint64_t bytes,
                           const tms_error_context_t *context, tms_error_t *error) {
    tms_gathered_t *all = &copier->gathered;
    tms_status_t status = TMS_OK;
    if (all->count > 0 && (all->to_host != to_host || all->context.tag != context->tag)) status = flush(copier, error);
    for (uint64_t part, done = 0; status == TMS_OK && done < bytes; done += part) {
        part = part_of(copier, bytes - done);
        if (all->count == 0) {
            all->to_host = to_host;
            all->context = *context;
        }
        all->targets[all->count] = target + done;
        all->sources[all->count] = source + done;
        all->sizes[all->count++] = part;
        all->bytes += part;
        if (to_host) copier->begun++;
        if (all->count == TMS_GATHERED_COPIES || all->bytes >= TMS_GATHERED_BYTES) status = flush(copier, error);
        if (status == TMS_OK) status = after_part(copier, part, context, error);
    }
    return status;
}

tms_status_t tms_copier_part_to_host(tms_copier_t *copier, void *host, CUdeviceptr address, uint64_t bytes,
                                     const tms_error_context_t *context, tms_error_t *error) {
    return gather(copier, true, (uintptr_t)host, address, bytes, context, error);
}

tms_status_t tms_copier_part_to_device(tms_copier_t *copier, CUdeviceptr address, const void *host, uint64_t bytes,
                                       const tms_error_context_t *context, tms_error_t *error) {
    return gather(copier, false, address, (uintptr_t)host, bytes, context, error);
}

/* ---- the rest ---- */

tms_status_t tms_copier_fill(tms_copier_t *copier, CUdeviceptr address, uint64_t bytes, unsigned char value,
                             const tms_error_context_t *context, tms_error_t *error) {
    copier->idle = false;
    return TMS_DRIVER_CALL(copier->driver, context, error, cuMemsetD8Async, address, value, bytes, copier->stream);
}

tms_status_t tms_copier_on_device(tms_copier_t *copier, CUdeviceptr target, CUdeviceptr source, uint64_t bytes,
                                  const tms_error_context_t *context, tms_error_t *error) {
    copier->idle = false;
    return TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyDtoDAsync, target, source, bytes, copier->stream);
}

tms_status_t tms_copier_queue_all(tms_copier_t *copier, tms_error_t *error) {
    tms_status_t status = flush(copier, error);
    for (tms_copier_relay_t *relay = copier->held->relays; status == TMS_OK && relay; relay = relay->next)
        status = relay->table->wait(relay, error);
    return status;
}

tms_status_t tms_copier_wait(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_copier_queue_all(copier, error);
    if (status == TMS_OK) status = TMS_DRIVER_CALL(copier->driver, context, error, cuStreamSynchronize, copier->stream);
    if (status != TMS_OK) return status;
    copier->idle = true;
    for (int i = 0; i < TMS_COPIER_EVENTS; i++) {
        count_done(copier, copier->behind[i]);
        copier->behind[i] = 0;
    }
    count_done(copier, copier->queued);
    copier->queued = 0;
    return TMS_OK;
}

void tms_copier_step_out(tms_copier_t *copier) {
    tms_devices_leave(copier->copying->devices, copier->device);
    copier->outside = true;
}

tms_status_t tms_copier_step_in(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = tms_devices_enter(copier->copying->devices, copier->device, context, error);
    if (status == TMS_OK) copier->outside = false;
    return status;
}

/* ---- closing ---- */

/* After a failure copies may still be in flight, to memory that the caller is about to free. Waits for the stream, retries
 * once, and then waits for the whole device, unless that would invalidate a stream capture. A lost device and a driver that
 * has shut down copy nothing any more. Returns whether no copy is in flight. */
static bool drain(const tms_copier_t *copier) {
    const tms_driver_table_t *driver = copier->driver;
    const tms_log_t *log = copier->copying->log;
    tms_error_t reason;
    const tms_error_context_t context = {.operation = "wait for copies", .device = copier->device};
    struct tms_copier_holdings *held = copier->held;
    if (copier->idle || has_settled(held, driver, &reason)) return true;
    tms_log_write(log, TMS_LOG_WARNING, "%s The wait is retried.", reason.message);
    if (has_settled(held, driver, &reason)) return true;
    tms_status_t status = reason.status;
    if (status != TMS_CAPTURE_IN_PROGRESS) status = TMS_DRIVER_CALL(driver, &context, &reason, cuCtxSynchronize);
    if (status == TMS_OK || status == TMS_DEVICE_LOST || tms_driver_is_gone(&reason)) return true;
    tms_log_write(
        log, TMS_LOG_ERROR,
        "%s Copies may still be running, so the memory that they use stays allocated; later calls try again to release it.",
        reason.message);
    return false;
}

bool tms_copier_close(tms_copier_t *copier) {
    if (!copier->open) return true;
    struct tms_copier_holdings *held = copier->held;
    held->stream = copier->stream;
    for (int i = 0; i < TMS_COPIER_EVENTS; i++) held->events[i] = copier->events[i];
    bool idle = !copier->outside && drain(copier);
    held->busy = !idle;
    for (tms_copier_relay_t *relay = held->relays; relay; relay = relay->next) {
        if (relay->table->close) relay->table->close(relay);
    }
    held->node.retry = retry;
    held->node.holds = release_holdings(held, copier->driver, copier->wait);
    if (!copier->outside) tms_devices_leave(copier->copying->devices, copier->device);
    copier->open = false;
    copier->held = NULL;
    if (!held->node.holds) {
        free(held);
        return idle;
    }
    if (idle)
        tms_log_write(copier->copying->log, TMS_LOG_WARNING,
                      "a stream or an event of copies on device %d could not be destroyed; later calls retry it",
                      copier->device);
    tms_quarantine_add(copier->copying->quarantine, &held->node);
    return idle;
}
