/* The calls that were made: counts, faults and the trace. Called with the simulator's lock held. */
#ifndef TMS_SIM_CONTROL_ENTRY_H
#define TMS_SIM_CONTROL_ENTRY_H

#include <stddef.h>
#include <stdint.h>

/* The rule of tms_sim_fail_after; 1 where there is no such function. */
int sim_entry_fail_after(const char *name, uint64_t succeed, uint64_t fail, int code);
uint64_t sim_entry_count(const char *name);
void sim_entry_clear(void); /* counts and trace */
size_t sim_entry_read_trace(char *text, size_t capacity);

#endif
