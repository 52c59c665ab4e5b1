/* Pieces of a device's memfd, which back physical memory. Owns the memfd and the cache of free pieces. Called with the
 * simulator's lock held. */
#ifndef TMS_SIM_MEMORY_PIECES_H
#define TMS_SIM_MEMORY_PIECES_H

#include "simulator/base/state.h"

/* Takes a piece of the device's memfd and poisons it. False if out of memory. */
bool sim_piece_take(sim_device_t *device, uint64_t bytes, off_t *offset);
/* Returns a piece: to the cache if `keep`, for a later piece of the same size, otherwise to the system. */
void sim_piece_put(sim_device_t *device, off_t offset, uint64_t bytes, bool keep);
/* Frees all pieces and the memfd. */
void sim_piece_clear(sim_device_t *device);

#endif
