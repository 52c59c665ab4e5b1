/* The exported functions and their lookup by name. Each wrapper counts the call, writes the trace, applies an injected
 * fault, runs the checks, and calls the implementation with the lock held. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "simulator/base/entry_list.h"
#include "simulator/base/simulation.h"
#include "simulator/contexts/entries.h"
#include "simulator/control/all_entries.h"
#include "simulator/control/calls.h"
#include "simulator/control/entries.h"
#include "simulator/control/life.h"
#include "simulator/devices/entries.h"
#include "simulator/graphs/entries.h"
#include "simulator/memory/access.h"
#include "simulator/runtime/entries.h"
#include "simulator/simulator.h"

/* The first CUDA version for which cuGetProcAddress returns this symbol for its base name, from cudaTypedefs.h. */
static int offered_since(const char *symbol) {
    enum { CUDA_11_4 = 11040, CUDA_12_5 = 12050 };
    if (strcmp(symbol, "cuCtxCreate_v3") == 0) return CUDA_11_4;
    return strcmp(symbol, "cuCtxCreate_v4") == 0 ? CUDA_12_5 : 0;
}

/* In a forked child only these calls work, and only the others are counted. */
static CUresult begin_call_in_child(sim_call_t call) {
    if (sim_calls[call].checks & (SIM_PURE | SIM_FORKED)) return CUDA_SUCCESS;
    atomic_fetch_add(&sim_state.calls_in_child, 1);
    return CUDA_ERROR_NOT_INITIALIZED;
}

/* In a forked child `locked` is false. */
static CUresult begin_call(sim_call_t call, bool *locked) {
    *locked = sim_life_enter();
    if (!*locked) return begin_call_in_child(call);
    sim_state_thread()->unreachable = 0;
    CUresult result = sim_call_begins(call);
    return result == CUDA_SUCCESS ? sim_call_check(sim_calls[call].checks) : result;
}

/* A call has refused to access memory: if the memory is paused, explains it in the text of the runtime's error, or on stderr
 * for a call of the driver, whose errors have one text each. */
static void explain_refusal(sim_call_t call, sim_thread_t *thread) {
    char text[SIM_ACCESS_BYTES];
    if (!sim_access_describe(sim_calls[call].symbol, thread->unreachable, text)) return;
    if (sim_calls[call].driver) fprintf(stderr, "simulated GPU: %s\n", text);
    snprintf(thread->refused_access, sizeof thread->refused_access, "invalid argument: %s", text);
}

static CUresult end_call(sim_call_t call, bool locked, CUresult result) {
    if (!locked) return result;
    sim_thread_t *thread = sim_state_thread();
    if (!sim_calls[call].driver && result != CUDA_SUCCESS) thread->last_error = (int)result;
    sim_life_leave();
    if (result != CUDA_SUCCESS) thread->refused_access[0] = '\0';
    if (result == CUDA_ERROR_INVALID_VALUE && thread->unreachable) explain_refusal(call, thread);
    return result;
}

/* cuGetProcAddress returns the static duplicate, because the exported name could resolve to another library. */
#define DEFINE(symbol, implementation, checks, parameters, arguments)                                                       \
    static CUresult call_##symbol parameters {                                                                              \
        bool locked = false;                                                                                                \
        CUresult result = begin_call(SIM_CALL_##symbol, &locked);                                                           \
        if (result == CUDA_SUCCESS) result = implementation arguments;                                                      \
        return end_call(SIM_CALL_##symbol, locked, result);                                                                 \
    }                                                                                                                       \
    TMS_SIM_EXPORT CUresult symbol parameters;                                                                              \
    CUresult symbol parameters { return call_##symbol arguments; }
SIM_DRIVER_ENTRIES(DEFINE)
SIM_RUNTIME_ENTRIES(DEFINE)

#define ADDRESS(symbol, implementation, checks, parameters, arguments) (void *)call_##symbol,
static void *const addresses[SIM_CALL_COUNT] = {SIM_DRIVER_ENTRIES(ADDRESS) SIM_RUNTIME_ENTRIES(ADDRESS)};

CUresult sim_entry_address(const char *symbol, void **function, int version, cuuint64_t flags,
                           CUdriverProcAddressQueryResult *status) {
    int best = -1;
    (void)flags;
    if (!symbol || !function) return CUDA_ERROR_INVALID_VALUE;
    *function = NULL;
    for (size_t i = 0; i < SIM_CALL_COUNT; i++) {
        int since = offered_since(sim_calls[i].symbol);
        if (!sim_calls[i].driver || !sim_call_is_named(sim_calls[i].symbol, symbol) || since <= best || since > version)
            continue;
        *function = addresses[i];
        best = since;
    }
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* The driver function of this name. *status (optional) reports a missing function. */
CUresult sim_runtime_entry_point(const char *symbol, void **function, unsigned long long flags, int *status) {
    enum { FOUND, NOT_FOUND };
    if (!symbol || !function) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_entry_address(symbol, function, TMS_SIM_DRIVER_VERSION, flags, NULL);
    if (!status) return result;
    *status = result == CUDA_SUCCESS ? FOUND : NOT_FOUND;
    return CUDA_SUCCESS;
}

CUresult sim_runtime_entry_point_by_version(const char *symbol, void **function, unsigned int version,
                                            unsigned long long flags, int *status) {
    (void)version;
    return sim_runtime_entry_point(symbol, function, flags, status);
}
