/* What a worker does with a piece of work: bytes, chunk by chunk. The mappings are looked at under the lock before every
 * chunk and pinned while it is touched without the lock; memory that went away meanwhile is a fault of the context. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "sim_modules.h"

static const uint64_t nanoseconds = 1000000000;

static bool goes_on(const sim_stream_t *stream) {
    return !sim_state.stopping && !stream->dropping && stream->context->error == CUDA_SUCCESS;
}

static void touch(const sim_op_t *op, uint64_t done, uint64_t bytes) {
    uint8_t *destination = (uint8_t *)(uintptr_t)(op->destination + done);
    if (op->kind == SIM_OP_COPY)
        memmove(destination, (const uint8_t *)(uintptr_t)(op->source + done), bytes);
    else if (op->kind == SIM_OP_SET)
        memset(destination, op->value, bytes);
    else
        for (uint64_t i = 0; i < bytes; i++) destination[i] = (uint8_t)(destination[i] + op->value);
}

/* The devices that take part: the stream's own and, for a copy, the owners of both ends. */
static unsigned devices_of(const sim_context_t *context, const sim_op_t *op) {
    unsigned devices = 1U << context->device;
    if (op->kind != SIM_OP_COPY) return devices;
    const sim_mapping_t *destination = op->destination_on_device ? sim_memory_mapping_at(op->destination) : NULL;
    const sim_mapping_t *source = op->source_on_device ? sim_memory_mapping_at(op->source) : NULL;
    if (destination) devices |= 1U << destination->physical->device;
    if (source) devices |= 1U << source->physical->device;
    return devices;
}

bool sim_work_reachable(const sim_context_t *context, const sim_op_t *op) {
    unsigned devices = devices_of(context, op);
    if (op->destination_on_device && !sim_memory_reachable(op->destination, op->bytes, devices, true, NULL)) return false;
    return !op->source_on_device || sim_memory_reachable(op->source, op->bytes, devices, false, NULL);
}

/* Does at most *bytes from `done` on, tells how many it did, and takes the lock again. */
static CUresult work_chunk(const sim_context_t *context, const sim_op_t *op, uint64_t done, uint64_t *bytes) {
    const sim_context_t *kernel = op->kind == SIM_OP_ADD ? context : NULL;
    unsigned devices = devices_of(context, op);
    sim_mapping_t *destination = NULL, *source = NULL;
    if (op->destination_on_device) {
        destination = sim_memory_pin(op->destination + done, bytes, devices, true, kernel);
        if (!destination) return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (op->source_on_device) {
        source = sim_memory_pin(op->source + done, bytes, devices, false, kernel);
        if (!source) {
            if (destination) sim_memory_unpin(destination);
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    }
    pthread_mutex_unlock(&sim_state.lock);
    touch(op, done, *bytes);
    pthread_mutex_lock(&sim_state.lock);
    if (source) sim_memory_unpin(source);
    if (destination) sim_memory_unpin(destination);
    return CUDA_SUCCESS;
}

/* Lets the time pass that `bytes` take since `start` at the bandwidth set; the lock is free meanwhile. */
static void pace(const sim_stream_t *stream, const struct timespec *start, uint64_t bytes) {
    uint64_t rate = sim_state.bandwidth;
    if (!rate) return;
    uint64_t fraction = (uint64_t)((__extension__(unsigned __int128)(bytes % rate) * nanoseconds) / rate);
    uint64_t nanosecond = (uint64_t)start->tv_nsec + fraction;
    struct timespec end = {.tv_sec = start->tv_sec + (time_t)(bytes / rate) + (time_t)(nanosecond / nanoseconds),
                           .tv_nsec = (long)(nanosecond % nanoseconds)};
    int status = 0;
    while (status != ETIMEDOUT && goes_on(stream) && sim_state.bandwidth == rate)
        status = pthread_cond_timedwait(&sim_state.changed, &sim_state.lock, &end);
}

CUresult sim_stream_work(sim_stream_t *stream, sim_op_t *op) {
    struct timespec start;
    CUresult result = CUDA_SUCCESS;
    if (op->kind == SIM_OP_WAIT) return CUDA_SUCCESS;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (uint64_t done = 0; done < op->bytes && result == CUDA_SUCCESS && goes_on(stream);) {
        if (sim_state.unmapping) {
            pthread_cond_wait(&sim_state.changed, &sim_state.lock);
            continue;
        }
        uint64_t bytes = op->bytes - done < SIM_CHUNK_BYTES ? op->bytes - done : SIM_CHUNK_BYTES;
        result = work_chunk(stream->context, op, done, &bytes);
        if (result != CUDA_SUCCESS) break;
        done += bytes;
        if (op->kind == SIM_OP_COPY) pace(stream, &start, done);
    }
    return result;
}
