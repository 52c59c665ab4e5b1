/* Which process a number names. Owns nothing and needs no lock. */
#ifndef TMS_SIM_BASE_PROCESS_H
#define TMS_SIM_BASE_PROCESS_H

/* When the process started, in clock ticks since boot: with its number it names a process for good. 0 if there is none, or
 * only a zombie. */
unsigned long long sim_process_started(int process);

#endif
