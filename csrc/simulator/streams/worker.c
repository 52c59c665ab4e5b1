/* Execution of a work item by a worker, in chunks. Before each chunk the worker looks up and pins the mappings with the
 * lock held; it touches the bytes without the lock. Access to memory that was unmapped in between is a fault of the
 * context. */
#include "simulator/streams/worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "simulator/base/simulation.h"
#include "simulator/memory/access.h"
#include "simulator/work/event.h"
#include "simulator/work/op.h"

static const uint64_t nanoseconds = 1000000000;

/* The address of byte `done` of a work item with rows. */
static uint64_t row_address(const sim_op_t *op, uint64_t address, uint64_t pitch, uint64_t done) {
    return address + done / op->bytes * pitch + done % op->bytes;
}

static void set(const sim_op_t *op, uint8_t *destination, uint64_t bytes) {
    if (op->width <= 1) {
        memset(destination, (int)op->value, bytes);
        return;
    }
    for (uint64_t i = 0; i + sizeof op->value <= bytes; i += sizeof op->value)
        memcpy(destination + i, &op->value, sizeof op->value);
}

static void touch(const sim_op_t *op, uint64_t done, uint64_t bytes) {
    uint8_t *destination = (uint8_t *)(uintptr_t)row_address(op, op->destination, op->destination_pitch, done);
    const uint8_t *source = (const uint8_t *)(uintptr_t)row_address(op, op->source, op->source_pitch, done);
    sim_memory_populate((uintptr_t)destination, bytes, true);
    if (op->kind == SIM_OP_COPY && op->source_on_device) sim_memory_populate((uintptr_t)source, bytes, false);
    if (op->kind == SIM_OP_COPY)
        memmove(destination, source, bytes);
    else if (op->kind == SIM_OP_SET)
        set(op, destination, bytes);
    else
        for (uint64_t i = 0; i < bytes; i++) destination[i] = (uint8_t)(destination[i] + op->value);
}

/* The device mask for one side of a work item: the stream's device, or the device named for that side. */
static unsigned device_of(const sim_context_t *context, const sim_op_t *op, bool of_destination) {
    if (op->between_devices) return 1U << (of_destination ? op->destination_device : op->source_device);
    return context ? 1U << context->device : 0;
}

bool sim_work_reachable(const sim_context_t *context, const sim_op_t *op) {
    unsigned writers = device_of(context, op, true), readers = device_of(context, op, false);
    for (uint64_t row = 0; row < sim_op_rows(op); row++) {
        uint64_t destination = op->destination + row * op->destination_pitch, source = op->source + row * op->source_pitch;
        if (op->destination_on_device && !sim_memory_reachable(destination, op->bytes, writers, true, NULL)) return false;
        if (op->source_on_device && !sim_memory_reachable(source, op->bytes, readers, false, NULL)) return false;
    }
    return true;
}

