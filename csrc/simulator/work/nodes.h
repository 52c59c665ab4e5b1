/* Sets of nodes of a graph, by their identifiers. A set owns its array, and is guarded by the lock of what holds it: the
 * simulator's. */
#ifndef TMS_SIM_WORK_NODES_H
#define TMS_SIM_WORK_NODES_H

#include "simulator/base/state.h"

/* Adds those that are not in the set. False without memory; then nothing has changed. */
bool sim_nodes_add(sim_nodes_t *nodes, const uint64_t *ids, size_t count);
void sim_nodes_clear(sim_nodes_t *nodes);

#endif
