/* Reserved address ranges. Owns sim_state.reservations. Called with the simulator's lock held. */
#ifndef TMS_SIM_MEMORY_RESERVATION_H
#define TMS_SIM_MEMORY_RESERVATION_H

#include "simulator/base/state.h"

/* Reserves a range. `runtime`: for cudaMalloc. CUDA_ERROR_OUT_OF_MEMORY if there is no such range. */
CUresult sim_memory_reserve_range(uint64_t bytes, uint64_t alignment, uint64_t hint, bool runtime, uint64_t *address);
void sim_memory_free_range(sim_reservation_t *reservation);
sim_reservation_t *sim_memory_reservation_at(uint64_t address); /* the reservation that contains this address, or NULL */
/* Whether a range overlaps no reservation. */
bool sim_memory_unreserved(uint64_t address, uint64_t bytes);

#endif
