/* Events: a place in a stream's queue, reached or not. */
#include <stdlib.h>

#include "sim_modules.h"

static const unsigned known_flags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;

static sim_event_t *find_event(CUevent handle) { return sim_table_find(&sim_state.events, (uint64_t)(uintptr_t)handle); }

CUresult sim_event_create(CUevent *handle, unsigned int flags) {
    if (!handle || flags & ~known_flags) return CUDA_ERROR_INVALID_VALUE;
    sim_event_t *event = calloc(1, sizeof *event);
    if (!event) return CUDA_ERROR_OUT_OF_MEMORY;
    event->id = sim_state_new_id();
    if (!sim_table_insert(&sim_state.events, event->id, event)) {
        free(event);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (CUevent)(uintptr_t)event->id;
    return CUDA_SUCCESS;
}

CUresult sim_event_destroy(CUevent handle) {
    sim_event_t *event = sim_table_remove(&sim_state.events, (uint64_t)(uintptr_t)handle);
    free(event);
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult sim_event_record(CUevent handle, CUstream stream_handle) {
    sim_event_t *event = find_event(handle);
    sim_stream_t *stream = sim_stream_find(stream_handle);
    uint64_t position = 0;
    CUresult result = CUDA_SUCCESS;
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture && stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture) {
        position = stream->captured;
    } else if (stream->legacy) {
        /* The legacy stream's past includes that of the blocking ones: work that does nothing stands for it. */
        const sim_op_t nothing = {.kind = SIM_OP_WAIT};
        result = sim_stream_submit(stream, &nothing, &position);
    } else {
        position = stream->submitted;
    }
    if (result != CUDA_SUCCESS) return result;
    event->stream = stream->id;
    event->position = position;
    event->captured = stream->capture != NULL;
    event->capture = stream->capture;
    return CUDA_SUCCESS;
}

CUresult sim_event_wait(CUstream stream_handle, CUevent handle, unsigned int flags) {
    const sim_event_t *event = find_event(handle);
    sim_stream_t *stream = sim_stream_find(stream_handle);
    (void)flags;
    if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured) {
        if (!event->capture) return CUDA_ERROR_CAPTURED_EVENT;
        if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        if (stream->capture && stream->capture != event->capture) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
        sim_capture_join(event->capture, stream);
        sim_stream_t *source = sim_table_find(&sim_state.streams, event->stream);
        if (source && source != stream && source->captured == event->position) source->joined = true;
        return CUDA_SUCCESS;
    }
    if (stream->capture) {
        stream->capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!event->stream) return CUDA_SUCCESS; /* never recorded */
    const sim_op_t op = {.kind = SIM_OP_WAIT, .stream = event->stream, .position = event->position};
    return sim_stream_submit(stream, &op, NULL);
}

CUresult sim_event_query(CUevent handle) {
    const sim_event_t *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
    return sim_stream_reached(event->stream, event->position) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult sim_event_synchronize(CUevent handle) {
    const sim_event_t *event = find_event(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
    sim_stream_t *stream = sim_table_find(&sim_state.streams, event->stream);
    return stream ? sim_stream_wait(stream, event->position) : CUDA_SUCCESS;
}
