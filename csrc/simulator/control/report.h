/* Resources in use at process exit, for TMS_SIMULATED_REPORT. Called with the simulator's lock held. */
#ifndef TMS_SIM_CONTROL_REPORT_H
#define TMS_SIM_CONTROL_REPORT_H

void sim_report(void); /* writes to stderr */

#endif
