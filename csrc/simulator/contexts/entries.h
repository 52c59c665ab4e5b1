/* Entry points that destroy contexts or allocate memory in them, in the format of base/entry_list.h. Implemented in
 * lifetime.c, device_memory.c and host_memory.c. */
#ifndef TMS_SIM_CONTEXTS_ENTRIES_H
#define TMS_SIM_CONTEXTS_ENTRIES_H

#include "simulator/base/entry_list.h"

#define SIM_CONTEXTS_DRIVER_ENTRIES(X)                                                                                      \
    X(cuDevicePrimaryCtxRelease_v2, sim_context_primary_release, SIM_INIT, (CUdevice device), (device))                     \
    X(cuDevicePrimaryCtxReset_v2, sim_context_primary_reset, SIM_INIT, (CUdevice device), (device))                         \
    X(cuCtxDestroy_v2, sim_context_destroy_created, SIM_INIT, (CUcontext context), (context))                               \
    X(cuCtxSynchronize, sim_context_synchronize, SIM_CONTEXT, (void), ())                                                   \
    X(cuMemGetInfo_v2, sim_device_memory_info, SIM_CONTEXT, (size_t *available, size_t *total), (available, total))         \
    X(cuMemAlloc_v2, sim_device_memory_allocate, SIM_CONTEXT | SIM_UNSAFE, (CUdeviceptr * address, size_t bytes),           \
      (address, bytes))                                                                                                     \
    X(cuMemFree_v2, sim_device_memory_free, SIM_FREEING | SIM_UNSAFE, (CUdeviceptr address), (address))                     \
    X(cuMemHostAlloc, sim_host_allocate, SIM_CONTEXT | SIM_UNSAFE, (void **host, size_t bytes, unsigned int flags),         \
      (host, bytes, flags))                                                                                                 \
    X(cuMemFreeHost, sim_host_free, SIM_FREEING | SIM_UNSAFE, (void *host), (host))                                         \
    X(cuMemHostRegister_v2, sim_host_register, SIM_CONTEXT | SIM_UNSAFE, (void *host, size_t bytes, unsigned int flags),    \
      (host, bytes, flags))                                                                                                 \
    X(cuMemHostUnregister, sim_host_unregister, SIM_FREEING | SIM_UNSAFE, (void *host), (host))                             \
    X(cuMemHostGetDevicePointer_v2, sim_host_device_address, SIM_CONTEXT,                                                   \
      (CUdeviceptr * device, void *host, unsigned int flags), (device, host, flags))                                        \
    X(cuMemHostGetFlags, sim_host_flags, SIM_CONTEXT, (unsigned int *flags, void *host), (flags, host))                     \
    X(cuPointerGetAttribute, sim_pointer_attribute, SIM_HEALTHY,                                                            \
      (void *data, CUpointer_attribute attribute, CUdeviceptr address), (data, attribute, address))                         \
    X(cuIpcGetMemHandle, sim_ipc_memory_handle, SIM_CONTEXT | SIM_UNSAFE, (CUipcMemHandle * handle, CUdeviceptr address),   \
      (handle, address))                                                                                                    \
    X(cuIpcOpenMemHandle_v2, sim_ipc_open_memory, SIM_CONTEXT | SIM_UNSAFE,                                                 \
      (CUdeviceptr * address, CUipcMemHandle handle, unsigned int flags), (address, handle, flags))                         \
    X(cuIpcCloseMemHandle, sim_ipc_close_memory, SIM_CONTEXT | SIM_UNSAFE, (CUdeviceptr address), (address))                \
    X(cuMemGetAddressRange_v2, sim_device_memory_range, SIM_CONTEXT,                                                        \
      (CUdeviceptr * start, size_t *bytes, CUdeviceptr address), (start, bytes, address))

#define SIM_CONTEXTS_RUNTIME_ENTRIES(X)                                                                                     \
    X(cudaDeviceSynchronize, sim_context_synchronize, SIM_RUNTIME, (void), ())                                              \
    X(cudaFreeHost, sim_host_free, SIM_RUNTIME | SIM_UNSAFE, (void *host), (host))                                          \
    X(cudaMemGetInfo, sim_device_memory_info, SIM_RUNTIME, (size_t *available, size_t *total), (available, total))          \
    X(cudaHostAlloc, sim_host_allocate, SIM_RUNTIME | SIM_UNSAFE, (void **host, size_t bytes, unsigned int flags),          \
      (host, bytes, flags))                                                                                                 \
    X(cudaHostRegister, sim_host_register, SIM_RUNTIME | SIM_UNSAFE, (void *host, size_t bytes, unsigned int flags),        \
      (host, bytes, flags))                                                                                                 \
    X(cudaHostUnregister, sim_host_unregister, SIM_RUNTIME | SIM_UNSAFE, (void *host), (host))                              \
    X(cudaHostGetDevicePointer, sim_host_device_pointer, SIM_RUNTIME, (void **device, void *host, unsigned int flags),      \
      (device, host, flags))                                                                                                \
    X(cudaHostGetFlags, sim_host_flags, SIM_RUNTIME, (unsigned int *flags, void *host), (flags, host))                      \
    X(cudaIpcGetMemHandle, sim_runtime_ipc_memory_handle, SIM_RUNTIME | SIM_UNSAFE,                                         \
      (CUipcMemHandle * handle, void *address), (handle, address))                                                          \
    X(cudaIpcOpenMemHandle, sim_runtime_ipc_open_memory, SIM_RUNTIME | SIM_UNSAFE,                                          \
      (void **address, CUipcMemHandle handle, unsigned int flags), (address, handle, flags))                                \
    X(cudaIpcCloseMemHandle, sim_runtime_ipc_close_memory, SIM_RUNTIME | SIM_UNSAFE, (void *address), (address))

SIM_CONTEXTS_DRIVER_ENTRIES(SIM_DECLARE_ENTRY)
SIM_CONTEXTS_RUNTIME_ENTRIES(SIM_DECLARE_ENTRY)

#endif
