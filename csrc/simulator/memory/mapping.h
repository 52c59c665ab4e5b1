/* Reserved address ranges, and the memory that is mapped in them. Owns sim_state.reservations and sim_state.mappings. Called
 * with the simulator's lock held. */
#ifndef TMS_SIM_MEMORY_MAPPING_H
#define TMS_SIM_MEMORY_MAPPING_H

#include "simulator/base/simulation.h"

/* Reserves a range. `runtime`: for cudaMalloc. CUDA_ERROR_OUT_OF_MEMORY if there is no such range. */
CUresult sim_memory_reserve_range(uint64_t bytes, uint64_t alignment, uint64_t hint, bool runtime, uint64_t *address);
void sim_memory_free_range(sim_reservation_t *reservation);
sim_reservation_t *sim_memory_reservation_at(uint64_t address); /* the reservation that contains this address, or NULL */
/* Whether a range overlaps no reservation. */
bool sim_memory_unreserved(uint64_t address, uint64_t bytes);

sim_mapping_t *sim_memory_mapping_at(uint64_t address); /* the mapping that contains this address, or NULL */
CUresult sim_memory_map_physical(uint64_t address, uint64_t bytes, sim_physical_t *physical, sim_mapping_t **mapping);
CUresult sim_memory_protect(sim_mapping_t *mapping, int device, CUmemAccess_flags flags);
/* Waits until no mapping that starts in the range is pinned, and removes these mappings. */
CUresult sim_memory_unmap_range(uint64_t address, uint64_t bytes, bool runtime);
/* Waits until no mapping of the handle's memory is pinned. */
CUresult sim_memory_await_pins(CUmemGenericAllocationHandle handle);
/* Replaces the memory by the file, from its start, in all mappings. Does not wait. */
CUresult sim_memory_remap(const sim_physical_t *physical, int file);
/* Removes all mappings, ranges and physical memory; for a reset. */
void sim_memory_clear(void);

#endif
