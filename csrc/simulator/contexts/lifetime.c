#include "simulator/contexts/lifetime.h"

#include <string.h>

#include "simulator/base/simulation.h"
#include "simulator/contexts/device_memory.h"
#include "simulator/contexts/entries.h"
#include "simulator/contexts/host_memory.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/context.h"
#include "simulator/devices/device.h"
#include "simulator/streams/stream.h"
#include "simulator/work/capture.h"

CUresult sim_context_synchronize(void) {
    sim_context_t *context = sim_context_current();
    CUresult result = sim_capture_check_context(context);
    return result == CUDA_SUCCESS ? sim_stream_drain(context) : result;
}

void sim_context_destroy(sim_context_t *context) {
    sim_stream_close_all(context);
    sim_device_memory_clear(context);
    sim_host_clear_context(context);
    if (context->alive) sim_budget_count_context(context->device, -1);
    context->alive = false;
    context->references = 0;
    context->runtime = false;
    context->error = CUDA_SUCCESS;
    context->legacy = NULL;
    memset(context->peers, 0, sizeof context->peers);
    sim_state_changed();
}

CUresult sim_context_primary_release(CUdevice device) {
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    sim_context_t *context = &sim_state.devices[device].primary;
    if (!context->references) return CUDA_ERROR_INVALID_CONTEXT;
    if (--context->references == 0) sim_context_destroy(context);
    return CUDA_SUCCESS;
}

CUresult sim_context_primary_reset(CUdevice device) {
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    sim_context_destroy(&sim_state.devices[device].primary);
    return CUDA_SUCCESS;
}

/* The context stays on the stacks of other threads; calls that need it fail there. */
CUresult sim_context_destroy_created(CUcontext handle) {
    sim_thread_t *thread = sim_state_thread();
    sim_context_t *context = sim_context_find(handle);
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!context || !context->created) return CUDA_ERROR_INVALID_CONTEXT;
    if (thread->depth && thread->contexts[thread->depth - 1] == context->id) thread->depth--;
    sim_context_destroy(context);
    return CUDA_SUCCESS;
}
