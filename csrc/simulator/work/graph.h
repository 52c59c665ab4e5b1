/* Graphs: captured work as nodes, which can be submitted repeatedly. Owns sim_state.graphs and sim_state.nodes. Called
 * with the simulator's lock held. */
#ifndef TMS_SIM_WORK_GRAPH_H
#define TMS_SIM_WORK_GRAPH_H

#include "simulator/base/simulation.h"

sim_graph_t *sim_graph_new(bool executable);
/* Appends a node with these dependencies and returns it. sim_stream_submit calls this for every work item of a capturing
 * stream, so an entry point that uses it is capturable. */
sim_node_t *sim_graph_append(sim_graph_t *graph, const sim_op_t *op, const sim_ids_t *dependencies);
void sim_graph_delete(sim_graph_t *graph);
void sim_graph_clear(void);

#endif
