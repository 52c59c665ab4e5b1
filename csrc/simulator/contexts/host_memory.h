/* Pinned host memory, allocated or registered. Called with the simulator's lock held; waits for work release it. */
#ifndef TMS_SIM_CONTEXTS_HOST_MEMORY_H
#define TMS_SIM_CONTEXTS_HOST_MEMORY_H

#include "simulator/base/simulation.h"

/* Frees or unregisters all pinned memory of a context. */
void sim_host_clear_context(const sim_context_t *context);

#endif