/* The context's error for an access to unmapped memory. */
static CUresult fault_of(const sim_op_t *op) {
    return op->kind == SIM_OP_SET && op->of_graph ? CUDA_ERROR_LAUNCH_FAILED : CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* Executes at most *bytes from `done` on, and stores the executed count. The lock is released while it runs. */
static CUresult work_chunk(const sim_context_t *context, const sim_op_t *op, uint64_t done, uint64_t *bytes) {
    const sim_context_t *kernel = op->kind == SIM_OP_ADD ? context : NULL;
    unsigned writers = device_of(context, op, true), readers = device_of(context, op, false);
    sim_mapping_t *destination = NULL, *source = NULL;
    if (op->destination_on_device) {
        uint64_t address = row_address(op, op->destination, op->destination_pitch, done);
        destination = sim_memory_pin(address, bytes, writers, true, kernel);
        if (!destination) return fault_of(op);
    }
    if (op->source_on_device) {
        source = sim_memory_pin(row_address(op, op->source, op->source_pitch, done), bytes, readers, false, kernel);
        if (!source) {
            if (destination) sim_memory_unpin(destination);
            return fault_of(op);
        }
    }
    pthread_mutex_unlock(&sim_state.lock);
    touch(op, done, *bytes);
    pthread_mutex_lock(&sim_state.lock);
    if (source) sim_memory_unpin(source);
    if (destination) sim_memory_unpin(destination);
    return CUDA_SUCCESS;
}

static struct timespec later(const struct timespec *start, uint64_t seconds, uint64_t fraction) {
    uint64_t nanosecond = (uint64_t)start->tv_nsec + fraction;
    return (struct timespec){.tv_sec = start->tv_sec + (time_t)seconds + (time_t)(nanosecond / nanoseconds),
                             .tv_nsec = (long)(nanosecond % nanoseconds)};
}

/* Sleeps until the transfer of `bytes` since `start` matches the bandwidth limit. The lock is released during the sleep. */
static void pace(const sim_stream_t *stream, const struct timespec *start, uint64_t bytes) {
    uint64_t rate = sim_state.bandwidth;
    if (!rate) return;
    uint64_t fraction = (uint64_t)((__extension__(unsigned __int128)(bytes % rate) * nanoseconds) / rate);
    struct timespec end = later(start, bytes / rate, fraction);
    int status = 0;
    while (status != ETIMEDOUT && sim_state_may_continue(stream) && sim_state.bandwidth == rate)
        status = pthread_cond_timedwait(&sim_state.changed, &sim_state.lock, &end);
}

/* The lock is released during the sleep. */
static void sleep_for(const sim_stream_t *stream, uint64_t length) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    struct timespec end = later(&now, length / nanoseconds, length % nanoseconds);
    int status = 0;
    while (status != ETIMEDOUT && sim_state_may_continue(stream))
        status = pthread_cond_timedwait(&sim_state.changed, &sim_state.lock, &end);
}

/* Calls a function of the program without the lock. It may block, and must not call the driver. */
static void run_host_function(const sim_stream_t *stream, const sim_op_t *op) {
    sim_thread_t *thread = sim_state_thread();
    CUstream handle = (CUstream)(uintptr_t)(stream->legacy ? 0 : stream->id);
    thread->in_callback = true;
    pthread_mutex_unlock(&sim_state.lock);
    if (op->callback)
        op->callback(handle, CUDA_SUCCESS, op->argument);
    else
        op->function(op->argument);
    pthread_mutex_lock(&sim_state.lock);
    thread->in_callback = false;
}

/* The subject of a message about an access. */
static const char *name_of(const sim_op_t *op) {
    switch (op->kind) {
    case SIM_OP_COPY: return "a copy";
    case SIM_OP_SET: return "a fill";
    case SIM_OP_TASK: return op->task->name ? op->task->name : "an operation";
    default: return "a kernel";
    }
}

static CUresult work(sim_stream_t *stream, sim_op_t *op) {
    struct timespec start;
    CUresult result = CUDA_SUCCESS;
    switch (op->kind) {
    case SIM_OP_WAIT:
    case SIM_OP_REMOTE: return CUDA_SUCCESS;
    case SIM_OP_RECORD: sim_event_reach(op->event, op->position); return CUDA_SUCCESS;
    case SIM_OP_HOST: run_host_function(stream, op); return CUDA_SUCCESS;
    case SIM_OP_SLEEP: sleep_for(stream, op->nanoseconds); return CUDA_SUCCESS;
    case SIM_OP_TASK: return op->task->work(stream, op->task);
    default: break;
    }
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (uint64_t done = 0, total = op->bytes * sim_op_rows(op);
         done < total && result == CUDA_SUCCESS && sim_state_may_continue(stream);) {
        if (sim_state.unmapping) {
            pthread_cond_wait(&sim_state.changed, &sim_state.lock);
            continue;
        }
        uint64_t left = op->bytes - done % op->bytes, bytes = left < SIM_CHUNK_BYTES ? left : SIM_CHUNK_BYTES;
        result = work_chunk(stream->context, op, done, &bytes);
        if (result != CUDA_SUCCESS) break;
        done += bytes;
        if (op->kind == SIM_OP_COPY) pace(stream, &start, done);
    }
    return result;
}

CUresult sim_stream_work(sim_stream_t *stream, sim_op_t *op) {
    sim_thread_t *thread = sim_state_thread();
    thread->unreachable = 0;
    CUresult result = work(stream, op);
    if (result != CUDA_SUCCESS && thread->unreachable) sim_access_fault(name_of(op), thread->unreachable);
    return result;
}
