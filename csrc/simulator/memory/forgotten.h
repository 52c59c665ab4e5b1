/* What is gone of the memory that the device process has mapped, until it is told. Called with the simulator's lock held.
 *
 * Only what was placed there is noted, so there is no more of it than the program had between two operators. */
#ifndef TMS_SIM_MEMORY_FORGOTTEN_H
#define TMS_SIM_MEMORY_FORGOTTEN_H

#include <stddef.h>
#include <stdint.h>

/* One of them, the other is 0. */
typedef struct sim_forgotten {
    uint64_t range; /* the address of a reservation */
    uint64_t file;  /* the inode of a file */
} sim_forgotten_t;

/* Without memory for a note the device process keeps what it has. */
void sim_forgotten_add(sim_forgotten_t what);
/* All of it, which is the caller's to free; NULL if there is nothing. */
sim_forgotten_t *sim_forgotten_take(size_t *count);

#endif
