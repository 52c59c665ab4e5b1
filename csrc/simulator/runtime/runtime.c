/* Functions of the runtime that differ from the driver's. They share the inner functions with the driver, so an
 * interposer sees cudaMalloc as one call. Runtime errors use the driver's numbers. */
#include <string.h>

#include "simulator/base/simulation.h"
#include "simulator/contexts/entries.h"
#include "simulator/devices/context.h"
#include "simulator/devices/device.h"
#include "simulator/devices/entries.h"
#include "simulator/runtime/entries.h"
#include "simulator/streams/entries.h"

CUresult sim_runtime_get_device(int *device) {
    const sim_context_t *context = sim_context_current();
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = context ? context->device : sim_state_thread()->device;
    return CUDA_SUCCESS;
}

/* Since CUDA 12 this also creates the device's primary context. */
CUresult sim_runtime_set_device(int device) {
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    /* The device becomes current even if it has no usable context. */
    CUresult result = sim_context_retain_for_runtime(device);
    sim_state_thread()->device = device;
    /* Only the top of the stack is replaced; the entries below belong to the caller that pushed them. */
    CUresult selected = sim_context_select(device);
    return result == CUDA_SUCCESS ? selected : result;
}

CUresult sim_runtime_device_reset(void) {
    int device = 0;
    CUresult result = sim_runtime_get_device(&device);
    return result == CUDA_SUCCESS ? sim_context_primary_reset(device) : result;
}

/* Creates the peer's primary context, as the real runtime does. So a device that the program never selects comes into
 * use. */
CUresult sim_runtime_enable_peer(int peer, unsigned int flags) {
    sim_context_t *context = sim_context_current();
    if (!sim_device_valid(peer)) return CUDA_ERROR_INVALID_DEVICE;
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (peer == context->device || !sim_state.peer_capable) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (context->peers[peer]) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    CUresult result = sim_context_retain_for_runtime(peer);
    if (result == CUDA_SUCCESS) context->peers[peer] = true;
    return result;
}

CUresult sim_runtime_disable_peer(int peer) {
    sim_context_t *context = sim_context_current();
    if (!sim_device_valid(peer)) return CUDA_ERROR_INVALID_DEVICE;
    if (!context->peers[peer]) return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    context->peers[peer] = false;
    return CUDA_SUCCESS;
}

CUresult sim_runtime_event_create(CUevent *event) { return sim_event_create(event, CU_EVENT_DEFAULT); }

/* No profiler is simulated. */
CUresult sim_runtime_profiler(void) { return CUDA_SUCCESS; }

CUresult sim_runtime_malloc(void **address, size_t bytes) {
    CUdeviceptr allocated = 0;
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = bytes ? sim_device_memory_allocate(&allocated, bytes) : CUDA_SUCCESS;
    *address = (void *)(uintptr_t)allocated; /* becomes NULL for zero bytes, which is no error, and if out of memory */
    return result;
}

CUresult sim_runtime_free(void *address) { return address ? sim_device_memory_free((uintptr_t)address) : CUDA_SUCCESS; }

CUresult sim_runtime_malloc_host(void **host, size_t bytes) {
    return sim_host_allocate(host, bytes, CU_MEMHOSTALLOC_PORTABLE);
}

CUresult sim_runtime_stream_create(CUstream *stream) { return sim_stream_create(stream, CU_STREAM_DEFAULT); }
