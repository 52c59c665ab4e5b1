/* Stream captures: what is submitted becomes part of a graph, and what must not happen meanwhile invalidates them. */
#include <stdlib.h>

#include "sim_modules.h"

/* Whether this capture forbids unsafe calls of the thread, by the table in cuThreadExchangeStreamCaptureMode's
 * documentation. */
static bool forbids(const sim_capture_t *capture, const sim_thread_t *thread) {
    bool own = capture->thread == thread->id;
    if (thread->mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (own) return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return thread->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult sim_capture_check_unsafe(void) {
    const sim_thread_t *thread = sim_state_thread();
    CUresult result = CUDA_SUCCESS;
    for (sim_capture_t *capture = sim_state.captures; capture; capture = capture->next) {
        if (!forbids(capture, thread)) continue;
        capture->invalidated = true;
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

/* Waiting for a context that includes a capturing stream is forbidden in every mode: that work will never run. */
CUresult sim_capture_check_context(const sim_context_t *context) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        const sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->context != context || !stream->capture) continue;
        stream->capture->invalidated = true;
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    /* A capture elsewhere that watches all threads forbids it as any other unsafe call. */
    return result == CUDA_SUCCESS ? sim_capture_check_unsafe() : result;
}

CUresult sim_capture_check_legacy(const sim_context_t *context, bool query) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        const sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->context != context || !stream->capture || !stream->blocking) continue;
        if (!query) stream->capture->invalidated = true;
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return result;
}

CUresult sim_capture_check_stream(sim_stream_t *stream) {
    if (stream->legacy) return sim_capture_check_legacy(stream->context, false);
    if (!stream->capture) return CUDA_SUCCESS;
    stream->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult sim_capture_record(sim_stream_t *stream, const sim_op_t *op) {
    if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    sim_node_t *node = sim_graph_append(stream->capture->graph, op, &stream->tails);
    if (!node) return CUDA_ERROR_OUT_OF_MEMORY;
    node->op.context = stream->context;
    sim_nodes_clear(&stream->tails);
    if (!sim_nodes_add(&stream->tails, &node->id, 1)) {
        stream->capture->invalidated = true; /* it would lack an edge */
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stream->captured++;
    stream->joined = false;
    return CUDA_SUCCESS;
}

void sim_capture_join(sim_capture_t *capture, sim_stream_t *stream) {
    if (stream->capture == capture) return;
    stream->capture = capture;
    stream->captured = 0;
    sim_nodes_clear(&stream->tails);
    stream->joined = true; /* it has done nothing that could be lost */
}

static CUresult begin_capture(CUstream handle, sim_graph_t *graph, CUstreamCaptureMode mode) {
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    sim_capture_t *capture = calloc(1, sizeof *capture);
    sim_graph_t *target = graph ? graph : sim_graph_new(false);
    if (!capture || !target) {
        free(capture);
        if (target && !graph) sim_graph_delete(target);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *capture = (sim_capture_t){.next = sim_state.captures,
                               .id = ++sim_state.next_capture,
                               .mode = mode,
                               .thread = sim_state_thread()->id,
                               .origin = stream->id,
                               .graph = target,
                               .owns_graph = !graph};
    sim_state.captures = capture;
    sim_capture_join(capture, stream);
    return CUDA_SUCCESS;
}

CUresult sim_capture_begin(CUstream stream, CUstreamCaptureMode mode) { return begin_capture(stream, NULL, mode); }

CUresult sim_capture_begin_to_graph(CUstream stream, CUgraph graph, const void *dependencies, const void *edges,
                                    size_t count, CUstreamCaptureMode mode) {
    sim_graph_t *target = sim_table_find(&sim_state.graphs, (uint64_t)(uintptr_t)graph);
    const uint64_t *nodes = dependencies; /* handles are identifiers */
    (void)edges;
    if (!target || target->executable || (count && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (!sim_table_find(&sim_state.nodes, nodes[i])) return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = begin_capture(stream, target, mode);
    if (result != CUDA_SUCCESS) return result;
    return sim_nodes_add(&sim_stream_find(stream)->tails, nodes, count) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Takes all streams out of a capture; true if none had done work that nobody waits for. */
static bool release_streams(const sim_capture_t *capture) {
    bool joined = true;
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->capture != capture) continue;
        joined = joined && (stream->joined || stream->id == capture->origin);
        stream->capture = NULL;
    }
    return joined;
}

static void unlink_capture(sim_capture_t *capture) {
    for (sim_capture_t **link = &sim_state.captures; *link; link = &(*link)->next) {
        if (*link == capture) {
            *link = capture->next;
            break;
        }
    }
    for (size_t i = 0; i < sim_state.events.count; i++) {
        sim_event_t *event = sim_state.events.slots[i].value;
        if (event->capture == capture) event->capture = NULL;
    }
    free(capture);
}

CUresult sim_capture_end(CUstream handle, CUgraph *graph) {
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream || stream->legacy) return CUDA_ERROR_INVALID_HANDLE;
    if (graph) *graph = NULL;
    sim_capture_t *capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream->id) {
        capture->invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    CUresult result = release_streams(capture) ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    if (capture->invalidated) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    /* It has ended all the same. */
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != sim_state_thread()->id)
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (graph && result == CUDA_SUCCESS) *graph = (CUgraph)(uintptr_t)capture->graph->id;
    if (result != CUDA_SUCCESS && capture->owns_graph) sim_graph_delete(capture->graph);
    unlink_capture(capture);
    return result;
}

CUstreamCaptureStatus sim_capture_state(const sim_stream_t *stream) {
    if (!stream->capture) return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult sim_capture_status(CUstream handle, CUstreamCaptureStatus *status) {
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy) {
        CUresult result = sim_capture_check_legacy(stream->context, true);
        if (result != CUDA_SUCCESS) return result;
    }
    *status = sim_capture_state(stream);
    return CUDA_SUCCESS;
}

CUresult sim_capture_exchange_mode(CUstreamCaptureMode *mode) {
    sim_thread_t *thread = sim_state_thread();
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread->mode;
    thread->mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* Without its origin a capture can never end; without another of its streams it cannot end well. */
void sim_capture_forget(sim_stream_t *stream) {
    sim_capture_t *capture = stream->capture;
    if (!capture) return;
    stream->capture = NULL;
    capture->invalidated = true;
    if (capture->origin != stream->id) return;
    release_streams(capture);
    if (capture->owns_graph) sim_graph_delete(capture->graph);
    unlink_capture(capture);
}

void sim_capture_clear(void) {
    while (sim_state.captures) {
        sim_capture_t *capture = sim_state.captures;
        if (capture->owns_graph) sim_graph_delete(capture->graph);
        unlink_capture(capture);
    }
}
