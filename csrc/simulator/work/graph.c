/* Graphs: captured work as nodes, which can be submitted repeatedly.
 *
 * Nodes run in the order of their capture, which satisfies all dependencies. The dependencies are stored only for
 * programs that query them. */
#include "simulator/work/graph.h"

#include <stdlib.h>
#include <string.h>

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/work/op.h"

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
    sim_ids_clear(&node->dependencies);
    free(node);
}

/* Creates a node that belongs to no graph yet. Only nodes of a graph that is not executable have handles. */
static sim_node_t *new_node(const sim_op_t *work, const sim_ids_t *dependencies) {
    sim_node_t *node = calloc(1, sizeof *node);
    if (!node) return NULL;
    node->op = *work;
    node->op.next = NULL;
    sim_op_retain(&node->op);
    if (!dependencies) return node;
    node->id = sim_state_new_id();
    if (sim_ids_add(&node->dependencies, dependencies->ids, dependencies->count) &&
        sim_table_insert(&sim_state.nodes, node->id, node))
        return node;
    delete_node(node);
    return NULL;
}

sim_node_t *sim_graph_append(sim_graph_t *graph, const sim_op_t *work, const sim_ids_t *dependencies) {
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

void sim_graph_clear(void) {
    while (sim_state.graphs.count) sim_graph_delete(sim_state.graphs.slots[0].value);
    sim_table_release(&sim_state.graphs);
    sim_table_release(&sim_state.nodes);
}
