/* Stale memory: ranges and files that the program has released and that the device process may still map. The next
 * request to the device process names them. Owns sim_state.stale. Called with the simulator's lock held.
 *
 * Only memory that an earlier request named is recorded, so the list is bounded by the memory that the device process
 * maps. */
#ifndef TMS_SIM_MEMORY_STALE_H
#define TMS_SIM_MEMORY_STALE_H

#include <stddef.h>

#include "simulator/base/state.h"

/* Records an entry. If out of memory, the device process keeps its mapping. */
void sim_stale_add(sim_stale_t entry);
/* Takes the whole list; the caller frees it. NULL if it is empty. */
sim_stale_t *sim_stale_take(size_t *count);

#endif
