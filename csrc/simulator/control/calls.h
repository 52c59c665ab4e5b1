/* Numbers the entry points, and owns their counters, fault rules and trace. Functions that access the state need the
 * simulator's lock. */
#ifndef TMS_SIM_CONTROL_CALLS_H
#define TMS_SIM_CONTROL_CALLS_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulator/control/all_entries.h"

typedef struct sim_call_info {
    const char *symbol;
    unsigned checks; /* base/entry_list.h */
    bool driver;     /* false: a runtime or NCCL function */
} sim_call_info_t;

extern const sim_call_info_t sim_calls[SIM_CALL_COUNT];

/* Whether `name` refers to this symbol. Ignores the ABI suffix of both. */
bool sim_call_is_named(const char *symbol, const char *name);
/* Counts and traces the call. Returns the injected error, or CUDA_SUCCESS. */
CUresult sim_call_begins(sim_call_t call);

/* Implements tms_sim_fail_after. Returns 1 if there is no such function. */
int sim_call_fail_after(const char *name, uint64_t succeed, uint64_t fail, int code);
uint64_t sim_call_count(const char *name);
void sim_call_clear(void); /* clears counts and trace */
size_t sim_call_read_trace(char *text, size_t capacity);

/* Runs the checks of base/entry_list.h. Returns the error of the call, or CUDA_SUCCESS. */
CUresult sim_call_check(unsigned checks);

#endif
