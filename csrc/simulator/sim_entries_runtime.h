/* The runtime's entry points, in the form of sim_entries.h, but for those that have to do with kernels
 * (sim_entries_kernel.h). Its errors are the driver's numbers; its header is not needed, and what it declares stands in
 * sim_runtime.h. */
#ifndef TMS_SIM_ENTRIES_RUNTIME_H
#define TMS_SIM_ENTRIES_RUNTIME_H

#include "sim_runtime.h"

#define SIM_RUNTIME_DEVICE_ENTRIES(X)                                                                                       \
    X(cudaGetDeviceCount, sim_runtime_device_count, SIM_DEVICES | SIM_FORKED, (int *count), (count))                        \
    X(cudaGetDevice, sim_runtime_get_device, SIM_DEVICES, (int *device), (device))                                          \
    X(cudaSetDevice, sim_runtime_set_device, SIM_DEVICES, (int device), (device))                                           \
    X(cudaDeviceSynchronize, sim_context_synchronize, SIM_RUNTIME, (void), ())                                              \
    X(cudaDeviceReset, sim_runtime_device_reset, SIM_DEVICES, (void), ())                                                   \
    X(cudaDeviceCanAccessPeer, sim_device_can_access_peer, SIM_DEVICES, (int *can, int device, int peer),                   \
      (can, device, peer))                                                                                                  \
    X(cudaDeviceEnablePeerAccess, sim_runtime_enable_peer, SIM_RUNTIME, (int peer, unsigned int flags), (peer, flags))      \
    X(cudaDriverGetVersion, sim_device_driver_version, SIM_PURE, (int *version), (version))                                 \
    X(cudaRuntimeGetVersion, sim_runtime_version, SIM_PURE, (int *version), (version))                                      \
    X(cudaGetDriverEntryPoint, sim_runtime_entry_point, SIM_PURE,                                                           \
      (const char *symbol, void **function, unsigned long long flags, int *status), (symbol, function, flags, status))      \
    X(cudaGetDriverEntryPointByVersion, sim_runtime_entry_point_by_version, SIM_PURE,                                       \
      (const char *symbol, void **function, unsigned int version, unsigned long long flags, int *status),                   \
      (symbol, function, version, flags, status))                                                                           \
    X(cudaGetDeviceProperties, sim_device_properties_13, SIM_DEVICES, (sim_properties_13_t * properties, int device),       \
      (properties, device))                                                                                                 \
    X(cudaGetDeviceProperties_v2, sim_device_properties_12, SIM_DEVICES, (sim_properties_12_t * properties, int device),    \
      (properties, device))                                                                                                 \
    X(cudaDeviceGetAttribute, sim_device_attribute, SIM_DEVICES, (int *value, CUdevice_attribute attribute, int device),    \
      (value, attribute, device))                                                                                           \
    X(cudaDeviceGetPCIBusId, sim_device_bus_text, SIM_DEVICES, (char *text, int length, int device),                        \
      (text, length, device))                                                                                               \
    X(cudaDeviceGetStreamPriorityRange, sim_device_priority_range, SIM_RUNTIME, (int *least, int *greatest),                \
      (least, greatest))                                                                                                    \
    X(cudaDeviceDisablePeerAccess, sim_runtime_disable_peer, SIM_RUNTIME, (int peer), (peer))                               \
    X(cudaFuncGetAttributes, sim_function_attributes, SIM_RUNTIME,                                                          \
      (sim_function_attributes_t * attributes, const void *function), (attributes, function))                               \
    X(cudaFuncSetAttribute, sim_function_set_attribute, SIM_RUNTIME, (const void *function, int attribute, int value),      \
      (function, attribute, value))                                                                                         \
    X(cudaOccupancyMaxActiveBlocksPerMultiprocessor, sim_function_occupancy, SIM_RUNTIME,                                   \
      (int *blocks, const void *function, int threads, size_t shared_bytes), (blocks, function, threads, shared_bytes))     \
    X(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, sim_function_occupancy_flags, SIM_RUNTIME,                    \
      (int *blocks, const void *function, int threads, size_t shared_bytes, unsigned int flags),                            \
      (blocks, function, threads, shared_bytes, flags))                                                                     \
    X(cudaProfilerStart, sim_runtime_profiler, SIM_DEVICES, (void), ())                                                     \
    X(cudaProfilerStop, sim_runtime_profiler, SIM_DEVICES, (void), ())

