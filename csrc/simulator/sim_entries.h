/* Every exported entry point, once: the wrapper that counts, traces and injects faults (entry.c), the declaration of what it
 * calls, and the answer of cuGetProcAddress are made from these lists.
 *
 * X(exported symbol, implementation, checks, parameters, arguments). The name that counts is the symbol without its ABI
 * suffix. Implementations run with the simulator's lock held, after the checks. */
#ifndef TMS_SIM_ENTRIES_H
#define TMS_SIM_ENTRIES_H

#include <cuda.h>
#include <stdint.h>

/* The checks before a call; every one but SIM_PURE fails after deinitialisation. */
enum {
    SIM_PURE = 1,     /* looks at nothing: works always, and "*" does not fail it */
    SIM_INIT = 2,     /* needs cuInit */
    SIM_CONTEXT = 4,  /* needs a current context without a sticky error; includes SIM_INIT */
    SIM_UNSAFE = 8,   /* forbidden during captures, as cuThreadExchangeStreamCaptureMode says */
    SIM_DEVICES = 16, /* of the runtime: needs what cuInit makes, and makes it */
    SIM_RUNTIME = 32, /* of the runtime: makes the current device's primary context, and needs it without error */
};

#define SIM_DRIVER_DEVICE_ENTRIES(X)                                                                                        \
    X(cuInit, sim_device_init, 0, (unsigned int flags), (flags))                                                            \
    X(cuDriverGetVersion, sim_device_driver_version, SIM_PURE, (int *version), (version))                                   \
    X(cuGetErrorName, sim_error_name, SIM_PURE, (CUresult error, const char **text), (error, text))                         \
    X(cuGetErrorString, sim_error_string, SIM_PURE, (CUresult error, const char **text), (error, text))                     \
    X(cuGetProcAddress_v2, sim_entry_address, SIM_PURE,                                                                     \
      (const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status),         \
      (symbol, function, version, flags, status))                                                                           \
    X(cuDeviceGetCount, sim_device_count, SIM_INIT, (int *count), (count))                                                  \
    X(cuDeviceGet, sim_device_get, SIM_INIT, (CUdevice * device, int ordinal), (device, ordinal))                           \
    X(cuDeviceGetName, sim_device_name, SIM_INIT, (char *name, int length, CUdevice device), (name, length, device))        \
    X(cuDeviceTotalMem_v2, sim_device_total_memory, SIM_INIT, (size_t *bytes, CUdevice device), (bytes, device))            \
    X(cuDeviceGetAttribute, sim_device_attribute, SIM_INIT, (int *value, CUdevice_attribute attribute, CUdevice device),    \
      (value, attribute, device))                                                                                           \
    X(cuDeviceCanAccessPeer, sim_device_can_access_peer, SIM_INIT, (int *can, CUdevice device, CUdevice peer),              \
      (can, device, peer))                                                                                                  \
    X(cuDevicePrimaryCtxGetState, sim_context_primary_state, SIM_INIT, (CUdevice device, unsigned int *flags, int *active), \
      (device, flags, active))                                                                                              \
    X(cuDevicePrimaryCtxSetFlags_v2, sim_context_primary_set_flags, SIM_INIT, (CUdevice device, unsigned int flags),        \
      (device, flags))                                                                                                      \
    X(cuDevicePrimaryCtxRetain, sim_context_primary_retain, SIM_INIT, (CUcontext * context, CUdevice device),               \
      (context, device))                                                                                                    \
    X(cuDevicePrimaryCtxRelease_v2, sim_context_primary_release, SIM_INIT, (CUdevice device), (device))                     \
    X(cuDevicePrimaryCtxReset_v2, sim_context_primary_reset, SIM_INIT, (CUdevice device), (device))                         \
    X(cuCtxGetCurrent, sim_context_get_current, SIM_INIT, (CUcontext * context), (context))                                 \
    X(cuCtxSetCurrent, sim_context_set_current, SIM_INIT, (CUcontext context), (context))                                   \
    X(cuCtxPushCurrent_v2, sim_context_push, SIM_INIT, (CUcontext context), (context))                                      \
    X(cuCtxPopCurrent_v2, sim_context_pop, SIM_INIT, (CUcontext * context), (context))                                      \
    X(cuCtxGetDevice, sim_context_get_device, SIM_INIT, (CUdevice * device), (device))                                      \
    X(cuCtxEnablePeerAccess, sim_context_enable_peer, SIM_CONTEXT, (CUcontext peer, unsigned int flags), (peer, flags))     \
    X(cuCtxSynchronize, sim_context_synchronize, SIM_CONTEXT, (void), ())

