/* Pieces of a device's memfd, which physical memory is made of. Owns the memfd and what is kept of it. Called with the
 * simulator's lock held. */
#ifndef TMS_SIM_MEMORY_PIECES_H
#define TMS_SIM_MEMORY_PIECES_H

#include "simulator/base/state.h"

/* A piece of the device's memfd, poisoned; false without memory. */
bool sim_piece_take(sim_device_t *device, uint64_t bytes, off_t *offset);
/* Gives it back, for the next that takes one of this size if `keep` allows it, else to the system. */
void sim_piece_put(sim_device_t *device, off_t offset, uint64_t bytes, bool keep);
/* Everything, with the memfd itself. */
void sim_piece_clear(sim_device_t *device);

#endif
