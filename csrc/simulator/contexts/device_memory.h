/* Memory of cuMemAlloc and cudaMalloc, including memory that is shared with other processes. Called with the simulator's
 * lock held; waits for work release it. */
#ifndef TMS_SIM_CONTEXTS_DEVICE_MEMORY_H
#define TMS_SIM_CONTEXTS_DEVICE_MEMORY_H

#include "simulator/base/simulation.h"

/* Frees all memory that was allocated in a context. */
void sim_device_memory_clear(const sim_context_t *context);

#endif
