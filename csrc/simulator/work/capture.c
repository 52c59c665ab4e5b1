#include "simulator/work/capture.h"

#include <stdlib.h>

#include "simulator/base/simulation.h"
#include "simulator/work/graph.h"

/* Whether this capture forbids unsafe calls of the thread, by the table in the documentation of
 * cuThreadExchangeStreamCaptureMode. */
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

/* Waiting for a context with a capturing stream is forbidden in every mode, because captured work never runs. */
CUresult sim_capture_check_context(const sim_context_t *context) {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        const sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->context != context || !stream->capture) continue;
        stream->capture->invalidated = true;
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    /* A capture on another context can forbid it like any unsafe call. */
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
    sim_ids_clear(&stream->tails);
    if (!sim_ids_add(&stream->tails, &node->id, 1)) {
        stream->capture->invalidated = true; /* the next node would lack a dependency */
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
    sim_ids_clear(&stream->tails);
    stream->joined = true; /* it has no unjoined work yet */
}

CUresult sim_capture_start(sim_stream_t *stream, sim_graph_t *graph, CUstreamCaptureMode mode) {
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

bool sim_capture_release_streams(const sim_capture_t *capture) {
    bool joined = true;
    for (size_t i = 0; i < sim_state.streams.count; i++) {
        sim_stream_t *stream = sim_state.streams.slots[i].value;
        if (stream->capture != capture) continue;
        joined = joined && (stream->joined || stream->id == capture->origin);
        stream->capture = NULL;
    }
    return joined;
}

void sim_capture_remove(sim_capture_t *capture) {
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

CUstreamCaptureStatus sim_capture_state(const sim_stream_t *stream) {
    if (!stream->capture) return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* A capture cannot end without its origin stream, so it is removed. Without another stream it stays, invalidated. */
void sim_capture_detach(sim_stream_t *stream) {
    sim_capture_t *capture = stream->capture;
    if (!capture) return;
    stream->capture = NULL;
    capture->invalidated = true;
    if (capture->origin != stream->id) return;
    sim_capture_release_streams(capture);
    if (capture->owns_graph) sim_graph_delete(capture->graph);
    sim_capture_remove(capture);
}

void sim_capture_clear(void) {
    while (sim_state.captures) {
        sim_capture_t *capture = sim_state.captures;
        if (capture->owns_graph) sim_graph_delete(capture->graph);
        sim_capture_remove(capture);
    }
}
