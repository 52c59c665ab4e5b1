#include "simulator/control/checks.h"

#include "simulator/base/entry_list.h"
#include "simulator/base/state.h"
#include "simulator/devices/context.h"
#include "simulator/devices/entries.h"
#include "simulator/work/capture.h"

CUresult sim_call_check(unsigned checks) {
    CUresult result = CUDA_SUCCESS;
    if (checks & SIM_PURE) return CUDA_SUCCESS;
    if (sim_state.deinitialized) return CUDA_ERROR_DEINITIALIZED;
    if (sim_state_thread()->in_callback) return CUDA_ERROR_NOT_PERMITTED;
    if (checks & (SIM_DEVICES | SIM_RUNTIME)) result = sim_device_init(0);
    if (result == CUDA_SUCCESS && checks & (SIM_INIT | SIM_CONTEXT | SIM_HEALTHY | SIM_FREEING) && !sim_state.initialized)
        result = CUDA_ERROR_NOT_INITIALIZED;
    if (result == CUDA_SUCCESS && checks & SIM_RUNTIME) result = sim_context_attach_runtime();
    if (result == CUDA_SUCCESS && checks & (SIM_CONTEXT | SIM_RUNTIME)) {
        sim_context_t *context = NULL;
        result = sim_context_require(&context);
    }
    if (result == CUDA_SUCCESS && checks & (SIM_HEALTHY | SIM_FREEING)) {
        const sim_context_t *context = sim_context_current();
        if (context)
            result = context->error;
        else if (checks & SIM_FREEING && sim_state_thread()->depth)
            result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    if (result == CUDA_SUCCESS && checks & SIM_UNSAFE) result = sim_capture_check_unsafe();
    return result;
}
