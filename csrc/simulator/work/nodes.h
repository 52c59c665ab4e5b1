/* Sets of graph nodes, by identifier. A set owns its array. Called with the simulator's lock held. */
#ifndef TMS_SIM_WORK_NODES_H
#define TMS_SIM_WORK_NODES_H

#include "simulator/base/state.h"

/* Adds the identifiers that are missing. False if out of memory; then the set is unchanged. */
bool sim_nodes_add(sim_nodes_t *nodes, const uint64_t *ids, size_t count);
void sim_nodes_clear(sim_nodes_t *nodes);

#endif
