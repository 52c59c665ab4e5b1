/* Entry points of events: recording in a stream or a capture, waiting, and IPC handles. */
#include <unistd.h>

#include "simulator/base/process.h"
#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/devices/context.h"
#include "simulator/streams/entries.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"
#include "simulator/work/event.h"

static const unsigned known_flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
static const unsigned record_flags = CU_EVENT_RECORD_EXTERNAL, wait_flags = CU_EVENT_WAIT_EXTERNAL;

static sim_event_t *find_event(CUevent handle) { return sim_table_find(&sim_state.events, (uint64_t)(uintptr_t)handle); }

CUresult sim_event_create(CUevent *handle, unsigned int flags) {
    bool between_processes = flags & CU_EVENT_INTERPROCESS;
    if (!handle || flags & ~known_flags) return CUDA_ERROR_INVALID_VALUE;
    if (between_processes && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
    sim_event_t *event = sim_event_new(flags);
    if (!event) return CUDA_ERROR_OUT_OF_MEMORY;
    if (between_processes && !sim_event_share(event)) {
        sim_table_remove(&sim_state.events, event->id);
        sim_event_release(event);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (CUevent)(uintptr_t)event->id;
    return CUDA_SUCCESS;
}

CUresult sim_event_destroy(CUevent handle) {
    sim_event_t *event = sim_table_remove(&sim_state.events, (uint64_t)(uintptr_t)handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    sim_event_release(event); /* queued records keep references */
    return CUDA_SUCCESS;
}

static bool is_idle(const sim_stream_t *stream) { return !stream->first && !stream->legacy; }

/* Records an event in a stream. An observed event needs a work item in the queue; for others the queue position suffices.
 * The legacy stream always needs a work item, because its earlier work includes that of the blocking streams. */
static CUresult record_now(sim_event_t *event, sim_stream_t *stream) {
    bool observed = event->shared || !(event->flags & CU_EVENT_DISABLE_TIMING);
    if (stream->context->error != CUDA_SUCCESS) return stream->context->error;
    if (is_idle(stream) || (!observed && !stream->legacy)) {
        uint64_t number = sim_event_note(event, stream, stream->submitted);
        if (is_idle(stream)) sim_event_reach(event, number);
        return CUDA_SUCCESS;
    }
    sim_op_t op = {.kind = SIM_OP_RECORD, .event = event};
    uint64_t position = 0, known_stream = event->stream, known_position = event->position, known_records = event->records;
    op.position = sim_event_note(event, stream, 0);
    CUresult result = sim_stream_submit(stream, &op, &position);
    if (result == CUDA_SUCCESS) {
        event->position = position;
    } else {
        sim_event_reach(event, op.position); /* the record was not queued, so waits must not block */
        event->stream = known_stream;
        event->position = known_position;
        event->records = known_records;
    }
    return result;
}

/* In a capture an event is a set of nodes, not a point in time, unless its record is requested as a graph node. */
static CUresult record_in_capture(sim_event_t *event, sim_stream_t *stream, unsigned flags) {
    if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (flags & CU_EVENT_RECORD_EXTERNAL) {
        const sim_op_t op = {.kind = SIM_OP_RECORD, .event = event};
        return sim_stream_submit(stream, &op, NULL);
    }
    sim_ids_clear(&event->nodes);
    if (!sim_ids_add(&event->nodes, stream->tails.ids, stream->tails.count)) return CUDA_ERROR_OUT_OF_MEMORY;
    event->stream = stream->id;
    event->position = stream->captured;
    event->captured = true;
    event->capture = stream->capture;
    return CUDA_SUCCESS;
}

CUresult sim_event_record_with_flags(CUevent handle, CUstream stream_handle, unsigned int flags) {
    sim_event_t *event = find_event(handle);
    sim_stream_t *stream = sim_stream_find(stream_handle);
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~record_flags) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) return record_in_capture(event, stream, flags);
    return flags ? CUDA_ERROR_ILLEGAL_STATE : record_now(event, stream);
}

CUresult sim_event_record(CUevent event, CUstream stream) { return sim_event_record_with_flags(event, stream, 0); }

/* Waits for an event that was recorded in a capture: the stream joins that capture. */
static CUresult wait_for_captured(const sim_event_t *event, sim_stream_t *stream) {
    if (!event->capture) return CUDA_ERROR_CAPTURED_EVENT;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (stream->capture && stream->capture != event->capture) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    sim_capture_join(event->capture, stream);
    if (!sim_ids_add(&stream->tails, event->nodes.ids, event->nodes.count)) return CUDA_ERROR_OUT_OF_MEMORY;
    sim_stream_t *source = sim_table_find(&sim_state.streams, event->stream);
    if (source && source != stream && source->captured == event->position) source->joined = true;
    return CUDA_SUCCESS;
}

CUresult sim_event_wait(CUstream stream_handle, CUevent handle, unsigned int flags) {
    sim_event_t *event = find_event(handle);
    sim_stream_t *stream = sim_stream_find(stream_handle);
    uint64_t number = 0;
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~wait_flags) return CUDA_ERROR_INVALID_VALUE;
    if (event->captured) return wait_for_captured(event, stream);
    if (stream->capture && !(flags & CU_EVENT_WAIT_EXTERNAL)) {
        stream->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (sim_event_is_remote(event, &number)) {
        const sim_op_t op = {.kind = SIM_OP_REMOTE, .event = event, .position = number};
        return sim_stream_submit(stream, &op, NULL);
    }
    if (!event->stream) return CUDA_SUCCESS; /* never recorded */
    const sim_op_t op = {.kind = SIM_OP_WAIT, .stream = event->stream, .position = event->position};
    return sim_stream_submit(stream, &op, NULL);
}

static bool is_reached(const sim_event_t *event) {
    uint64_t number = 0;
    if (sim_event_is_remote(event, &number)) return sim_event_remote_reached(event, number);
    return sim_stream_reached(event->stream, event->position);
}

/* Checks a query or synchronisation of an event. For an event recorded in an active capture, it invalidates the capture;
 * after that capture it is an error. For any other event it is an unsafe call. */
static CUresult check_query(const sim_event_t *event) {
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->captured) return sim_capture_check_unsafe();
    if (!event->capture) return CUDA_ERROR_INVALID_VALUE;
    event->capture->invalidated = true;
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult sim_event_query(CUevent handle) {
    const sim_event_t *event = find_event(handle);
    CUresult result = check_query(event);
    if (result != CUDA_SUCCESS) return result;
    return is_reached(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult wait_for_remote(sim_event_t *event, uint64_t number) {
    const sim_context_t *context = sim_context_current();
    CUresult result = CUDA_SUCCESS;
    event->references++; /* the program may destroy the event during the wait */
    sim_state_begin_synchronizing();
    while (result == CUDA_SUCCESS && context->error == CUDA_SUCCESS && !sim_event_remote_reached(event, number)) {
        if (!sim_state_wait_briefly()) result = CUDA_ERROR_DEINITIALIZED;
    }
    sim_state_end_synchronizing();
    sim_event_release(event);
    return result == CUDA_SUCCESS ? context->error : result;
}

CUresult sim_event_synchronize(CUevent handle) {
    sim_event_t *event = find_event(handle);
    uint64_t number = 0;
    CUresult result = check_query(event);
    if (result != CUDA_SUCCESS) return result;
    if (sim_event_is_remote(event, &number)) return wait_for_remote(event, number);
    sim_stream_t *stream = sim_table_find(&sim_state.streams, event->stream);
    return stream ? sim_stream_wait(stream, event->position) : CUDA_SUCCESS;
}

CUresult sim_event_elapsed(float *milliseconds, CUevent first, CUevent last) {
    static const double nanoseconds = 1e6, seconds = 1e3; /* nanoseconds per millisecond, milliseconds per second */
    const sim_event_t *start = find_event(first), *end = find_event(last);
    if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
    if (!start || !end || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
    if (start->captured || end->captured) return CUDA_ERROR_CAPTURED_EVENT;
    if (!start->records || !end->records) return CUDA_ERROR_INVALID_HANDLE;
    if (start->device != end->device) return CUDA_ERROR_INVALID_HANDLE;
    if (start->completed < start->records || end->completed < end->records) return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(end->time.tv_sec - start->time.tv_sec) * seconds +
                            (double)(end->time.tv_nsec - start->time.tv_nsec) / nanoseconds);
    return CUDA_SUCCESS;
}

CUresult sim_ipc_event_handle(CUipcEventHandle *handle, CUevent event_handle) {
    const sim_event_t *event = sim_table_find(&sim_state.events, (uint64_t)(uintptr_t)event_handle);
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->shared || event->imported) return CUDA_ERROR_INVALID_VALUE;
    const sim_ipc_name_t name = {.kind = SIM_IPC_EVENT, .process = getpid(), .file = event->shared_file};
    return sim_ipc_write(&name, handle->reserved);
}

CUresult sim_ipc_open_event(CUevent *event, CUipcEventHandle handle) {
    sim_ipc_name_t name;
    if (!event) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_ipc_read(&name, handle.reserved, SIM_IPC_EVENT)) return CUDA_ERROR_INVALID_VALUE;
    if (name.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    int file = sim_ipc_open(&name);
    if (file < 0) return CUDA_ERROR_INVALID_HANDLE;
    sim_event_t *opened = sim_event_new(CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    if (!opened || !sim_event_attach(opened, file)) {
        if (opened) {
            sim_table_remove(&sim_state.events, opened->id);
            sim_event_release(opened);
        }
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    opened->imported = true;
    *event = (CUevent)(uintptr_t)opened->id;
    return CUDA_SUCCESS;
}
