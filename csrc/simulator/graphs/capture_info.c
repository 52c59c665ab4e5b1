/* Queries of a stream's capture, and updates of the dependencies of its next node. */
#include <string.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/graphs/entries.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"
#include "simulator/work/nodes.h"

/* Edges have no data in the simulation: one array of zeros serves every query. */
enum { MOST_EDGES = 512 };
static const char no_edge_data[MOST_EDGES * SIM_EDGE_DATA_BYTES];

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
    sim_nodes_t tails = {0};
    for (size_t i = 0; i < count; i++) {
        if (!sim_table_find(&sim_state.nodes, (uint64_t)(uintptr_t)nodes[i])) return CUDA_ERROR_INVALID_VALUE;
    }
    const uint64_t *ids = (const uint64_t *)(const void *)nodes;
    bool done = replace || sim_nodes_add(&tails, stream->tails.ids, stream->tails.count);
    if (!done || !sim_nodes_add(&tails, ids, count)) {
        sim_nodes_clear(&tails);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_nodes_clear(&stream->tails);
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
