/* The calls that a program can make, by number, and what was made of them: counts, faults and the trace. The functions that
 * look at the state are called with the simulator's lock held. */
#ifndef TMS_SIM_CONTROL_CALLS_H
#define TMS_SIM_CONTROL_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/control/all_entries.h"

typedef struct sim_call_info {
    const char *symbol;
    unsigned checks; /* base/entry_list.h */
    bool driver;     /* else the runtime's, or NCCL's */
} sim_call_info_t;

extern const sim_call_info_t sim_calls[SIM_CALL_COUNT];

/* Whether a program means this symbol by a name: both without their ABI suffixes. */
bool sim_call_is_named(const char *symbol, const char *name);
/* Counts the call and writes the trace. What it is to fail with, or CUDA_SUCCESS. */
CUresult sim_call_begins(sim_call_t call);

/* The rule of tms_sim_fail_after; 1 where there is no such function. */
int sim_call_fail_after(const char *name, uint64_t succeed, uint64_t fail, int code);
uint64_t sim_call_count(const char *name);
void sim_call_clear(void); /* counts and trace */
size_t sim_call_read_trace(char *text, size_t capacity);

#endif
