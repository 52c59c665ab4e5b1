#include "simulator/devices/context.h"

#include <stdlib.h>
#include <string.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/device.h"
#include "simulator/devices/entries.h"

sim_context_t *sim_context_find(CUcontext handle) {
    sim_context_t *context = sim_table_find(&sim_state.contexts, (uint64_t)(uintptr_t)handle);
    return context && context->alive ? context : NULL;
}

static CUcontext context_handle(const sim_context_t *context) { return (CUcontext)(uintptr_t)context->id; }

sim_context_t *sim_context_current(void) {
    sim_thread_t *thread = sim_state_thread();
    return thread->depth ? sim_context_find((CUcontext)(uintptr_t)thread->contexts[thread->depth - 1]) : NULL;
}

CUresult sim_context_require(sim_context_t **context) {
    sim_thread_t *thread = sim_state_thread();
    sim_context_t *current = sim_context_current();
    if (!current) return thread->depth ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
    if (current->error != CUDA_SUCCESS) return current->error;
    *context = current;
    return CUDA_SUCCESS;
}

void sim_context_fail(sim_context_t *context, CUresult error) {
    if (context->error == CUDA_SUCCESS) context->error = error;
    if (sim_state.devices[context->device].lost == CUDA_SUCCESS) sim_state.devices[context->device].lost = error;
    sim_state_changed(); /* cancels queued work; waiting threads get the error */
}

/* Returns the error that made a device unusable, if there is one. The process then gets no new context on any device. */
static CUresult fatal_device_error(void) {
    for (int i = 0; i < sim_state.device_count; i++) {
        if (sim_state.devices[i].lost != CUDA_SUCCESS) return sim_state.devices[i].lost;
    }
    return CUDA_SUCCESS;
}

/* A primary context keeps its handle across activations, as in the driver. */
static bool register_context(sim_context_t *context) {
    if (context->id) return true;
    uint64_t id = sim_state_new_id();
    if (!sim_table_insert(&sim_state.contexts, id, context)) return false;
    context->id = id;
    return true;
}

static CUresult activate(sim_context_t *context) {
    if (context->alive) return CUDA_SUCCESS;
    CUresult lost = fatal_device_error();
    if (lost != CUDA_SUCCESS) return lost;
    if (!register_context(context)) return CUDA_ERROR_OUT_OF_MEMORY;
    context->activation = sim_state_new_id();
    context->alive = true;
    sim_budget_count_context(context->device, 1);
    return CUDA_SUCCESS;
}

CUresult sim_context_primary_state(CUdevice device, unsigned int *flags, int *active) {
    if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = sim_state.devices[device].primary.flags;
    *active = sim_state.devices[device].primary.alive;
    return CUDA_SUCCESS;
}

CUresult sim_context_primary_set_flags(CUdevice device, unsigned int flags) {
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (flags & ~(unsigned)CU_CTX_FLAGS_MASK) return CUDA_ERROR_INVALID_VALUE;
    sim_state.devices[device].primary.flags = flags;
    return CUDA_SUCCESS;
}

CUresult sim_context_primary_retain(CUcontext *handle, CUdevice device) {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    sim_context_t *context = &sim_state.devices[device].primary;
    CUresult result = activate(context);
    if (result != CUDA_SUCCESS) return result;
    context->references++;
    *handle = context_handle(context);
    return CUDA_SUCCESS;
}

/* ---- contexts of cuCtxCreate ---- */

