/* Devices: how many there are and what they say of themselves. */
#include <stdio.h>
#include <string.h>

#include "sim_modules.h"

enum { WARP_SIZE = 32, MULTIPROCESSORS = 132, COMPUTE_MAJOR = 9, COPY_ENGINES = 3, FIRST_BUS = 0x10 };

CUresult sim_device_init(unsigned int flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (sim_state.device_count == 0) return CUDA_ERROR_NO_DEVICE;
    sim_state.initialized = true;
    return CUDA_SUCCESS;
}

CUresult sim_device_driver_version(int *version) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = TMS_SIM_DRIVER_VERSION;
    return CUDA_SUCCESS;
}

bool sim_device_valid(int device) { return device >= 0 && device < sim_state.device_count; }

CUresult sim_device_count(int *count) {
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = sim_state.device_count;
    return CUDA_SUCCESS;
}

CUresult sim_device_get(CUdevice *device, int ordinal) {
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult sim_device_name(char *name, int length, CUdevice device) {
    if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "Simulated GPU");
    return CUDA_SUCCESS;
}

CUresult sim_device_total_memory(size_t *bytes, CUdevice device) {
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = sim_budget_total();
    return CUDA_SUCCESS;
}

CUresult sim_device_attribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = COMPUTE_MAJOR; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = WARP_SIZE; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = COPY_ENGINES; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = FIRST_BUS + device; break;
    default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

CUresult sim_device_can_access_peer(int *can, CUdevice device, CUdevice peer) {
    if (!can) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device) || !sim_device_valid(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = sim_state.peer_capable && device != peer;
    return CUDA_SUCCESS;
}

CUresult sim_device_memory_info(size_t *available, size_t *total) {
    sim_context_t *context = sim_context_current();
    if (!available || !total) return CUDA_ERROR_INVALID_VALUE;
    *available = sim_budget_available(context->device);
    *total = sim_budget_total();
    return CUDA_SUCCESS;
}
