#include "simulator/streams/stream.h"

#include <signal.h>
#include <stdlib.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/devices/context.h"
#include "simulator/simulator.h"
#include "simulator/streams/entries.h"
#include "simulator/streams/worker.h"
#include "simulator/work/capture.h"
#include "simulator/work/event.h"
#include "simulator/work/op.h"

/* Thread name in top and debuggers; at most 15 characters. */
static const char thread_name[] = "gpu stream";

/* Whether implicit ordering delays this item: the legacy stream and the blocking streams of its context wait for each
 * other's earlier work. */
static bool is_ordered_behind_other(const sim_stream_t *stream, const sim_op_t *op) {
    if (!stream->blocking && !stream->legacy) return false;
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        const sim_stream_t *other = sim_state.streams.slots[i].value;
        bool ordered = stream->legacy ? other->blocking : other->legacy;
        if (ordered && other->context == stream->context && other->first && other->first->ticket < op->ticket) return true;
    }
    return false;
}

static bool is_ready(const sim_stream_t *stream, const sim_op_t *op) {
    if (stream->cancelling || stream->context->error != CUDA_SUCCESS) return true;
    if (op->gate && !sim_table_find(&sim_state.gates, (uint64_t)op->gate)) return false;
    if (op->kind == SIM_OP_WAIT && !sim_stream_reached(op->stream, op->position)) return false;
    if (op->kind == SIM_OP_REMOTE && !sim_event_remote_reached(op->event, op->position)) return false;
    return !is_ordered_behind_other(stream, op);
}

static void complete_first(sim_stream_t *stream) {
    sim_op_t *op = stream->first;
    stream->first = op->next;
    if (!stream->first) stream->last = NULL;
    stream->completed++;
    sim_op_release(op);
    free(op);
    sim_state_changed();
}

/* Moves a finished stream to the list of threads to join. */
static void move_to_finished(sim_stream_t *stream) {
    while (stream->first) complete_first(stream);
    sim_table_remove(&sim_state.streams, stream->id);
    stream->next_finished = sim_state.finished;
    sim_state.finished = stream;
    sim_state_changed();
}

/* Waits for the event that can unblock the stream. */
static void wait_for_work(sim_stream_t *stream) {
    if (!stream->first)
        pthread_cond_wait(&stream->wakeup, &sim_state.lock);
    else if (stream->first->kind == SIM_OP_REMOTE)
        sim_state_wait_briefly();
    else
        pthread_cond_wait(&sim_state.changed, &sim_state.lock);
}

static void *serve_stream(void *argument) {
    sim_stream_t *stream = argument;
    pthread_setname_np(pthread_self(), thread_name);
    pthread_mutex_lock(&sim_state.lock);
    while (!sim_state.stopping && (stream->first || !stream->closing)) {
        if (!stream->first || !is_ready(stream, stream->first)) {
            wait_for_work(stream);
            continue;
        }
        CUresult result = sim_stream_work(stream, stream->first);
        if (result != CUDA_SUCCESS) sim_context_fail(stream->context, result);
        complete_first(stream);
    }
    move_to_finished(stream);
    pthread_mutex_unlock(&sim_state.lock);
    return NULL;
}

/* A finished thread does not need the lock again, so it can be joined with the lock held. */
static void join_finished(void) {
    while (sim_state.finished) {
        sim_stream_t *stream = sim_state.finished;
        sim_state.finished = stream->next_finished;
        if (stream->has_worker) pthread_join(stream->thread, NULL);
        pthread_cond_destroy(&stream->wakeup);
        sim_ids_clear(&stream->tails);
        free(stream);
    }
}

/* Blocks all signals in workers: only threads of the program handle signals. */
static CUresult start_thread(sim_stream_t *stream) {
    sigset_t all, before;
    if (stream->has_worker) return CUDA_SUCCESS;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    stream->has_worker = pthread_create(&stream->thread, NULL, serve_stream, stream) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return stream->has_worker ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static sim_stream_t *make_stream(sim_context_t *context, bool legacy, bool blocking) {
    join_finished();
    sim_stream_t *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    *stream = (sim_stream_t){.id = sim_state_new_id(), .context = context, .legacy = legacy, .blocking = blocking};
    pthread_cond_init(&stream->wakeup, NULL);
    if (sim_table_insert(&sim_state.streams, stream->id, stream)) return stream;
    pthread_cond_destroy(&stream->wakeup);
    free(stream);
    return NULL;
}

/* Finds a thread's default stream in a context of cuCtxCreate. */
static sim_stream_t *find_stream_of(const sim_thread_t *thread, const sim_context_t *context) {
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->context == context && stream->per_thread && stream->owner == thread->id) return stream;
    }
    return NULL;
}