#define SIM_RUNTIME_MEMORY_ENTRIES(X)                                                                                       \
    X(cudaMalloc, sim_runtime_malloc, SIM_RUNTIME | SIM_UNSAFE, (void **address, size_t bytes), (address, bytes))           \
    X(cudaFree, sim_runtime_free, SIM_RUNTIME | SIM_UNSAFE, (void *address), (address))                                     \
    X(cudaMallocHost, sim_runtime_malloc_host, SIM_RUNTIME | SIM_UNSAFE, (void **host, size_t bytes), (host, bytes))        \
    X(cudaFreeHost, sim_host_free, SIM_RUNTIME | SIM_UNSAFE, (void *host), (host))                                          \
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
    X(cudaHostAlloc, sim_host_allocate, SIM_RUNTIME | SIM_UNSAFE, (void **host, size_t bytes, unsigned int flags),          \
      (host, bytes, flags))                                                                                                 \
    X(cudaHostRegister, sim_host_register, SIM_RUNTIME | SIM_UNSAFE, (void *host, size_t bytes, unsigned int flags),        \
      (host, bytes, flags))                                                                                                 \
    X(cudaHostUnregister, sim_host_unregister, SIM_RUNTIME | SIM_UNSAFE, (void *host), (host))                              \
    X(cudaHostGetDevicePointer, sim_host_device_pointer, SIM_RUNTIME, (void **device, void *host, unsigned int flags),      \
      (device, host, flags))                                                                                                \
    X(cudaMemcpy2D, sim_runtime_copy_rows, SIM_RUNTIME,                                                                     \
      (void *destination, size_t destination_pitch, const void *source, size_t source_pitch, size_t width, size_t height,   \
       int kind),                                                                                                           \
      (destination, destination_pitch, source, source_pitch, width, height, kind))                                          \
    X(cudaMemcpy2DAsync, sim_runtime_copy_rows_async, SIM_RUNTIME,                                                          \
      (void *destination, size_t destination_pitch, const void *source, size_t source_pitch, size_t width, size_t height,   \
       int kind, CUstream stream),                                                                                          \
      (destination, destination_pitch, source, source_pitch, width, height, kind, stream))                                  \
    X(cudaMemcpyPeer, sim_runtime_copy_peer, SIM_RUNTIME,                                                                   \
      (void *destination, int to, const void *source, int from, size_t bytes), (destination, to, source, from, bytes))      \
    X(cudaMemcpyPeerAsync, sim_runtime_copy_peer_async, SIM_RUNTIME,                                                        \
      (void *destination, int to, const void *source, int from, size_t bytes, CUstream stream),                             \
      (destination, to, source, from, bytes, stream))                                                                       \
    X(cudaMemset2D, sim_runtime_set_rows, SIM_RUNTIME,                                                                      \
      (void *address, size_t pitch, int value, size_t width, size_t height), (address, pitch, value, width, height))        \
    X(cudaMemset2DAsync, sim_runtime_set_rows_async, SIM_RUNTIME,                                                           \
      (void *address, size_t pitch, int value, size_t width, size_t height, CUstream stream),                               \
      (address, pitch, value, width, height, stream))                                                                       \
    X(cudaIpcGetMemHandle, sim_runtime_ipc_memory_handle, SIM_RUNTIME | SIM_UNSAFE,                                         \
      (CUipcMemHandle * handle, void *address), (handle, address))                                                          \
    X(cudaIpcOpenMemHandle, sim_runtime_ipc_open_memory, SIM_RUNTIME | SIM_UNSAFE,                                          \
      (void **address, CUipcMemHandle handle, unsigned int flags), (address, handle, flags))                                \
    X(cudaIpcCloseMemHandle, sim_runtime_ipc_close_memory, SIM_RUNTIME | SIM_UNSAFE, (void *address), (address))

