/* The exported functions of NCCL. Each counts the call, writes the trace, applies an injected fault, runs the checks, and
 * calls the implementation with the lock held, as the CUDA functions do. */
#include "simulator/base/simulation.h"
#include "simulator/control/all_entries.h"
#include "simulator/control/calls.h"
#include "simulator/control/life.h"
#include "simulator/nccl/entries.h"
#include "simulator/nccl/error.h"
#include "simulator/simulator.h"

TMS_SIM_EXPORT const char *ncclGetErrorString(sim_nccl_result_t result);
TMS_SIM_EXPORT const char *ncclGetLastError(sim_nccl_handle_t comm);

static sim_nccl_result_t begin_call(sim_call_t call, bool *locked) {
    sim_nccl_set_call(sim_calls[call].symbol);
    *locked = sim_life_enter();
    if (!*locked) {
        return sim_nccl_fail(SIM_NCCL_UNHANDLED_CUDA,
                             "this process was forked after its parent had used the GPU; use the spawn start method");
    }
    CUresult injected = sim_call_begins(call);
    if (injected != CUDA_SUCCESS) return sim_nccl_fail((sim_nccl_result_t)injected, "injected failure");
    CUresult result = sim_call_check(sim_calls[call].checks);
    return result == CUDA_SUCCESS ? SIM_NCCL_SUCCESS : sim_nccl_cuda_failed(result);
}

#define DEFINE(symbol, implementation, checks, parameters, arguments)                                                       \
    TMS_SIM_EXPORT sim_nccl_result_t symbol parameters;                                                                     \
    sim_nccl_result_t symbol parameters {                                                                                   \
        bool locked = false;                                                                                                \
        sim_nccl_result_t result = begin_call(SIM_CALL_##symbol, &locked);                                                  \
        if (result == SIM_NCCL_SUCCESS) result = implementation arguments;                                                  \
        if (locked) sim_life_leave();                                                                                       \
        return result;                                                                                                      \
    }
SIM_NCCL_ENTRIES(DEFINE)

const char *ncclGetErrorString(sim_nccl_result_t result) { return sim_nccl_describe(result); }

/* The last error of any communicator, as in the real NCCL; `comm` may be NULL. */
const char *ncclGetLastError(sim_nccl_handle_t comm) {
    (void)comm;
    bool locked = sim_life_enter();
    const char *text = sim_nccl_last_error();
    if (locked) sim_life_leave();
    return text;
}
