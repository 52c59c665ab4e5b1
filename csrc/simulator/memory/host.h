/* Blocks of pinned host memory, allocated or registered. Owns sim_state.hosts. Called with the simulator's lock held. */
#ifndef TMS_SIM_MEMORY_HOST_H
#define TMS_SIM_MEMORY_HOST_H

#include "simulator/base/simulation.h"

/* The pinned block that contains an address, or NULL. */
sim_host_t *sim_host_at(uint64_t address);
/* Adds a block. With `registered` the program owns the memory, otherwise the block does. CUDA_ERROR_OUT_OF_MEMORY if out
 * of memory. */
CUresult sim_host_add(uint64_t address, uint64_t bytes, bool registered, unsigned flags, sim_context_t *context);
void sim_host_remove(sim_host_t *host);
void sim_host_clear(void);

#endif
