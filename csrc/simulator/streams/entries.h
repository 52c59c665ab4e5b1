/* Entry points of streams, events and copies, in the format of base/entry_list.h. Implemented in stream.c,
 * copy.c and event_calls.c. */
#ifndef TMS_SIM_STREAMS_ENTRIES_H
#define TMS_SIM_STREAMS_ENTRIES_H

#include "simulator/base/entry_list.h"

#define SIM_STREAMS_DRIVER_ENTRIES(X)                                                                                       \
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
    X(cuStreamWriteValue32_v2, sim_copy_write_word, SIM_CONTEXT,                                                            \
      (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags), (stream, address, value, flags))

#define SIM_STREAMS_RUNTIME_ENTRIES(X)                                                                                      \
    X(cudaStreamCreateWithFlags, sim_stream_create, SIM_RUNTIME, (CUstream * stream, unsigned int flags), (stream, flags))  \
    X(cudaStreamDestroy, sim_stream_destroy, SIM_RUNTIME, (CUstream stream), (stream))                                      \
    X(cudaStreamSynchronize, sim_stream_synchronize, SIM_RUNTIME | SIM_UNSAFE, (CUstream stream), (stream))                 \
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
    X(cudaIpcOpenEventHandle, sim_ipc_open_event, SIM_RUNTIME, (CUevent * event, CUipcEventHandle handle), (event, handle))

SIM_STREAMS_DRIVER_ENTRIES(SIM_DECLARE_ENTRY)
SIM_STREAMS_RUNTIME_ENTRIES(SIM_DECLARE_ENTRY)

#endif
