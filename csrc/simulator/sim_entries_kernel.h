/* The entry points that launch kernels, in the form of sim_entries.h. Those that register kernels are in kernel_registry.c:
 * they come before there is any state. */
#ifndef TMS_SIM_ENTRIES_KERNEL_H
#define TMS_SIM_ENTRIES_KERNEL_H

#include <cuda.h>
#include <stddef.h>

/* dim3 and cudaLaunchConfig_t, from the documentation. */
typedef struct sim_dim3 {
    unsigned int x, y, z;
} sim_dim3_t;

typedef struct sim_launch_config {
    sim_dim3_t grid, block;
    size_t shared_bytes;
    CUstream stream;
    void *attributes;
    unsigned int attribute_count;
} sim_launch_config_t;

#define SIM_LAUNCH_PARAMETERS                                                                                               \
    (const void *function, sim_dim3_t grid, sim_dim3_t block, void **arguments, size_t shared_bytes, CUstream stream)
#define SIM_LAUNCH_ARGUMENTS (function, grid, block, arguments, shared_bytes, stream)

/* __cudaLaunchKernel takes what __cudaGetKernel gave, which is the same address here. The names with _ptsz are those of
 * programs built for a default stream in each thread; their streams are passed on as they are. */
#define SIM_KERNEL_ENTRIES(X)                                                                                               \
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

#endif
