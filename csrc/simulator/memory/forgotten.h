/* Stale memory: ranges and files that the program has released and that the device process may still map. The next
 * request to the device process names them. Owns the list. Called with the simulator's lock held.
 *
 * Only memory that was in a request is recorded, so the list is bounded by what one operator used. */
#ifndef TMS_SIM_MEMORY_FORGOTTEN_H
#define TMS_SIM_MEMORY_FORGOTTEN_H

#include <stddef.h>
#include <stdint.h>

/* One of the two; the other is 0. */
typedef struct sim_forgotten {
    uint64_t range; /* address of a released reservation */
    uint64_t file;  /* inode of a released file */
} sim_forgotten_t;

/* Records an entry. If out of memory, the device process keeps its mapping. */
void sim_forgotten_add(sim_forgotten_t what);
/* Takes the whole list; the caller frees it. NULL if it is empty. */
sim_forgotten_t *sim_forgotten_take(size_t *count);

#endif
