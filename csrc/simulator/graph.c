/* Graphs: the work of a capture, in the order in which it was submitted, to be submitted again. */
#include <stdlib.h>

#include "sim_modules.h"

sim_graph_t *sim_graph_new(bool executable) {
    sim_graph_t *graph = calloc(1, sizeof *graph);
    if (!graph) return NULL;
    graph->id = sim_state_new_id();
    graph->executable = executable;
    if (sim_table_insert(&sim_state.graphs, graph->id, graph)) return graph;
    free(graph);
    return NULL;
}

bool sim_graph_append(sim_graph_t *graph, const sim_op_t *work) {
    sim_op_t *op = malloc(sizeof *op);
    if (!op) return false;
    *op = *work;
    op->next = NULL;
    if (graph->last)
        graph->last->next = op;
    else
        graph->first = op;
    graph->last = op;
    return true;
}

void sim_graph_delete(sim_graph_t *graph) {
    while (graph->first) {
        sim_op_t *op = graph->first;
        graph->first = op->next;
        free(op);
    }
    sim_table_remove(&sim_state.graphs, graph->id);
    free(graph);
}

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
        if (capture->graph == graph) return CUDA_ERROR_INVALID_VALUE; /* it is being captured into */
    }
    sim_graph_delete(graph);
    return CUDA_SUCCESS;
}

CUresult sim_graph_destroy(CUgraph graph) { return destroy((uintptr_t)graph, false); }

CUresult sim_graph_destroy_executable(CUgraphExec executable) { return destroy((uintptr_t)executable, true); }

CUresult sim_graph_instantiate(CUgraphExec *handle, CUgraph graph_handle, unsigned long long flags) {
    const sim_graph_t *graph = find_graph((uintptr_t)graph_handle, false);
    (void)flags; /* none of them changes what the work does */
    if (!handle || !graph) return CUDA_ERROR_INVALID_VALUE;
    sim_graph_t *executable = sim_graph_new(true);
    if (!executable) return CUDA_ERROR_OUT_OF_MEMORY;
    for (const sim_op_t *op = graph->first; op; op = op->next) {
        if (sim_graph_append(executable, op)) continue;
        sim_graph_delete(executable);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (CUgraphExec)(uintptr_t)executable->id;
    return CUDA_SUCCESS;
}

CUresult sim_graph_launch(CUgraphExec executable, CUstream handle) {
    const sim_graph_t *graph = find_graph((uintptr_t)executable, true);
    sim_stream_t *stream = sim_stream_find(handle);
    CUresult result = CUDA_SUCCESS;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    for (const sim_op_t *op = graph->first; op && result == CUDA_SUCCESS; op = op->next)
        result = sim_stream_submit(stream, op, NULL);
    return result;
}

void sim_graph_clear(void) {
    while (sim_state.graphs.count) sim_graph_delete(sim_state.graphs.slots[0].value);
    sim_table_release(&sim_state.graphs);
}
