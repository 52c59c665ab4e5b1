/* Physical memory in one memfd per device, and the pieces of these files that back it. Owns sim_state.physicals and
 * sim_state.stale. Called with the simulator's lock held. */
#ifndef TMS_SIM_MEMORY_PHYSICAL_H
#define TMS_SIM_MEMORY_PHYSICAL_H

#include <stddef.h>

#include "simulator/base/simulation.h"

/* Takes a piece of the device's memfd and poisons it. False if out of memory. */
bool sim_piece_take(sim_device_t *device, uint64_t bytes, off_t *offset);
/* Returns a piece: to the cache if `keep`, for a later piece of the same size, otherwise to the system. */
void sim_piece_put(sim_device_t *device, off_t offset, uint64_t bytes, bool keep);
/* Frees all pieces and the memfd. */
void sim_piece_clear(sim_device_t *device);

/* Creates physical memory with one reference, which the caller owns. CUDA_ERROR_OUT_OF_MEMORY if the budget or the
 * machine is exhausted. */
CUresult sim_memory_create_physical(int device, uint64_t bytes, bool runtime, sim_physical_t **physical);
/* Frees the memory if it has no reference, no mapping and no other holder. */
void sim_memory_drop_physical(sim_physical_t *physical);
void sim_memory_sweep(void); /* frees released memory that no other process holds any more */
/* Returns the allocation that the program's handle denotes, or NULL. */
sim_physical_t *sim_memory_find_physical(CUmemGenericAllocationHandle handle);
/* Frees all of it; none may be mapped. For a reset. */
void sim_memory_clear_physicals(void);

/* Stale memory: ranges and files that the program has released and that the device process may still map. The next request
 * to the device process names them. Only memory that an earlier request named is recorded, so the list is bounded by the
 * memory that the device process maps. */
/* Records an entry. If out of memory, the device process keeps its mapping. */
void sim_stale_add(sim_stale_t entry);
/* Takes the whole list, which the caller frees. Returns NULL if it is empty. */
sim_stale_t *sim_stale_take(size_t *count);

#endif
