/* Physical memory: allocations of cuMemCreate, and those that back cudaMalloc. Owns sim_state.physicals. Called with the
 * simulator's lock held. */
#ifndef TMS_SIM_MEMORY_PHYSICAL_H
#define TMS_SIM_MEMORY_PHYSICAL_H

#include "simulator/base/state.h"

/* Creates physical memory with one reference, which the caller owns. CUDA_ERROR_OUT_OF_MEMORY if the budget or the
 * machine is exhausted. */
CUresult sim_memory_create_physical(int device, uint64_t bytes, bool runtime, sim_physical_t **physical);
/* Frees the memory if it has no reference, no mapping and no other holder. */
void sim_memory_drop_physical(sim_physical_t *physical);
void sim_memory_sweep(void); /* frees released memory that no other process holds any more */
/* The allocation of the program's handle, or NULL. */
sim_physical_t *sim_memory_find_physical(CUmemGenericAllocationHandle handle);
/* Frees all of it; none may be mapped. For a reset. */
void sim_memory_clear_physicals(void);

#endif