#define SIM_DRIVER_MEMORY_ENTRIES(X)                                                                                        \
    X(cuMemGetInfo_v2, sim_device_memory_info, SIM_CONTEXT, (size_t *available, size_t *total), (available, total))         \
    X(cuMemGetAllocationGranularity, sim_memory_granularity, SIM_INIT,                                                      \
      (size_t *granularity, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option),                \
      (granularity, properties, option))                                                                                    \
    X(cuMemAddressReserve, sim_memory_reserve, SIM_INIT,                                                                    \
      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags),                  \
      (address, bytes, alignment, hint, flags))                                                                             \
    X(cuMemAddressFree, sim_memory_address_free, SIM_INIT, (CUdeviceptr address, size_t bytes), (address, bytes))           \
    X(cuMemCreate, sim_memory_create, SIM_INIT,                                                                             \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *properties,                          \
       unsigned long long flags),                                                                                           \
      (handle, bytes, properties, flags))                                                                                   \
    X(cuMemRelease, sim_memory_release, SIM_INIT, (CUmemGenericAllocationHandle handle), (handle))                          \
    X(cuMemRetainAllocationHandle, sim_memory_retain, SIM_INIT, (CUmemGenericAllocationHandle * handle, void *address),     \
      (handle, address))                                                                                                    \
    X(cuMemMap, sim_memory_map, SIM_INIT,                                                                                   \
      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),    \
      (address, bytes, offset, handle, flags))                                                                              \
    X(cuMemUnmap, sim_memory_unmap, SIM_INIT, (CUdeviceptr address, size_t bytes), (address, bytes))                        \
    X(cuMemSetAccess, sim_memory_set_access, SIM_INIT,                                                                      \
      (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count), (address, bytes, access, count))    \
    X(cuMemGetAccess, sim_memory_get_access, SIM_INIT,                                                                      \
      (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address), (flags, location, address))          \
    X(cuMemExportToShareableHandle, sim_memory_export, SIM_INIT,                                                            \
      (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags),     \
      (shareable, handle, type, flags))                                                                                     \
    X(cuMemAlloc_v2, sim_device_memory_allocate, SIM_CONTEXT | SIM_UNSAFE, (CUdeviceptr * address, size_t bytes),           \
      (address, bytes))                                                                                                     \
    X(cuMemFree_v2, sim_device_memory_free, SIM_CONTEXT | SIM_UNSAFE, (CUdeviceptr address), (address))                     \
    X(cuMemHostAlloc, sim_host_allocate, SIM_CONTEXT | SIM_UNSAFE, (void **host, size_t bytes, unsigned int flags),         \
      (host, bytes, flags))                                                                                                 \
    X(cuMemFreeHost, sim_host_free, SIM_CONTEXT | SIM_UNSAFE, (void *host), (host))                                         \
    X(cuMemHostRegister_v2, sim_host_register, SIM_CONTEXT | SIM_UNSAFE, (void *host, size_t bytes, unsigned int flags),    \
      (host, bytes, flags))                                                                                                 \
    X(cuMemHostUnregister, sim_host_unregister, SIM_CONTEXT | SIM_UNSAFE, (void *host), (host))                             \
    X(cuPointerGetAttribute, sim_pointer_attribute, SIM_CONTEXT,                                                            \
      (void *data, CUpointer_attribute attribute, CUdeviceptr address), (data, attribute, address))

