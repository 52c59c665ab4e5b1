/* Mappings: physical memory at an address, and who may touch it. Owns sim_state.mappings. Called with the simulator's lock
 * held, which is given up while pinned chunks are waited for. */
#ifndef TMS_SIM_MEMORY_MAPPING_H
#define TMS_SIM_MEMORY_MAPPING_H

#include "simulator/base/state.h"

sim_mapping_t *sim_memory_mapping_at(uint64_t address); /* that covers this address, or NULL */
CUresult sim_memory_map_physical(uint64_t address, uint64_t bytes, sim_physical_t *physical, sim_mapping_t **mapping);
CUresult sim_memory_protect(sim_mapping_t *mapping, int device, CUmemAccess_flags flags);
/* Waits until no thread touches the mappings that start in a range, and takes them away. */
CUresult sim_memory_unmap_range(uint64_t address, uint64_t bytes, bool runtime);
/* Waits until no thread touches the mappings of a handle's memory. */
CUresult sim_memory_await_pins(CUmemGenericAllocationHandle handle);
/* Shows the file, from its start, wherever the memory is mapped, without waiting. */
CUresult sim_memory_remap(const sim_physical_t *physical, int file);
/* Mappings, ranges and physical memory, whatever it is; for a reset. */
void sim_memory_clear(void);

#endif
