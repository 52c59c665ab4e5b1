/* cuMemAlloc and cudaMalloc. Called with the simulator's lock held, which is given up while work is waited for. */
#ifndef TMS_SIM_CONTEXTS_DEVICE_MEMORY_H
#define TMS_SIM_CONTEXTS_DEVICE_MEMORY_H

#include "simulator/base/state.h"

/* Gives back all that was allocated in a context. */
void sim_device_memory_clear(const sim_context_t *context);

#endif