#define SIM_DRIVER_STREAM_ENTRIES(X)                                                                                        \
    X(cuMemcpyDtoH_v2, sim_copy_dtoh, SIM_CONTEXT, (void *host, CUdeviceptr device, size_t bytes), (host, device, bytes))   \
    X(cuMemcpyHtoD_v2, sim_copy_htod, SIM_CONTEXT, (CUdeviceptr device, const void *host, size_t bytes),                    \
      (device, host, bytes))                                                                                                \
    X(cuMemcpyDtoD_v2, sim_copy_dtod, SIM_CONTEXT, (CUdeviceptr destination, CUdeviceptr source, size_t bytes),             \
      (destination, source, bytes))                                                                                         \
    X(cuMemcpyDtoHAsync_v2, sim_copy_dtoh_async, SIM_CONTEXT,                                                               \
      (void *host, CUdeviceptr device, size_t bytes, CUstream stream), (host, device, bytes, stream))                       \
    X(cuMemcpyHtoDAsync_v2, sim_copy_htod_async, SIM_CONTEXT,                                                               \
      (CUdeviceptr device, const void *host, size_t bytes, CUstream stream), (device, host, bytes, stream))                 \
    X(cuMemcpyDtoDAsync_v2, sim_copy_dtod_async, SIM_CONTEXT,                                                               \
      (CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream), (destination, source, bytes, stream))   \
    X(cuMemsetD8_v2, sim_copy_set, SIM_CONTEXT, (CUdeviceptr address, unsigned char value, size_t bytes),                   \
      (address, value, bytes))                                                                                              \
    X(cuMemsetD8Async, sim_copy_set_async, SIM_CONTEXT,                                                                     \
      (CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream), (address, value, bytes, stream))           \
    X(cuStreamCreate, sim_stream_create, SIM_CONTEXT, (CUstream * stream, unsigned int flags), (stream, flags))             \
    X(cuStreamDestroy_v2, sim_stream_destroy, SIM_CONTEXT, (CUstream stream), (stream))                                     \
    X(cuStreamSynchronize, sim_stream_synchronize, SIM_CONTEXT, (CUstream stream), (stream))                                \
    X(cuStreamQuery, sim_stream_query, SIM_CONTEXT, (CUstream stream), (stream))                                            \
    X(cuStreamWaitEvent, sim_event_wait, SIM_CONTEXT, (CUstream stream, CUevent event, unsigned int flags),                 \
      (stream, event, flags))                                                                                               \
    X(cuEventCreate, sim_event_create, SIM_CONTEXT, (CUevent * event, unsigned int flags), (event, flags))                  \
    X(cuEventDestroy_v2, sim_event_destroy, SIM_CONTEXT, (CUevent event), (event))                                          \
    X(cuEventRecord, sim_event_record, SIM_CONTEXT, (CUevent event, CUstream stream), (event, stream))                      \
    X(cuEventSynchronize, sim_event_synchronize, SIM_CONTEXT | SIM_UNSAFE, (CUevent event), (event))                        \
    X(cuEventQuery, sim_event_query, SIM_CONTEXT | SIM_UNSAFE, (CUevent event), (event))                                    \
    X(cuThreadExchangeStreamCaptureMode, sim_capture_exchange_mode, SIM_INIT, (CUstreamCaptureMode * mode), (mode))         \
    X(cuStreamIsCapturing, sim_capture_status, SIM_CONTEXT, (CUstream stream, CUstreamCaptureStatus * status),              \
      (stream, status))                                                                                                     \
    X(cuStreamBeginCapture_v2, sim_capture_begin, SIM_CONTEXT, (CUstream stream, CUstreamCaptureMode mode), (stream, mode)) \
    X(cuStreamEndCapture, sim_capture_end, SIM_CONTEXT, (CUstream stream, CUgraph * graph), (stream, graph))                \
    X(cuGraphCreate, sim_graph_create, SIM_INIT, (CUgraph * graph, unsigned int flags), (graph, flags))                     \
    X(cuGraphDestroy, sim_graph_destroy, SIM_INIT, (CUgraph graph), (graph))                                                \
    X(cuGraphInstantiateWithFlags, sim_graph_instantiate, SIM_CONTEXT,                                                      \
      (CUgraphExec * executable, CUgraph graph, unsigned long long flags), (executable, graph, flags))                      \
    X(cuGraphExecDestroy, sim_graph_destroy_executable, SIM_INIT, (CUgraphExec executable), (executable))                   \
    X(cuGraphLaunch, sim_graph_launch, SIM_CONTEXT, (CUgraphExec executable, CUstream stream), (executable, stream))

