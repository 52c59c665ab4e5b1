/* Pinned host memory, allocated or registered. Called with the simulator's lock held, which is given up while
 * work is waited for. */
#ifndef TMS_SIM_CONTEXTS_HOST_MEMORY_H
#define TMS_SIM_CONTEXTS_HOST_MEMORY_H

#include "simulator/base/state.h"

/* Gives back what was allocated or registered in a context. */
void sim_host_clear_context(const sim_context_t *context);

#endif