/* Finds or creates the thread's default stream. The context owns it; it outlives the thread. */
static sim_stream_t *find_own_stream(void) {
    sim_context_t *context = sim_context_current();
    if (!context) return NULL;
    sim_thread_t *thread = sim_state_thread();
    uint64_t *known = context->created ? NULL : &thread->streams[context->device];
    sim_stream_t *stream = known ? sim_table_find(&sim_state.streams, *known) : find_stream_of(thread, context);
    if (stream && !stream->closing) return stream;
    stream = make_stream(context, false, true);
    if (!stream) return NULL;
    stream->per_thread = true;
    stream->owner = thread->id;
    if (known) *known = stream->id;
    return stream;
}

sim_stream_t *sim_stream_find(CUstream handle) {
    if (handle == CU_STREAM_PER_THREAD) return find_own_stream();
    if (handle == NULL || handle == CU_STREAM_LEGACY) {
        sim_context_t *context = sim_context_current();
        if (context && !context->legacy) context->legacy = make_stream(context, true, false);
        return context ? context->legacy : NULL;
    }
    sim_stream_t *stream = sim_table_find(&sim_state.streams, (uint64_t)(uintptr_t)handle);
    return stream && !stream->closing && !stream->legacy ? stream : NULL;
}

CUresult sim_stream_create_with_priority(CUstream *handle, unsigned int flags, int priority) {
    sim_context_t *context = sim_context_current();
    if (!handle || flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    sim_stream_t *stream = make_stream(context, false, !(flags & CU_STREAM_NON_BLOCKING));
    if (!stream) return CUDA_ERROR_OUT_OF_MEMORY;
    /* A priority outside the range is clamped, as documented. */
    stream->priority = priority > 0 ? 0 : priority < SIM_GREATEST_PRIORITY ? SIM_GREATEST_PRIORITY : priority;
    sim_state.devices[context->device].streams++;
    *handle = (CUstream)(uintptr_t)stream->id;
    return CUDA_SUCCESS;
}

CUresult sim_stream_create(CUstream *handle, unsigned int flags) {
    return sim_stream_create_with_priority(handle, flags, 0);
}

/* The worker completes the queue and exits. A stream without a worker is destroyed at once. */
static void close_stream(sim_stream_t *stream) {
    if (stream->closing) return;
    if (!stream->legacy && !stream->per_thread) sim_state.devices[stream->context->device].streams--;
    sim_capture_detach(stream);
    stream->closing = true;
    pthread_cond_signal(&stream->wakeup);
    sim_state_changed();
    if (!stream->has_worker) move_to_finished(stream);
}

CUresult sim_stream_destroy(CUstream handle) {
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream || stream->legacy || stream->per_thread) return CUDA_ERROR_INVALID_HANDLE;
    close_stream(stream);
    return CUDA_SUCCESS;
}

CUresult sim_stream_submit(sim_stream_t *stream, const sim_op_t *work, uint64_t *position) {
    if (position) *position = 0;
    if (stream->context->error != CUDA_SUCCESS) return stream->context->error;
    if (stream->capture) return sim_capture_record(stream, work);
    CUresult result = stream->legacy ? sim_capture_check_legacy(stream->context, false) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) result = start_thread(stream);
    if (result != CUDA_SUCCESS) return result;
    sim_op_t *op = malloc(sizeof *op);
    if (!op) return CUDA_ERROR_OUT_OF_MEMORY;
    *op = *work;
    op->next = NULL;
    sim_op_retain(op);
    op->ticket = ++sim_state.next_ticket;
    if (stream->last)
        stream->last->next = op;
    else
        stream->first = op;
    stream->last = op;
    stream->submitted++;
    if (position) *position = stream->submitted;
    pthread_cond_signal(&stream->wakeup);
    sim_state_changed();
    return CUDA_SUCCESS;
}

bool sim_stream_reached(uint64_t id, uint64_t position) {
    const sim_stream_t *stream = sim_table_find(&sim_state.streams, id);
    return !stream || stream->completed >= position; /* a destroyed stream has completed its work */
}

CUresult sim_stream_wait(sim_stream_t *stream, uint64_t position) {
    const sim_context_t *context = stream->context;
    uint64_t id = stream->id; /* the stream may be destroyed during the wait */
    CUresult result = CUDA_SUCCESS;
    sim_state_begin_synchronizing();
    while (result == CUDA_SUCCESS && context->error == CUDA_SUCCESS && !sim_stream_reached(id, position)) {
        if (!sim_state_wait()) result = CUDA_ERROR_DEINITIALIZED;
    }
    sim_state_end_synchronizing();
    return result == CUDA_SUCCESS ? context->error : result;
}

CUresult sim_stream_synchronize(CUstream handle) {
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sim_capture_check_stream(stream);
    if (result != CUDA_SUCCESS) return result;
    uint64_t position = stream->submitted;
    if (stream->legacy) {
        /* Earlier work includes that of the blocking streams: an empty work item waits for it. */
        const sim_op_t nothing = {.kind = SIM_OP_WAIT};
        result = sim_stream_submit(stream, &nothing, &position);
    }
    return result == CUDA_SUCCESS ? sim_stream_wait(stream, position) : result;
}

