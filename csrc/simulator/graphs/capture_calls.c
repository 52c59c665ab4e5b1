/* Entry points that begin, end and query captures. */
#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/graphs/entries.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"
#include "simulator/work/graph.h"
#include "simulator/work/nodes.h"

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
    return sim_nodes_add(&sim_stream_find(stream)->tails, nodes, count) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
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
