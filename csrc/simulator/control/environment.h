/* The settings of TMS_SIMULATED_*. A malformed value is reported on stderr and ignored. */
#ifndef TMS_SIM_CONTROL_ENVIRONMENT_H
#define TMS_SIM_CONTROL_ENVIRONMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Reads all settings into the state. Called with the simulator's lock held, during initialisation. */
void sim_environment_read(void);
int sim_environment_devices(void);     /* number of devices of the machine; needs no lock */
uint64_t sim_environment_memory(void); /* bytes of each device; needs no lock */
/* Gets the name of the shared budgets in POSIX shared memory. If none is set or it is malformed, returns false and an empty
 * name. Needs no lock. */
bool sim_environment_shared_name(char *name, size_t size);

#endif
