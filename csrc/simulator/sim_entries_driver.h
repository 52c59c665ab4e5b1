/* The driver's entry points, in the form of sim_entries.h. */
#ifndef TMS_SIM_ENTRIES_DRIVER_H
#define TMS_SIM_ENTRIES_DRIVER_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#include "sim_runtime.h"

struct CUctxCreateParams_st; /* which cuda.h has since CUDA 12.5 */
/* The same. */
typedef struct sim_context_parameters {
    void *affinities;
    int affinity_count;
    void *graphics;
} sim_context_parameters_t;

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
    X(cuCtxCreate_v2, sim_context_create, SIM_INIT, (CUcontext * context, unsigned int flags, CUdevice device),             \
      (context, flags, device))                                                                                             \
    X(cuCtxCreate_v3, sim_context_create_with_affinity, SIM_INIT,                                                           \
      (CUcontext * context, CUexecAffinityParam * affinities, int count, unsigned int flags, CUdevice device),              \
      (context, affinities, count, flags, device))                                                                          \
    X(cuCtxCreate_v4, sim_context_create_with_parameters, SIM_INIT,                                                         \
      (CUcontext * context, struct CUctxCreateParams_st * parameters, unsigned int flags, CUdevice device),                 \
      (context, parameters, flags, device))                                                                                 \
    X(cuCtxDestroy_v2, sim_context_destroy_created, SIM_INIT, (CUcontext context), (context))                               \
    X(cuCtxGetCurrent, sim_context_get_current, SIM_INIT, (CUcontext * context), (context))                                 \
    X(cuCtxSetCurrent, sim_context_set_current, SIM_INIT, (CUcontext context), (context))                                   \
    X(cuCtxPushCurrent_v2, sim_context_push, SIM_INIT, (CUcontext context), (context))                                      \
    X(cuCtxPopCurrent_v2, sim_context_pop, SIM_INIT, (CUcontext * context), (context))                                      \
    X(cuCtxGetId, sim_context_identifier, SIM_INIT, (CUcontext context, unsigned long long *id), (context, id))             \
    X(cuCtxGetDevice, sim_context_get_device, SIM_INIT, (CUdevice * device), (device))                                      \
    X(cuCtxEnablePeerAccess, sim_context_enable_peer, SIM_CONTEXT, (CUcontext peer, unsigned int flags), (peer, flags))     \
    X(cuCtxSynchronize, sim_context_synchronize, SIM_CONTEXT, (void), ())                                                   \
    X(cuDeviceGetUuid_v2, sim_device_uuid, SIM_INIT, (CUuuid * uuid, CUdevice device), (uuid, device))                      \
    X(cuCtxGetStreamPriorityRange, sim_device_priority_range, SIM_CONTEXT, (int *least, int *greatest), (least, greatest))

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
    X(cuMemFree_v2, sim_device_memory_free, SIM_FREEING | SIM_UNSAFE, (CUdeviceptr address), (address))                     \
    X(cuMemHostAlloc, sim_host_allocate, SIM_CONTEXT | SIM_UNSAFE, (void **host, size_t bytes, unsigned int flags),         \
      (host, bytes, flags))                                                                                                 \
    X(cuMemFreeHost, sim_host_free, SIM_FREEING | SIM_UNSAFE, (void *host), (host))                                         \
    X(cuMemHostRegister_v2, sim_host_register, SIM_CONTEXT | SIM_UNSAFE, (void *host, size_t bytes, unsigned int flags),    \
      (host, bytes, flags))                                                                                                 \
    X(cuMemHostUnregister, sim_host_unregister, SIM_FREEING | SIM_UNSAFE, (void *host), (host))                             \
    X(cuPointerGetAttribute, sim_pointer_attribute, SIM_HEALTHY,                                                            \
      (void *data, CUpointer_attribute attribute, CUdeviceptr address), (data, attribute, address))                         \
    X(cuIpcGetMemHandle, sim_ipc_memory_handle, SIM_CONTEXT | SIM_UNSAFE, (CUipcMemHandle * handle, CUdeviceptr address),   \
      (handle, address))                                                                                                    \
    X(cuIpcOpenMemHandle_v2, sim_ipc_open_memory, SIM_CONTEXT | SIM_UNSAFE,                                                 \
      (CUdeviceptr * address, CUipcMemHandle handle, unsigned int flags), (address, handle, flags))                         \
    X(cuIpcCloseMemHandle, sim_ipc_close_memory, SIM_CONTEXT | SIM_UNSAFE, (CUdeviceptr address), (address))                \
    X(cuMemGetAddressRange_v2, sim_device_memory_range, SIM_CONTEXT,                                                        \
      (CUdeviceptr * start, size_t *bytes, CUdeviceptr address), (start, bytes, address))                                   \
    X(cuMemGetAllocationPropertiesFromHandle, sim_memory_properties, SIM_INIT,                                              \
      (CUmemAllocationProp * properties, CUmemGenericAllocationHandle handle), (properties, handle))                        \
    X(cuMemImportFromShareableHandle, sim_memory_import, SIM_INIT,                                                          \
      (CUmemGenericAllocationHandle * handle, void *shareable, CUmemAllocationHandleType type), (handle, shareable, type))  \
    X(cuMulticastCreate, sim_multicast_create, SIM_INIT,                                                                    \
      (CUmemGenericAllocationHandle * handle, const struct CUmulticastObjectProp_st *properties), (handle, properties))     \
    X(cuMulticastAddDevice, sim_multicast_add, SIM_INIT, (CUmemGenericAllocationHandle handle, CUdevice device),            \
      (handle, device))                                                                                                     \
    X(cuMulticastBindMem, sim_multicast_bind, SIM_INIT,                                                                     \
      (CUmemGenericAllocationHandle handle, size_t at, CUmemGenericAllocationHandle memory, size_t offset, size_t bytes,    \
       unsigned long long flags),                                                                                           \
      (handle, at, memory, offset, bytes, flags))                                                                           \
    X(cuMulticastUnbind, sim_multicast_unbind, SIM_INIT,                                                                    \
      (CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes), (handle, device, offset, bytes))

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
    X(cuMemcpyBatchAsync_v2, sim_copy_batch_async, SIM_CONTEXT,                                                             \
      (CUdeviceptr * targets, CUdeviceptr * sources, size_t *sizes, size_t count, struct CUmemcpyAttributes_st *attributes, \
       size_t *first_copies, size_t attribute_count, CUstream stream),                                                      \
      (targets, sources, sizes, count, attributes, first_copies, attribute_count, stream))                                  \
    X(cuMemsetD8_v2, sim_copy_set, SIM_CONTEXT, (CUdeviceptr address, unsigned char value, size_t bytes),                   \
      (address, value, bytes))                                                                                              \
    X(cuMemsetD8Async, sim_copy_set_async, SIM_CONTEXT,                                                                     \
      (CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream), (address, value, bytes, stream))           \
    X(cuStreamCreate, sim_stream_create, SIM_CONTEXT, (CUstream * stream, unsigned int flags), (stream, flags))             \
    X(cuStreamDestroy_v2, sim_stream_destroy, SIM_CONTEXT, (CUstream stream), (stream))                                     \
    X(cuStreamSynchronize, sim_stream_synchronize, SIM_CONTEXT | SIM_UNSAFE, (CUstream stream), (stream))                   \
    X(cuStreamQuery, sim_stream_query, SIM_CONTEXT | SIM_UNSAFE, (CUstream stream), (stream))                               \
    X(cuStreamWaitEvent, sim_event_wait, SIM_CONTEXT, (CUstream stream, CUevent event, unsigned int flags),                 \
      (stream, event, flags))                                                                                               \
    X(cuEventCreate, sim_event_create, SIM_CONTEXT, (CUevent * event, unsigned int flags), (event, flags))                  \
    X(cuEventDestroy_v2, sim_event_destroy, SIM_CONTEXT, (CUevent event), (event))                                          \
    X(cuEventRecord, sim_event_record, SIM_CONTEXT, (CUevent event, CUstream stream), (event, stream))                      \
    X(cuEventSynchronize, sim_event_synchronize, SIM_CONTEXT, (CUevent event), (event))                                     \
    X(cuEventQuery, sim_event_query, SIM_CONTEXT, (CUevent event), (event))                                                 \
    X(cuThreadExchangeStreamCaptureMode, sim_capture_exchange_mode, SIM_INIT | SIM_FORKED, (CUstreamCaptureMode * mode),    \
      (mode))                                                                                                               \
    X(cuStreamIsCapturing, sim_capture_status, SIM_CONTEXT, (CUstream stream, CUstreamCaptureStatus * status),              \
      (stream, status))                                                                                                     \
    X(cuStreamBeginCapture_v2, sim_capture_begin, SIM_CONTEXT, (CUstream stream, CUstreamCaptureMode mode), (stream, mode)) \
    X(cuStreamEndCapture, sim_capture_end, SIM_CONTEXT, (CUstream stream, CUgraph * graph), (stream, graph))                \
    X(cuGraphCreate, sim_graph_create, SIM_INIT, (CUgraph * graph, unsigned int flags), (graph, flags))                     \
    X(cuGraphDestroy, sim_graph_destroy, SIM_INIT, (CUgraph graph), (graph))                                                \
    X(cuGraphInstantiateWithFlags, sim_graph_instantiate, SIM_CONTEXT,                                                      \
      (CUgraphExec * executable, CUgraph graph, unsigned long long flags), (executable, graph, flags))                      \
    X(cuGraphExecDestroy, sim_graph_destroy_executable, SIM_INIT, (CUgraphExec executable), (executable))                   \
    X(cuGraphLaunch, sim_graph_launch, SIM_CONTEXT, (CUgraphExec executable, CUstream stream), (executable, stream))        \
    X(cuMemsetD32Async, sim_copy_set_words_async, SIM_CONTEXT,                                                              \
      (CUdeviceptr address, unsigned int value, size_t count, CUstream stream), (address, value, count, stream))            \
    X(cuStreamCreateWithPriority, sim_stream_create_with_priority, SIM_CONTEXT,                                             \
      (CUstream * stream, unsigned int flags, int priority), (stream, flags, priority))                                     \
    X(cuStreamGetCtx, sim_stream_context, SIM_CONTEXT, (CUstream stream, CUcontext * context), (stream, context))           \
    X(cuStreamGetPriority, sim_stream_priority, SIM_CONTEXT, (CUstream stream, int *priority), (stream, priority))          \
    X(cuLaunchHostFunc, sim_stream_host_function, SIM_CONTEXT,                                                              \
      (CUstream stream, sim_host_function_t * function, void *argument), (stream, function, argument))                      \
    X(cuEventElapsedTime_v2, sim_event_elapsed, SIM_CONTEXT, (float *milliseconds, CUevent first, CUevent last),            \
      (milliseconds, first, last))                                                                                          \
    X(cuIpcGetEventHandle, sim_ipc_event_handle, SIM_CONTEXT, (CUipcEventHandle * handle, CUevent event), (handle, event))  \
    X(cuIpcOpenEventHandle, sim_ipc_open_event, SIM_CONTEXT, (CUevent * event, CUipcEventHandle handle), (event, handle))   \
    X(cuGraphGetNodes, sim_graph_nodes, SIM_INIT, (CUgraph graph, CUgraphNode * nodes, size_t *count),                      \
      (graph, nodes, count))                                                                                                \
    X(cuStreamWriteValue32_v2, sim_copy_write_word, SIM_CONTEXT,                                                            \
      (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags), (stream, address, value, flags))

#define SIM_DRIVER_ENTRIES(X)                                                                                               \
    SIM_DRIVER_DEVICE_ENTRIES(X)                                                                                            \
    SIM_DRIVER_MEMORY_ENTRIES(X)                                                                                            \
    SIM_DRIVER_STREAM_ENTRIES(X)

#endif
