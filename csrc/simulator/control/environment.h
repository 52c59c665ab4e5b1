/* The settings of TMS_SIMULATED_*. A malformed value is reported on stderr and ignored. */
#ifndef TMS_SIM_CONTROL_ENVIRONMENT_H
#define TMS_SIM_CONTROL_ENVIRONMENT_H

/* Reads all settings into the state. Called with the simulator's lock held, during initialisation. */
void sim_environment_read(void);
int sim_environment_devices(void); /* number of devices of the machine; needs no lock */

#endif