#define SIM_RUNTIME_STREAM_ENTRIES(X)                                                                                       \
    X(cudaStreamCreate, sim_runtime_stream_create, SIM_RUNTIME, (CUstream * stream), (stream))                              \
    X(cudaStreamCreateWithFlags, sim_stream_create, SIM_RUNTIME, (CUstream * stream, unsigned int flags), (stream, flags))  \
    X(cudaStreamDestroy, sim_stream_destroy, SIM_RUNTIME, (CUstream stream), (stream))                                      \
    X(cudaStreamSynchronize, sim_stream_synchronize, SIM_RUNTIME | SIM_UNSAFE, (CUstream stream), (stream))                 \
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
    X(cudaGraphLaunch, sim_graph_launch, SIM_RUNTIME, (CUgraphExec executable, CUstream stream), (executable, stream))      \
    X(cudaStreamCreateWithPriority, sim_stream_create_with_priority, SIM_RUNTIME,                                           \
      (CUstream * stream, unsigned int flags, int priority), (stream, flags, priority))                                     \
    X(cudaStreamQuery, sim_stream_query, SIM_RUNTIME | SIM_UNSAFE, (CUstream stream), (stream))                             \
    X(cudaStreamWaitEvent, sim_event_wait, SIM_RUNTIME, (CUstream stream, CUevent event, unsigned int flags),               \
      (stream, event, flags))                                                                                               \
    X(cudaStreamGetPriority, sim_stream_priority, SIM_RUNTIME, (CUstream stream, int *priority), (stream, priority))        \
    X(cudaStreamGetFlags, sim_stream_flags, SIM_RUNTIME, (CUstream stream, unsigned int *flags), (stream, flags))           \
    X(cudaStreamGetId, sim_stream_identifier, SIM_RUNTIME, (CUstream stream, unsigned long long *id), (stream, id))         \
    X(cudaStreamGetDevice, sim_stream_device, SIM_RUNTIME, (CUstream stream, int *device), (stream, device))                \
    X(cudaStreamAddCallback, sim_stream_add_callback, SIM_RUNTIME,                                                          \
      (CUstream stream, sim_stream_callback_t * callback, void *argument, unsigned int flags),                              \
      (stream, callback, argument, flags))                                                                                  \
    X(cudaLaunchHostFunc, sim_stream_host_function, SIM_RUNTIME,                                                            \
      (CUstream stream, sim_host_function_t * function, void *argument), (stream, function, argument))                      \
    X(cudaEventCreate, sim_runtime_event_create, SIM_RUNTIME, (CUevent * event), (event))                                   \
    X(cudaEventCreateWithFlags, sim_event_create, SIM_RUNTIME, (CUevent * event, unsigned int flags), (event, flags))       \
    X(cudaEventDestroy, sim_event_destroy, SIM_RUNTIME, (CUevent event), (event))                                           \
    X(cudaEventRecord, sim_event_record, SIM_RUNTIME, (CUevent event, CUstream stream), (event, stream))                    \
    X(cudaEventRecordWithFlags, sim_event_record_with_flags, SIM_RUNTIME,                                                   \
      (CUevent event, CUstream stream, unsigned int flags), (event, stream, flags))                                         \
    X(cudaEventQuery, sim_event_query, SIM_RUNTIME, (CUevent event), (event))                                               \
    X(cudaEventSynchronize, sim_event_synchronize, SIM_RUNTIME, (CUevent event), (event))                                   \
    X(cudaEventElapsedTime, sim_event_elapsed, SIM_RUNTIME, (float *milliseconds, CUevent first, CUevent last),             \
      (milliseconds, first, last))                                                                                          \
    X(cudaIpcGetEventHandle, sim_ipc_event_handle, SIM_RUNTIME, (CUipcEventHandle * handle, CUevent event),                 \
      (handle, event))                                                                                                      \
    X(cudaIpcOpenEventHandle, sim_ipc_open_event, SIM_RUNTIME, (CUevent * event, CUipcEventHandle handle), (event, handle)) \
    X(cudaStreamGetCaptureInfo, sim_capture_info, SIM_RUNTIME,                                                              \
      (CUstream stream, CUstreamCaptureStatus * status, cuuint64_t * id, CUgraph * graph, const CUgraphNode **dependencies, \
       const void **edges, size_t *count),                                                                                  \
      (stream, status, id, graph, dependencies, edges, count))                                                              \
    X(cudaStreamGetCaptureInfo_v2, sim_capture_info_2, SIM_RUNTIME,                                                         \
      (CUstream stream, CUstreamCaptureStatus * status, cuuint64_t * id, CUgraph * graph, const CUgraphNode **dependencies, \
       size_t *count),                                                                                                      \
      (stream, status, id, graph, dependencies, count))                                                                     \
    X(cudaStreamGetCaptureInfo_v3, sim_capture_info, SIM_RUNTIME,                                                           \
      (CUstream stream, CUstreamCaptureStatus * status, cuuint64_t * id, CUgraph * graph, const CUgraphNode **dependencies, \
       const void **edges, size_t *count),                                                                                  \
      (stream, status, id, graph, dependencies, edges, count))                                                              \
    X(cudaStreamUpdateCaptureDependencies, sim_runtime_capture_update, SIM_RUNTIME,                                         \
      (CUstream stream, CUgraphNode * nodes, const void *edges, size_t count, unsigned int flags),                          \
      (stream, nodes, edges, count, flags))                                                                                 \
    X(cudaStreamUpdateCaptureDependencies_v2, sim_capture_update, SIM_RUNTIME,                                              \
      (CUstream stream, CUgraphNode * nodes, const void *edges, size_t count, unsigned int flags),                          \
      (stream, nodes, edges, count, flags))                                                                                 \
    X(cudaGraphInstantiateWithFlags, sim_graph_instantiate, SIM_RUNTIME,                                                    \
      (CUgraphExec * executable, CUgraph graph, unsigned long long flags), (executable, graph, flags))                      \
    X(cudaGraphUpload, sim_graph_upload, SIM_RUNTIME, (CUgraphExec executable, CUstream stream), (executable, stream))      \
    X(cudaGraphGetNodes, sim_graph_nodes, SIM_DEVICES, (CUgraph graph, CUgraphNode * nodes, size_t *count),                 \
      (graph, nodes, count))                                                                                                \
    X(cudaGraphNodeGetDependencies, sim_graph_dependencies, SIM_DEVICES,                                                    \
      (CUgraphNode node, CUgraphNode * nodes, void *edges, size_t *count), (node, nodes, edges, count))                     \
    X(cudaGraphDebugDotPrint, sim_graph_print, SIM_DEVICES, (CUgraph graph, const char *path, unsigned int flags),          \
      (graph, path, flags))

#define SIM_RUNTIME_ENTRIES(X)                                                                                              \
    SIM_RUNTIME_DEVICE_ENTRIES(X)                                                                                           \
    SIM_RUNTIME_MEMORY_ENTRIES(X)                                                                                           \
    SIM_RUNTIME_STREAM_ENTRIES(X)

#endif
