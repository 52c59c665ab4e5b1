/* Entry points that create, instantiate, launch and destroy graphs. */
#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/graphs/entries.h"
#include "simulator/streams/stream.h"
#include "simulator/streams/worker.h"
#include "simulator/work/event.h"
#include "simulator/work/graph.h"

static sim_graph_t *find_graph(uint64_t handle, bool executable) {
    sim_graph_t *graph = sim_table_find(&sim_state.graphs, handle);
    return graph && graph->executable == executable ? graph : NULL;
}

CUresult sim_graph_create(CUgraph *handle, unsigned int flags) {
    if (!handle || flags) return CUDA_ERROR_INVALID_VALUE;
    const sim_graph_t *graph = sim_graph_new(false);
    if (!graph) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUgraph)(uintptr_t)graph->id;
    return CUDA_SUCCESS;
}

static CUresult destroy(uint64_t handle, bool executable) {
    sim_graph_t *graph = find_graph(handle, executable);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    for (const sim_capture_t *capture = sim_state.captures; capture; capture = capture->next) {
        if (capture->graph == graph) return CUDA_ERROR_INVALID_VALUE; /* a capture into it is active */
    }
    sim_graph_delete(graph);
    return CUDA_SUCCESS;
}

CUresult sim_graph_destroy(CUgraph graph) { return destroy((uintptr_t)graph, false); }

/* Submitted launches continue. */
CUresult sim_graph_destroy_executable(CUgraphExec executable) { return destroy((uintptr_t)executable, true); }

CUresult sim_graph_instantiate(CUgraphExec *handle, CUgraph graph_handle, unsigned long long flags) {
    const sim_graph_t *graph = find_graph((uintptr_t)graph_handle, false);
    (void)flags; /* no flag affects the simulated work */
    if (!handle || !graph) return CUDA_ERROR_INVALID_VALUE;
    for (const sim_node_t *node = graph->first; node; node = node->next) {
        const sim_op_t *op = &node->op;
        if (op->kind == SIM_OP_SET && !sim_work_reachable(op->context, op)) return CUDA_ERROR_INVALID_VALUE;
    }
    sim_graph_t *executable = sim_graph_new(true);
    if (!executable) return CUDA_ERROR_OUT_OF_MEMORY;
    for (const sim_node_t *node = graph->first; node; node = node->next) {
        if (sim_graph_append(executable, &node->op, NULL)) continue;
        sim_graph_delete(executable);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (CUgraphExec)(uintptr_t)executable->id;
    return CUDA_SUCCESS;
}

CUresult sim_graph_upload(CUgraphExec executable, CUstream stream) {
    if (!find_graph((uintptr_t)executable, true)) return CUDA_ERROR_INVALID_VALUE;
    return sim_stream_find(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* A launch on another stream waits for the previous launch: an executable graph never runs concurrently with itself. */
static CUresult follow_last_launch(const sim_graph_t *graph, sim_stream_t *stream) {
    const sim_op_t op = {.kind = SIM_OP_WAIT, .stream = graph->stream, .position = graph->position};
    if (stream->capture || !graph->stream || graph->stream == stream->id) return CUDA_SUCCESS;
    return sim_stream_reached(graph->stream, graph->position) ? CUDA_SUCCESS : sim_stream_submit(stream, &op, NULL);
}

CUresult sim_graph_launch(CUgraphExec executable, CUstream handle) {
    sim_graph_t *graph = find_graph((uintptr_t)executable, true);
    sim_stream_t *stream = sim_stream_find(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = follow_last_launch(graph, stream);
    uint64_t position = 0;
    for (const sim_node_t *node = graph->first; node && result == CUDA_SUCCESS; node = node->next) {
        sim_op_t op = node->op;
        bool records = op.kind == SIM_OP_RECORD && !stream->capture;
        op.of_graph = true;
        if (records) op.position = sim_event_note(op.event, stream, stream->submitted + 1);
        result = sim_stream_submit(stream, &op, &position);
    }
    if (position) {
        graph->stream = stream->id;
        graph->position = position;
    }
    return result;
}
