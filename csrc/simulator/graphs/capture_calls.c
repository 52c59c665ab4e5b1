/* Entry points that begin, end, query and change captures. */
#include <string.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/graphs/entries.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"
#include "simulator/work/graph.h"

static CUresult begin_capture(CUstream handle, sim_graph_t *graph, CUstreamCaptureMode mode) {
    sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    return sim_capture_start(stream, graph, mode);
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
    return sim_ids_add(&sim_stream_find(stream)->tails, nodes, count) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
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
    CUresult result = sim_capture_release_streams(capture) ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    if (capture->invalidated) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    /* The capture ends despite the error. */
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != sim_state_thread()->id)
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (graph && result == CUDA_SUCCESS) *graph = (CUgraph)(uintptr_t)capture->graph->id;
    if (result != CUDA_SUCCESS && capture->owns_graph) sim_graph_delete(capture->graph);
    sim_capture_remove(capture);
    return result;
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

/* Edges have no data in the simulation: one array of zeros serves every query. */
enum { MAX_EDGES = 512 };
static const char no_edge_data[MAX_EDGES * SIM_EDGE_DATA_BYTES];

/* Edges have no data in the simulation, so a caller may omit the array for it. */
CUresult sim_capture_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                          const CUgraphNode **dependencies, const void **edges, size_t *count) {
    const sim_stream_t *stream = sim_stream_find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy) {
        CUresult result = sim_capture_check_legacy(stream->context, true);
        if (result != CUDA_SUCCESS) return result;
    }
    *status = sim_capture_state(stream);
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return CUDA_SUCCESS;
    if (id) *id = stream->capture->id;
    if (graph) *graph = (CUgraph)(uintptr_t)stream->capture->graph->id;
    /* Identifiers and handles have the same size and value. The array is valid until the next use of the stream. */
    if (dependencies) *dependencies = (const CUgraphNode *)(const void *)stream->tails.ids;
    if (edges) *edges = no_edge_data;
    if (count) *count = stream->tails.count;
    return CUDA_SUCCESS;
}

CUresult sim_capture_info_2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                            const CUgraphNode **dependencies, size_t *count) {
    return sim_capture_info(stream, status, id, graph, dependencies, NULL, count);
}

static CUresult change_tails(sim_stream_t *stream, const CUgraphNode *nodes, size_t count, bool replace) {
    sim_ids_t tails = {0};
    for (size_t i = 0; i < count; i++) {
        if (!sim_table_find(&sim_state.nodes, (uint64_t)(uintptr_t)nodes[i])) return CUDA_ERROR_INVALID_VALUE;
    }
    const uint64_t *ids = (const uint64_t *)(const void *)nodes;
    bool done = replace || sim_ids_add(&tails, stream->tails.ids, stream->tails.count);
    if (!done || !sim_ids_add(&tails, ids, count)) {
        sim_ids_clear(&tails);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_ids_clear(&stream->tails);
    stream->tails = tails;
    return CUDA_SUCCESS;
}

CUresult sim_capture_update(CUstream handle, CUgraphNode *nodes, const void *edges, size_t count, unsigned int flags) {
    enum { ADD, SET };
    sim_stream_t *stream = sim_stream_find(handle);
    (void)edges;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (flags > SET || (count && !nodes)) return CUDA_ERROR_INVALID_VALUE;
    if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return change_tails(stream, nodes, count, flags == SET);
}

/* The CUDA 12 function has no edge data: its third argument is the count and its fourth the flags. */
CUresult sim_runtime_capture_update(CUstream stream, CUgraphNode *nodes, const void *edges, size_t count,
                                    unsigned int flags) {
    if (sim_runtime_is_12()) return sim_capture_update(stream, nodes, NULL, (size_t)(uintptr_t)edges, (unsigned)count);
    return sim_capture_update(stream, nodes, edges, count, flags);
}
