/* Graphs: the work of a capture as nodes, to be submitted again.
 *
 * Nodes run in the order in which they were captured, which respects every dependency; what each depends on is kept for
 * whoever asks. */
#include <stdlib.h>
#include <string.h>

#include "sim_modules.h"

bool sim_nodes_add(sim_nodes_t *nodes, const uint64_t *ids, size_t count) {
    if (!count) return true;
    uint64_t *grown = realloc(nodes->ids, (nodes->count + count) * sizeof *grown);
    if (!grown) return false;
    nodes->ids = grown;
    size_t known = nodes->count;
    for (size_t i = 0; i < count; i++) {
        bool is_new = true;
        for (size_t j = 0; j < known && is_new; j++) is_new = grown[j] != ids[i];
        if (is_new) grown[nodes->count++] = ids[i];
    }
    return true;
}

void sim_nodes_clear(sim_nodes_t *nodes) {
    free(nodes->ids);
    *nodes = (sim_nodes_t){0};
}

sim_graph_t *sim_graph_new(bool executable) {
    sim_graph_t *graph = calloc(1, sizeof *graph);
    if (!graph) return NULL;
    graph->id = sim_state_new_id();
    graph->executable = executable;
    if (sim_table_insert(&sim_state.graphs, graph->id, graph)) return graph;
    free(graph);
    return NULL;
}

static void delete_node(sim_node_t *node) {
    sim_table_remove(&sim_state.nodes, node->id);
    sim_op_release(&node->op);
    sim_nodes_clear(&node->dependencies);
    free(node);
}

/* The work as a node of no graph; only a graph that is not executable has nodes that the program can name. */
static sim_node_t *new_node(const sim_op_t *work, const sim_nodes_t *dependencies) {
    sim_node_t *node = calloc(1, sizeof *node);
    if (!node) return NULL;
    node->op = *work;
    node->op.next = NULL;
    sim_op_retain(&node->op);
    if (!dependencies) return node;
    node->id = sim_state_new_id();
    if (sim_nodes_add(&node->dependencies, dependencies->ids, dependencies->count) &&
        sim_table_insert(&sim_state.nodes, node->id, node))
        return node;
    delete_node(node);
    return NULL;
}

sim_node_t *sim_graph_append(sim_graph_t *graph, const sim_op_t *work, const sim_nodes_t *dependencies) {
    sim_node_t *node = new_node(work, graph->executable ? NULL : dependencies);
    if (!node) return NULL;
    if (graph->last)
        graph->last->next = node;
    else
        graph->first = node;
    graph->last = node;
    graph->count++;
    return node;
}

void sim_graph_delete(sim_graph_t *graph) {
    while (graph->first) {
        sim_node_t *node = graph->first;
        graph->first = node->next;
        delete_node(node);
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

/* What it has submitted goes on. */
CUresult sim_graph_destroy_executable(CUgraphExec executable) { return destroy((uintptr_t)executable, true); }

CUresult sim_graph_instantiate(CUgraphExec *handle, CUgraph graph_handle, unsigned long long flags) {
    const sim_graph_t *graph = find_graph((uintptr_t)graph_handle, false);
    (void)flags; /* none of them changes what the work does */
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

/* A launch on a second stream waits for the one before: an executable graph never runs beside itself. */
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

void sim_graph_clear(void) {
    while (sim_state.graphs.count) sim_graph_delete(sim_state.graphs.slots[0].value);
    sim_table_release(&sim_state.graphs);
    sim_table_release(&sim_state.nodes);
}