CUresult sim_context_create(CUcontext *handle, unsigned int flags, CUdevice device) {
    sim_thread_t *thread = sim_state_thread();
    CUresult lost = fatal_device_error();
    if (!handle || flags & ~(unsigned)CU_CTX_FLAGS_MASK) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (lost != CUDA_SUCCESS) return lost;
    if (thread->depth == SIM_CONTEXT_DEPTH) return CUDA_ERROR_INVALID_CONTEXT;
    sim_context_t *context = calloc(1, sizeof *context);
    if (!context) return CUDA_ERROR_OUT_OF_MEMORY;
    *context =
        (sim_context_t){.activation = sim_state_new_id(), .device = device, .alive = true, .created = true, .flags = flags};
    if (!register_context(context)) {
        free(context);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_budget_count_context(device, 1);
    *handle = context_handle(context);
    thread->contexts[thread->depth++] = context->id;
    return CUDA_SUCCESS;
}

CUresult sim_context_create_with_affinity(CUcontext *handle, CUexecAffinityParam *affinities, int count, unsigned int flags,
                                          CUdevice device) {
    if (count < 0 || (count > 0 && !affinities)) return CUDA_ERROR_INVALID_VALUE;
    return count > 0 ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : sim_context_create(handle, flags, device);
}

CUresult sim_context_create_with_parameters(CUcontext *handle, struct CUctxCreateParams_st *parameters, unsigned int flags,
                                            CUdevice device) {
    const sim_context_parameters_t *wanted = (const void *)parameters;
    if (wanted && wanted->graphics) return CUDA_ERROR_NOT_SUPPORTED;
    if (wanted && wanted->affinities) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    return sim_context_create(handle, flags, device);
}

void sim_context_clear(void) {
    for (size_t i = 0; i < sim_state.contexts.count; i++) {
        sim_context_t *context = sim_state.contexts.slots[i].value;
        if (context->alive) sim_budget_count_context(context->device, -1);
        if (context->created) free(context);
    }
    sim_table_release(&sim_state.contexts);
}

/* ---- a thread's context stack ---- */

CUresult sim_context_get_current(CUcontext *handle) {
    const sim_thread_t *thread = sim_state_thread();
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    *handle = thread->depth ? (CUcontext)(uintptr_t)thread->contexts[thread->depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult sim_context_identifier(CUcontext handle, unsigned long long *id) {
    const sim_context_t *context = handle ? sim_context_find(handle) : sim_context_current();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (!id) return CUDA_ERROR_INVALID_VALUE;
    *id = context->activation;
    return CUDA_SUCCESS;
}

CUresult sim_context_push(CUcontext handle) {
    sim_thread_t *thread = sim_state_thread();
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_context_find(handle) || thread->depth == SIM_CONTEXT_DEPTH) return CUDA_ERROR_INVALID_CONTEXT;
    thread->contexts[thread->depth++] = (uint64_t)(uintptr_t)handle;
    return CUDA_SUCCESS;
}

CUresult sim_context_pop(CUcontext *handle) {
    sim_thread_t *thread = sim_state_thread();
    if (!thread->depth) return CUDA_ERROR_INVALID_CONTEXT;
    thread->depth--;
    if (handle) *handle = (CUcontext)(uintptr_t)thread->contexts[thread->depth];
    return CUDA_SUCCESS;
}

/* Replaces the top of the stack; NULL pops it. A released primary context may be made current, but remains inactive. */
CUresult sim_context_set_current(CUcontext handle) {
    sim_thread_t *thread = sim_state_thread();
    if (handle && !sim_table_find(&sim_state.contexts, (uint64_t)(uintptr_t)handle)) return CUDA_ERROR_INVALID_CONTEXT;
    if (thread->depth) thread->depth--;
    if (handle) thread->contexts[thread->depth++] = (uint64_t)(uintptr_t)handle;
    return CUDA_SUCCESS;
}

CUresult sim_context_get_device(CUdevice *device) {
    const sim_context_t *context = sim_context_current();
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    if (!context) return sim_state_thread()->depth ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult sim_context_enable_peer(CUcontext handle, unsigned int flags) {
    sim_context_t *context = sim_context_current(), *peer = sim_context_find(handle);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (!peer) return CUDA_ERROR_INVALID_CONTEXT;
    if (peer == context || !sim_state.peer_capable) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (context->peers[peer->device]) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    context->peers[peer->device] = true;
    return CUDA_SUCCESS;
}

CUresult sim_context_retain_for_runtime(int device) {
    sim_context_t *context = &sim_state.devices[device].primary;
    CUcontext handle = NULL;
    if (context->runtime && context->alive) return CUDA_SUCCESS;
    CUresult result = sim_context_primary_retain(&handle, device);
    if (result == CUDA_SUCCESS) context->runtime = true;
    /* The runtime does not report the cause. */
    return result != CUDA_SUCCESS && result == fatal_device_error() ? CUDA_ERROR_DEVICE_UNAVAILABLE : result;
}

CUresult sim_context_select(int device) {
    sim_context_t *context = &sim_state.devices[device].primary;
    return register_context(context) ? sim_context_set_current(context_handle(context)) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_context_attach_runtime(void) {
    int device = sim_state_thread()->device;
    const sim_context_t *current = sim_context_current();
    if (current && current->created) return CUDA_SUCCESS;
    /* The runtime also retains a primary context that the driver made current. */
    if (current) return sim_context_retain_for_runtime(current->device);
    CUresult result = sim_context_retain_for_runtime(device);
    if (result != CUDA_SUCCESS) return result;
    return sim_context_set_current(context_handle(&sim_state.devices[device].primary));
}
