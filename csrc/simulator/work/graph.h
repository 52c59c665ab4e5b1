/* Graphs: the work of a capture as nodes, to be submitted again. Owns sim_state.graphs and sim_state.nodes. Called with the
 * simulator's lock held. */
#ifndef TMS_SIM_WORK_GRAPH_H
#define TMS_SIM_WORK_GRAPH_H

#include "simulator/base/state.h"

sim_graph_t *sim_graph_new(bool executable);
/* Adds work at the end, that depends on these nodes, and says which node it is. Whatever a stream was given while it
 * captures comes here by way of sim_stream_submit: that is all that an entry point needs to do to be capturable. */
sim_node_t *sim_graph_append(sim_graph_t *graph, const sim_op_t *op, const sim_nodes_t *dependencies);
void sim_graph_delete(sim_graph_t *graph);
void sim_graph_clear(void);

#endif
