/* Attributes of kernels, and how many blocks fit on a multiprocessor. */
#include "simulator/base/runtime_types.h"
#include "simulator/devices/attributes.h"
#include "simulator/kernels/kernel.h"
#include "simulator/runtime/entries.h"

/* All kernels report the same moderate resource usage. */
CUresult sim_function_attributes(sim_function_attributes_t *to, const void *function) {
    enum { REGISTERS = 32, VERSION = 90 };
    if (!to) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_kernel_registered(function)) return (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
    *to = (sim_function_attributes_t){
        .max_threads_per_block = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 0),
        .registers = REGISTERS,
        .ptx_version = VERSION,
        .binary_version = VERSION,
        .max_dynamic_shared_bytes = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 0),
        .preferred_carveout = -1,
    };
    return CUDA_SUCCESS;
}

CUresult sim_function_set_attribute(const void *function, int attribute, int value) {
    (void)attribute;
    (void)value;
    return sim_kernel_registered(function) ? CUDA_SUCCESS : (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
}

CUresult sim_function_occupancy(int *blocks, const void *function, int threads, size_t shared_bytes) {
    int most = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 0);
    int room = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 0);
    size_t shared = (size_t)sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 0);
    if (!blocks || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_kernel_registered(function)) return (CUresult)SIM_ERROR_INVALID_DEVICE_FUNCTION;
    *blocks = room / threads < most ? room / threads : most;
    if (shared_bytes && shared / shared_bytes < (size_t)*blocks) *blocks = (int)(shared / shared_bytes);
    return CUDA_SUCCESS;
}

CUresult sim_function_occupancy_flags(int *blocks, const void *function, int threads, size_t shared_bytes,
                                      unsigned int flags) {
    (void)flags;
    return sim_function_occupancy(blocks, function, threads, shared_bytes);
}
