/* The runtime's functions, where they differ from the driver's. They are implemented over the same inner functions, so that
 * a program's cudaMalloc is one call for whoever stands before it. Errors are the driver's numbers, which the runtime
 * shares. */
#include "sim_modules.h"

enum {
    COPY_HOST_TO_HOST,
    COPY_HOST_TO_DEVICE,
    COPY_DEVICE_TO_HOST,
    COPY_DEVICE_TO_DEVICE,
    COPY_DEFAULT,
    COPY_KINDS,
    ERROR_INVALID_COPY_DIRECTION = 21, /* cudaErrorInvalidMemcpyDirection */
    MEMORY_UNREGISTERED = 0,           /* cudaMemoryType */
    MEMORY_HOST = 1,
    MEMORY_DEVICE = 2,
    NO_DEVICE = -2, /* of unregistered memory */
};

CUresult sim_runtime_device_count(int *count) { return sim_device_count(count); }

CUresult sim_runtime_get_device(int *device) {
    const sim_context_t *context = sim_context_current();
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = context ? context->device : sim_state_thread()->device;
    return CUDA_SUCCESS;
}

/* Since CUDA 12 this makes the device's primary context, too. */
CUresult sim_runtime_set_device(int device) {
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = sim_context_retain_for_runtime(device);
    if (result != CUDA_SUCCESS) return result;
    sim_state_thread()->device = device;
    /* Only the top of the stack is replaced; what lies below belongs to whoever pushed it. */
    return sim_context_set_current((CUcontext)(uintptr_t)sim_state.devices[device].primary.id);
}

CUresult sim_runtime_device_reset(void) {
    int device = 0;
    CUresult result = sim_runtime_get_device(&device);
    return result == CUDA_SUCCESS ? sim_context_primary_reset(device) : result;
}

/* Makes the peer's primary context, as was seen on two H200s (driver 580): that is how a device comes into use that the
 * program has never set. */
CUresult sim_runtime_enable_peer(int peer, unsigned int flags) {
    sim_context_t *context = sim_context_current();
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(peer) || peer == context->device) return CUDA_ERROR_INVALID_DEVICE;
    if (!sim_state.peer_capable) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (context->peers[peer]) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    CUresult result = sim_context_retain_for_runtime(peer);
    if (result == CUDA_SUCCESS) context->peers[peer] = true;
    return result;
}

CUresult sim_runtime_malloc(void **address, size_t bytes) {
    CUdeviceptr allocated = 0;
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = bytes ? sim_device_memory_allocate(&allocated, bytes) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) *address = (void *)(uintptr_t)allocated; /* no bytes: NULL, and no error */
    return result;
}

CUresult sim_runtime_free(void *address) { return address ? sim_device_memory_free((uintptr_t)address) : CUDA_SUCCESS; }

CUresult sim_runtime_malloc_host(void **host, size_t bytes) {
    if (!host) return CUDA_ERROR_INVALID_VALUE;
    if (bytes) return sim_host_allocate(host, bytes, CU_MEMHOSTALLOC_PORTABLE);
    *host = NULL;
    return CUDA_SUCCESS;
}

CUresult sim_runtime_free_host(void *host) { return host ? sim_host_free(host) : CUDA_SUCCESS; }

/* Which ends are on the device, by what was said or, by default, by what the pointers are. */
static CUresult copy_as_told(void *destination, const void *source, size_t bytes, int kind, CUstream stream, bool now) {
    uint64_t to = (uintptr_t)destination, from = (uintptr_t)source;
    if (kind < 0 || kind >= COPY_KINDS) return (CUresult)ERROR_INVALID_COPY_DIRECTION;
    bool to_device = kind == COPY_HOST_TO_DEVICE || kind == COPY_DEVICE_TO_DEVICE;
    bool from_device = kind == COPY_DEVICE_TO_HOST || kind == COPY_DEVICE_TO_DEVICE;
    if (kind == COPY_DEFAULT) {
        to_device = sim_memory_reservation_at(to) != NULL;
        from_device = sim_memory_reservation_at(from) != NULL;
    }
    return sim_copy_any(to, to_device, from, from_device, bytes, stream, now);
}

CUresult sim_runtime_copy(void *destination, const void *source, size_t bytes, int kind) {
    return copy_as_told(destination, source, bytes, kind, NULL, true);
}

CUresult sim_runtime_copy_async(void *destination, const void *source, size_t bytes, int kind, CUstream stream) {
    return copy_as_told(destination, source, bytes, kind, stream, false);
}

/* cudaMemset does not wait for the device. */
CUresult sim_runtime_set(void *address, int value, size_t bytes) {
    return sim_copy_set_async((uintptr_t)address, (unsigned char)value, bytes, NULL);
}

CUresult sim_runtime_set_async(void *address, int value, size_t bytes, CUstream stream) {
    return sim_copy_set_async((uintptr_t)address, (unsigned char)value, bytes, stream);
}

CUresult sim_runtime_stream_create(CUstream *stream) { return sim_stream_create(stream, CU_STREAM_DEFAULT); }

CUresult sim_runtime_pointer_attributes(sim_pointer_attributes_t *attributes, const void *address) {
    const sim_mapping_t *mapping = sim_memory_mapping_at((uintptr_t)address);
    if (!attributes) return CUDA_ERROR_INVALID_VALUE;
    *attributes = (sim_pointer_attributes_t){.type = MEMORY_UNREGISTERED, .device = NO_DEVICE};
    if (mapping) {
        attributes->type = MEMORY_DEVICE;
        attributes->device = mapping->physical->device;
        attributes->device_pointer = (void *)(uintptr_t)address;
    } else if (sim_host_at((uintptr_t)address)) {
        attributes->type = MEMORY_HOST;
        attributes->device = sim_context_current()->device;
        attributes->device_pointer = attributes->host_pointer = (void *)(uintptr_t)address;
    }
    return CUDA_SUCCESS;
}

/* The last error of a thread is its own, so these two neither count nor fail. */
TMS_SIM_EXPORT CUresult cudaGetLastError(void);
TMS_SIM_EXPORT CUresult cudaPeekAtLastError(void);

static CUresult last_error(bool forget) {
    if (!sim_state_lock()) return CUDA_ERROR_NOT_INITIALIZED;
    sim_thread_t *thread = sim_state_thread();
    CUresult error = (CUresult)thread->last_error;
    if (forget) thread->last_error = CUDA_SUCCESS;
    sim_state_unlock();
    return error;
}

CUresult cudaGetLastError(void) { return last_error(true); }

CUresult cudaPeekAtLastError(void) { return last_error(false); }
