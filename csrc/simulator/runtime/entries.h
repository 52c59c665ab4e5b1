/* Entry points of the runtime: its current device, copies and kernels; and the driver's modules. In the format of
 * base/entry_list.h. Implemented in runtime.c, copies.c, kernels.c and modules.c. */
#ifndef TMS_SIM_RUNTIME_ENTRIES_H
#define TMS_SIM_RUNTIME_ENTRIES_H

#include "simulator/base/entry_list.h"

#define SIM_LAUNCH_PARAMETERS                                                                                               \
    (const void *function, sim_dim3_t grid, sim_dim3_t block, void **arguments, size_t shared_bytes, CUstream stream)
#define SIM_LAUNCH_ARGUMENTS (function, grid, block, arguments, shared_bytes, stream)

/* __cudaLaunchKernel takes the result of __cudaGetKernel, which is the same address here. Names with _ptsz belong to
 * programs built with per-thread default streams; they pass explicit streams. Functions that register kernels are in
 * registry.c, because they run before any state exists. */
#define SIM_RUNTIME_RUNTIME_ENTRIES(X)                                                                                      \
    X(cudaGetDeviceCount, sim_device_count, SIM_DEVICES | SIM_FORKED, (int *count), (count))                                \
    X(cudaGetDevice, sim_runtime_get_device, SIM_DEVICES, (int *device), (device))                                          \
    X(cudaSetDevice, sim_runtime_set_device, SIM_DEVICES, (int device), (device))                                           \
    X(cudaDeviceReset, sim_runtime_device_reset, SIM_DEVICES, (void), ())                                                   \
    X(cudaDeviceEnablePeerAccess, sim_runtime_enable_peer, SIM_RUNTIME, (int peer, unsigned int flags), (peer, flags))      \
    X(cudaRuntimeGetVersion, sim_device_driver_version, SIM_PURE, (int *version), (version))                                \
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
    X(cudaProfilerStop, sim_runtime_profiler, SIM_DEVICES, (void), ())                                                      \
    X(cudaMalloc, sim_runtime_malloc, SIM_RUNTIME | SIM_UNSAFE, (void **address, size_t bytes), (address, bytes))           \
    X(cudaFree, sim_runtime_free, SIM_RUNTIME | SIM_UNSAFE, (void *address), (address))                                     \
    X(cudaMallocHost, sim_runtime_malloc_host, SIM_RUNTIME | SIM_UNSAFE, (void **host, size_t bytes), (host, bytes))        \
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
    X(cudaStreamCreate, sim_runtime_stream_create, SIM_RUNTIME, (CUstream * stream), (stream))                              \
    X(cudaEventCreate, sim_runtime_event_create, SIM_RUNTIME, (CUevent * event), (event))                                   \
    X(__cudaGetKernel, sim_kernel_get, SIM_DEVICES, (const void **kernel, const void *function), (kernel, function))        \
    X(__cudaLaunchKernel, sim_kernel_launch, SIM_RUNTIME, SIM_LAUNCH_PARAMETERS, SIM_LAUNCH_ARGUMENTS)                      \
    X(__cudaLaunchKernel_ptsz, sim_kernel_launch, SIM_RUNTIME, SIM_LAUNCH_PARAMETERS, SIM_LAUNCH_ARGUMENTS)                 \
    X(cudaLaunchKernel, sim_kernel_launch, SIM_RUNTIME, SIM_LAUNCH_PARAMETERS, SIM_LAUNCH_ARGUMENTS)                        \
    X(cudaLaunchKernel_ptsz, sim_kernel_launch, SIM_RUNTIME, SIM_LAUNCH_PARAMETERS, SIM_LAUNCH_ARGUMENTS)                   \
    X(cudaLaunchCooperativeKernel, sim_kernel_launch, SIM_RUNTIME, SIM_LAUNCH_PARAMETERS, SIM_LAUNCH_ARGUMENTS)             \
    X(cudaLaunchCooperativeKernel_ptsz, sim_kernel_launch, SIM_RUNTIME, SIM_LAUNCH_PARAMETERS, SIM_LAUNCH_ARGUMENTS)        \
    X(cudaLaunchKernelExC, sim_kernel_launch_configured, SIM_RUNTIME,                                                       \
      (const sim_launch_config_t *config, const void *function, void **arguments), (config, function, arguments))           \
    X(cudaLaunchKernelExC_ptsz, sim_kernel_launch_configured, SIM_RUNTIME,                                                  \
      (const sim_launch_config_t *config, const void *function, void **arguments), (config, function, arguments))

#define SIM_RUNTIME_DRIVER_ENTRIES(X)                                                                                       \
    X(cuModuleLoadData, sim_module_load, SIM_CONTEXT | SIM_UNSAFE, (CUmodule * module, const void *image), (module, image)) \
    X(cuModuleUnload, sim_module_unload, SIM_CONTEXT | SIM_UNSAFE, (CUmodule module), (module))                             \
    X(cuModuleGetFunction, sim_module_function, SIM_CONTEXT, (CUfunction * function, CUmodule module, const char *name),    \
      (function, module, name))                                                                                             \
    X(cuModuleGetGlobal_v2, sim_module_global, SIM_CONTEXT,                                                                 \
      (CUdeviceptr * address, size_t *bytes, CUmodule module, const char *name), (address, bytes, module, name))            \
    X(cuLaunchKernel, sim_module_launch, SIM_CONTEXT,                                                                       \
      (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,            \
       unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters,           \
       void **extra),                                                                                                       \
      (function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters, extra))

SIM_RUNTIME_DRIVER_ENTRIES(SIM_DECLARE_ENTRY)
SIM_RUNTIME_RUNTIME_ENTRIES(SIM_DECLARE_ENTRY)

#endif
