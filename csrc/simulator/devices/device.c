#include "simulator/devices/device.h"

#include <stdio.h>

#include "simulator/base/state.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/entries.h"
#include "simulator/simulator.h"

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

CUresult sim_device_can_access_peer(int *can, CUdevice device, CUdevice peer) {
    if (!can) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device) || !sim_device_valid(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = sim_state.peer_capable && device != peer;
    return CUDA_SUCCESS;
}
