/* Identity of a process beyond its number. Owns nothing and needs no lock. */
#ifndef TMS_SIM_BASE_PROCESS_H
#define TMS_SIM_BASE_PROCESS_H

/* The start time of the process in clock ticks since boot. Number and start time together identify a process uniquely. 0
 * if the process does not exist or is a zombie. */
unsigned long long sim_process_started(int process);

#endif
