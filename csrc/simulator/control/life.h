/* The life of the simulated GPU in a process: set up at the first call, taken down at exit. Any thread may call these
 * functions, and holds no lock. */
#ifndef TMS_SIM_CONTROL_LIFE_H
#define TMS_SIM_CONTROL_LIFE_H

#include <stdbool.h>

/* Takes the simulator's lock, setting everything up at the first call of the process. False in a forked child of a process
 * that had done so: then nothing is locked. */
bool sim_life_enter(void);
void sim_life_leave(void);

#endif
