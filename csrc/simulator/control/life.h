/* Initialisation and shutdown of the simulated GPU in a process: at the first call, and at exit. Any thread may call
 * these functions. The caller must not hold the lock. */
#ifndef TMS_SIM_CONTROL_LIFE_H
#define TMS_SIM_CONTROL_LIFE_H

#include <stdbool.h>

/* Takes the simulator's lock. The first call of the process initialises the state. False, without the lock, in a forked
 * child of a process that had initialised it. */
bool sim_life_enter(void);
void sim_life_leave(void);

#endif
