/* Entry points that create, instantiate, launch and destroy graphs, and queries of a graph's nodes and edges. */
#include <stdio.h>
#include <string.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/simulation.h"
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

static const sim_node_t *find_node(CUgraphNode handle) {
    return sim_table_find(&sim_state.nodes, (uint64_t)(uintptr_t)handle);
}

/* Writes handles to a caller's array, as the real function does. Without an array it only counts; unused entries of the
 * array become NULL. `at` is the next index. */
typedef struct listing {
    CUgraphNode *nodes;
    size_t capacity, at;
} listing_t;

static void list_node(listing_t *listing, uint64_t id) {
    if (listing->nodes && listing->at < listing->capacity) listing->nodes[listing->at] = (CUgraphNode)(uintptr_t)id;
    listing->at++;
}

static void end_listing(const listing_t *listing, size_t *count) {
    if (!listing->nodes) {
        *count = listing->at;
        return;
    }
    for (size_t i = listing->at; i < listing->capacity; i++) listing->nodes[i] = NULL;
    *count = listing->at < listing->capacity ? listing->at : listing->capacity;
}

CUresult sim_graph_nodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    const sim_graph_t *graph = find_graph((uint64_t)(uintptr_t)handle, false);
    if (!graph || !count) return CUDA_ERROR_INVALID_VALUE;
    listing_t listing = {.nodes = nodes, .capacity = *count};
    for (const sim_node_t *node = graph->first; node; node = node->next) list_node(&listing, node->id);
    end_listing(&listing, count);
    return CUDA_SUCCESS;
}

static CUresult list_dependencies(CUgraphNode handle, CUgraphNode *nodes, void *edges, size_t *count) {
    const sim_node_t *node = find_node(handle);
    if (!node || !count) return CUDA_ERROR_INVALID_VALUE;
    listing_t listing = {.nodes = nodes, .capacity = *count};
    for (size_t i = 0; i < node->dependencies.count; i++) list_node(&listing, node->dependencies.ids[i]);
    end_listing(&listing, count);
    if (edges && nodes) memset(edges, 0, *count * SIM_EDGE_DATA_BYTES);
    return CUDA_SUCCESS;
}

/* The CUDA 12 function has no edge data: its third argument is the count. */
CUresult sim_graph_dependencies(CUgraphNode node, CUgraphNode *nodes, void *edges, size_t *count) {
    if (sim_runtime_is_12()) return list_dependencies(node, nodes, NULL, edges);
    return list_dependencies(node, nodes, edges, count);
}

/* A collective or an operator is a kernel. */
static CUgraphNodeType type_of(const sim_op_t *op) {
    switch (op->kind) {
    case SIM_OP_SET: return CU_GRAPH_NODE_TYPE_MEMSET;
    case SIM_OP_COPY: return CU_GRAPH_NODE_TYPE_MEMCPY;
    case SIM_OP_WAIT:
    case SIM_OP_REMOTE: return CU_GRAPH_NODE_TYPE_WAIT_EVENT;
    case SIM_OP_RECORD: return CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    case SIM_OP_HOST: return CU_GRAPH_NODE_TYPE_HOST;
    default: return CU_GRAPH_NODE_TYPE_KERNEL;
    }
}

CUresult sim_graph_node_type(CUgraphNode handle, CUgraphNodeType *type) {
    const sim_node_t *node = find_node(handle);
    if (!node || !type) return CUDA_ERROR_INVALID_VALUE;
    *type = type_of(&node->op);
    return CUDA_SUCCESS;
}

static const char *name_of(const sim_op_t *op) {
    switch (type_of(op)) {
    case CU_GRAPH_NODE_TYPE_MEMSET: return "MEMSET";
    case CU_GRAPH_NODE_TYPE_MEMCPY: return "MEMCPY";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT: return "EVENT_WAIT";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD: return "EVENT_RECORD";
    case CU_GRAPH_NODE_TYPE_HOST: return "HOST";
    default: return "KERNEL";
    }
}

CUresult sim_graph_print(CUgraph handle, const char *path, unsigned int flags) {
    const sim_graph_t *graph = find_graph((uint64_t)(uintptr_t)handle, false);
    (void)flags;
    if (!graph || !path) return CUDA_ERROR_INVALID_VALUE;
    FILE *file = fopen(path, "we");
    if (!file) return CUDA_ERROR_OPERATING_SYSTEM;
    fprintf(file, "digraph simulated {\n");
    for (const sim_node_t *node = graph->first; node; node = node->next) {
        fprintf(file, "    n%llu [label=\"%s\"];\n", (unsigned long long)node->id, name_of(&node->op));
        for (size_t i = 0; i < node->dependencies.count; i++)
            fprintf(file, "    n%llu -> n%llu;\n", (unsigned long long)node->dependencies.ids[i],
                    (unsigned long long)node->id);
    }
    fprintf(file, "}\n");
    return fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
