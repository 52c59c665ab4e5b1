/* Touching memory: what may be touched, and keeping it mapped during that. A thread that touches bytes looks them up and
 * pins them with the simulator's lock held, touches them without it, and unpins them with it. */
#ifndef TMS_SIM_MEMORY_TOUCH_H
#define TMS_SIM_MEMORY_TOUCH_H

#include "simulator/base/state.h"

/* Whether all of a range may be read (or written) by all devices of the mask. `kernel` is the context of a kernel, which
 * needs peer access enabled for other devices' cudaMalloc memory, or NULL for a copy, which does not. */
bool sim_memory_reachable(uint64_t address, uint64_t bytes, unsigned devices, bool writes, const sim_context_t *kernel);
/* Pins the mapping at an address, so that it is not unmapped, and tells how many of `bytes` from there it covers. NULL where
 * the range may not be touched. Never waits: sim_state.unmapping must be false. */
sim_mapping_t *sim_memory_pin(uint64_t address, uint64_t *bytes, unsigned devices, bool writes, const sim_context_t *kernel);
void sim_memory_unpin(sim_mapping_t *mapping);
/* Has the pages of memory found all at once, for bytes that are about to be touched: a fault a page takes much longer. Needs
 * no lock; a kernel without that does without it. */
void sim_memory_populate(uint64_t address, uint64_t bytes, bool writes);

#endif