#define SIM_DRIVER_ENTRIES(X)                                                                                               \
    SIM_DRIVER_DEVICE_ENTRIES(X)                                                                                            \
    SIM_DRIVER_MEMORY_ENTRIES(X)                                                                                            \
    SIM_DRIVER_STREAM_ENTRIES(X)

/* What cudaPointerGetAttributes fills in, from the documentation. */
typedef struct sim_pointer_attributes {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
    long reserved[8];
} sim_pointer_attributes_t;

/* The runtime. Its errors are the driver's numbers; its header is not needed. */
#define SIM_RUNTIME_ENTRIES(X)                                                                                              \
    X(cudaGetDeviceCount, sim_runtime_device_count, SIM_DEVICES, (int *count), (count))                                     \
    X(cudaGetDevice, sim_runtime_get_device, SIM_DEVICES, (int *device), (device))                                          \
    X(cudaSetDevice, sim_runtime_set_device, SIM_DEVICES, (int device), (device))                                           \
    X(cudaDeviceSynchronize, sim_context_synchronize, SIM_RUNTIME, (void), ())                                              \
    X(cudaDeviceReset, sim_runtime_device_reset, SIM_DEVICES, (void), ())                                                   \
    X(cudaDeviceCanAccessPeer, sim_device_can_access_peer, SIM_DEVICES, (int *can, int device, int peer),                   \
      (can, device, peer))                                                                                                  \
    X(cudaDeviceEnablePeerAccess, sim_runtime_enable_peer, SIM_RUNTIME, (int peer, unsigned int flags), (peer, flags))      \
    X(cudaMalloc, sim_runtime_malloc, SIM_RUNTIME | SIM_UNSAFE, (void **address, size_t bytes), (address, bytes))           \
    X(cudaFree, sim_runtime_free, SIM_RUNTIME | SIM_UNSAFE, (void *address), (address))                                     \
    X(cudaMallocHost, sim_runtime_malloc_host, SIM_RUNTIME | SIM_UNSAFE, (void **host, size_t bytes), (host, bytes))        \
    X(cudaFreeHost, sim_runtime_free_host, SIM_RUNTIME | SIM_UNSAFE, (void *host), (host))                                  \
    X(cudaMemGetInfo, sim_device_memory_info, SIM_RUNTIME, (size_t *available, size_t *total), (available, total))          \
    X(cudaMemcpy, sim_runtime_copy, SIM_RUNTIME, (void *destination, const void *source, size_t bytes, int kind),           \
      (destination, source, bytes, kind))                                                                                   \
    X(cudaMemcpyAsync, sim_runtime_copy_async, SIM_RUNTIME,                                                                 \
      (void *destination, const void *source, size_t bytes, int kind, CUstream stream),                                     \
      (destination, source, bytes, kind, stream))                                                                           \
    X(cudaMemset, sim_runtime_set, SIM_RUNTIME, (void *address, int value, size_t bytes), (address, value, bytes))          \
    X(cudaMemsetAsync, sim_runtime_set_async, SIM_RUNTIME, (void *address, int value, size_t bytes, CUstream stream),       \
      (address, value, bytes, stream))                                                                                      \
    X(cudaPointerGetAttributes, sim_runtime_pointer_attributes, SIM_RUNTIME,                                                \
      (sim_pointer_attributes_t * attributes, const void *address), (attributes, address))                                  \
    X(cudaStreamCreate, sim_runtime_stream_create, SIM_RUNTIME, (CUstream * stream), (stream))                              \
    X(cudaStreamCreateWithFlags, sim_stream_create, SIM_RUNTIME, (CUstream * stream, unsigned int flags), (stream, flags))  \
    X(cudaStreamDestroy, sim_stream_destroy, SIM_RUNTIME, (CUstream stream), (stream))                                      \
    X(cudaStreamSynchronize, sim_stream_synchronize, SIM_RUNTIME, (CUstream stream), (stream))                              \
    X(cudaStreamBeginCapture, sim_capture_begin, SIM_RUNTIME, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))  \
    X(cudaStreamBeginCapture_ptsz, sim_capture_begin, SIM_RUNTIME, (CUstream stream, CUstreamCaptureMode mode),             \
      (stream, mode))                                                                                                       \
    X(cudaStreamBeginCaptureToGraph, sim_capture_begin_to_graph, SIM_RUNTIME,                                               \
      (CUstream stream, CUgraph graph, const void *dependencies, const void *edges, size_t count,                           \
       CUstreamCaptureMode mode),                                                                                           \
      (stream, graph, dependencies, edges, count, mode))                                                                    \
    X(cudaStreamBeginCaptureToGraph_ptsz, sim_capture_begin_to_graph, SIM_RUNTIME,                                          \
      (CUstream stream, CUgraph graph, const void *dependencies, const void *edges, size_t count,                           \
       CUstreamCaptureMode mode),                                                                                           \
      (stream, graph, dependencies, edges, count, mode))                                                                    \
    X(cudaStreamEndCapture, sim_capture_end, SIM_RUNTIME, (CUstream stream, CUgraph * graph), (stream, graph))              \
    X(cudaStreamEndCapture_ptsz, sim_capture_end, SIM_RUNTIME, (CUstream stream, CUgraph * graph), (stream, graph))         \
    X(cudaStreamIsCapturing, sim_capture_status, SIM_RUNTIME, (CUstream stream, CUstreamCaptureStatus * status),            \
      (stream, status))                                                                                                     \
    X(cudaThreadExchangeStreamCaptureMode, sim_capture_exchange_mode, SIM_DEVICES, (CUstreamCaptureMode * mode), (mode))    \
    X(cudaGraphCreate, sim_graph_create, SIM_DEVICES, (CUgraph * graph, unsigned int flags), (graph, flags))                \
    X(cudaGraphDestroy, sim_graph_destroy, SIM_DEVICES, (CUgraph graph), (graph))                                           \
    X(cudaGraphInstantiate, sim_graph_instantiate, SIM_RUNTIME,                                                             \
      (CUgraphExec * executable, CUgraph graph, unsigned long long flags), (executable, graph, flags))                      \
    X(cudaGraphExecDestroy, sim_graph_destroy_executable, SIM_DEVICES, (CUgraphExec executable), (executable))              \
    X(cudaGraphLaunch, sim_graph_launch, SIM_RUNTIME, (CUgraphExec executable, CUstream stream), (executable, stream))

typedef enum sim_call {
#define SIM_CALL_ENUMERATOR(symbol, implementation, checks, parameters, arguments) SIM_CALL_##symbol,
    SIM_DRIVER_ENTRIES(SIM_CALL_ENUMERATOR) SIM_RUNTIME_ENTRIES(SIM_CALL_ENUMERATOR)
#undef SIM_CALL_ENUMERATOR
        SIM_CALL_COUNT
} sim_call_t;

/* What the wrappers call. */
#define SIM_DECLARE(symbol, implementation, checks, parameters, arguments) CUresult implementation parameters;
SIM_DRIVER_ENTRIES(SIM_DECLARE)
#undef SIM_DECLARE
#define SIM_DECLARE_RUNTIME(symbol, implementation, checks, parameters, arguments) CUresult implementation parameters;
SIM_RUNTIME_ENTRIES(SIM_DECLARE_RUNTIME)
#undef SIM_DECLARE_RUNTIME

#endif