CUresult sim_stream_query(CUstream handle) {
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sim_capture_check_stream(stream);
    if (result == CUDA_SUCCESS) result = stream->context->error;
    if (result == CUDA_SUCCESS && stream->first) result = CUDA_ERROR_NOT_READY;
    return result;
}

void sim_stream_close_all(sim_context_t *context) {
    for (size_t i = sim_state.streams.count;
         i-- > 0;) { /* backwards, because closing may remove the stream from the table */
        sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->context != context) continue;
        stream->cancelling = true;
        close_stream(stream);
    }
}

void sim_stream_clear(void) {
    sim_state.stopping = true;
    sim_state_changed();
    for (size_t i = sim_state.streams.count; i-- > 0;) {
        sim_stream_t *stream = sim_state.streams.slots[i].value;
        pthread_cond_signal(&stream->wakeup);
        if (!stream->has_worker) move_to_finished(stream);
    }
    while (sim_state.streams.count) pthread_cond_wait(&sim_state.changed, &sim_state.lock);
    join_finished();
    sim_table_release(&sim_state.streams);
    sim_state.stopping = false;
    for (int i = 0; i < TMS_SIM_MAX_DEVICES; i++) {
        sim_state.devices[i].streams = 0;
        sim_state.devices[i].primary.legacy = NULL;
    }
}

/* Whether a context has incomplete work that was submitted before this ticket. */
static bool is_busy(const sim_context_t *context, uint64_t before_ticket) {
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        const sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->context == context && stream->first && stream->first->ticket < before_ticket) return true;
    }
    return false;
}

CUresult sim_stream_drain(sim_context_t *context) {
    uint64_t before = sim_state.next_ticket + 1;
    CUresult result = CUDA_SUCCESS;
    sim_state_begin_synchronizing();
    while (result == CUDA_SUCCESS && context->error == CUDA_SUCCESS && is_busy(context, before)) {
        if (!sim_state_wait()) result = CUDA_ERROR_DEINITIALIZED;
        if (!context->alive) result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    sim_state_end_synchronizing();
    return result == CUDA_SUCCESS ? context->error : result;
}

static bool overlaps(uint64_t address, uint64_t bytes, uint64_t other, uint64_t other_bytes) {
    return address < other + other_bytes && other < address + bytes;
}

static bool uses_host(const sim_op_t *op, uint64_t address, uint64_t bytes) {
    if (op->kind != SIM_OP_COPY) return false;
    uint64_t read = sim_op_extent(op, op->source_pitch), written = sim_op_extent(op, op->destination_pitch);
    return (!op->source_on_device && overlaps(op->source, read, address, bytes)) ||
           (!op->destination_on_device && overlaps(op->destination, written, address, bytes));
}

static bool host_is_used(uint64_t address, uint64_t bytes) {
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        const sim_stream_t *stream = sim_state.streams.slots[i].value;
        for (const sim_op_t *op = stream->first; op; op = op->next) {
            if (uses_host(op, address, bytes)) return true;
        }
    }
    return false;
}

CUresult sim_stream_wait_for_host(uint64_t address, uint64_t bytes) {
    CUresult result = CUDA_SUCCESS;
    sim_state_begin_synchronizing();
    while (result == CUDA_SUCCESS && host_is_used(address, bytes)) {
        if (!sim_state_wait()) result = CUDA_ERROR_DEINITIALIZED;
    }
    sim_state_end_synchronizing();
    return result;
}

CUresult sim_stream_priority(CUstream handle, int *priority) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!priority) return CUDA_ERROR_INVALID_VALUE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult sim_stream_flags(CUstream handle, unsigned int *flags) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = stream->blocking || stream->legacy ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
    return CUDA_SUCCESS;
}

CUresult sim_stream_identifier(CUstream handle, unsigned long long *id) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!id) return CUDA_ERROR_INVALID_VALUE;
    *id = stream->id;
    return CUDA_SUCCESS;
}

CUresult sim_stream_context(CUstream handle, CUcontext *context) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!context) return CUDA_ERROR_INVALID_VALUE;
    *context = (CUcontext)(uintptr_t)stream->context->id;
    return CUDA_SUCCESS;
}

CUresult sim_stream_device(CUstream handle, int *device) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = stream->context->device;
    return CUDA_SUCCESS;
}

CUresult sim_stream_host_function(CUstream handle, sim_host_function_t *function, void *argument) {
    const sim_op_t op = {.kind = SIM_OP_HOST, .function = function, .argument = argument};
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    return function ? sim_stream_submit(stream, &op, NULL) : CUDA_ERROR_INVALID_VALUE;
}

/* Unlike cudaLaunchHostFunc, a callback cannot be captured. It runs once, or never if the context fails first. */
CUresult sim_stream_add_callback(CUstream handle, sim_stream_callback_t *callback, void *argument, unsigned int flags) {
    const sim_op_t op = {.kind = SIM_OP_HOST, .callback = callback, .argument = argument};
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_capture_check_stream(stream);
    return result == CUDA_SUCCESS ? sim_stream_submit(stream, &op, NULL) : result;
}
