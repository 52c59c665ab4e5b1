/* Physical memory as a file descriptor, for other processes or for this one. Called with the simulator's lock held. */
#ifndef TMS_SIM_MEMORY_EXPORT_H
#define TMS_SIM_MEMORY_EXPORT_H

#include "simulator/base/state.h"

/* Whether another process, or a descriptor in this one, has the memory. */
bool sim_export_held(const sim_physical_t *physical);
/* Frees released memory that no process has any more. */
void sim_export_sweep(void);

#endif
