/* What is in use at the end of the process, for TMS_SIMULATED_REPORT. Called with the simulator's lock held. */
#ifndef TMS_SIM_CONTROL_REPORT_H
#define TMS_SIM_CONTROL_REPORT_H

void sim_report(void); /* to stderr */

#endif
