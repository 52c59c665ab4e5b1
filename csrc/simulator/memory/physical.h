/* Physical memory: allocations of cuMemCreate, and those under cudaMalloc. Owns sim_state.physicals. Called with the
 * simulator's lock held. */
#ifndef TMS_SIM_MEMORY_PHYSICAL_H
#define TMS_SIM_MEMORY_PHYSICAL_H

#include "simulator/base/state.h"

/* CUDA_ERROR_OUT_OF_MEMORY where the budget, or the machine, has no more. One reference, the caller's. */
CUresult sim_memory_create_physical(int device, uint64_t bytes, bool runtime, sim_physical_t **physical);
/* Frees it once it is neither referenced nor mapped, and no other process or descriptor has it. */
void sim_memory_drop_physical(sim_physical_t *physical);
void sim_memory_sweep(void); /* frees released memory that no process has any more */
/* The allocation that a handle of the program names, or NULL. */
sim_physical_t *sim_memory_find_physical(CUmemGenericAllocationHandle handle);
/* All of it, which must not be mapped; for a reset. */
void sim_memory_clear_physicals(void);

#endif
