/* The settings of TMS_SIMULATED_*. What is malformed is reported on stderr and ignored. */
#ifndef TMS_SIM_CONTROL_ENVIRONMENT_H
#define TMS_SIM_CONTROL_ENVIRONMENT_H

/* Reads all of them into the state. Called with the simulator's lock held, while that is set up. */
void sim_environment_read(void);
int sim_environment_devices(void); /* of the machine; needs no lock */

#endif
