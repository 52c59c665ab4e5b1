#include "simulator/devices/device.h"

#include <stdio.h>
#include <string.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/simulation.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/entries.h"
#include "simulator/devices/visible.h"
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

enum { BUS_TEXT_BYTES = 13, LEAST_PRIORITY = 0 };

typedef struct attribute {
    int attribute;
    int value;
} attribute_t;

static const attribute_t attributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, INT32_MAX},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, UINT16_MAX},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, UINT16_MAX},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 64 << 10},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, INT32_MAX},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 64 << 10},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},
    {CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, 32 << 20},
    {CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE, 128 << 20},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 64 << 10},
    {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1 << 10},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
};

int sim_device_value(int wanted, int device) {
    if (wanted == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) return SIM_FIRST_BUS + sim_state.visible[device];
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        if (attributes[i].attribute == wanted) return attributes[i].value;
    }
    return 0;
}

CUresult sim_device_attribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *value = sim_device_value((int)attribute, device);
    return CUDA_SUCCESS;
}

CUresult sim_device_uuid(CUuuid *uuid, CUdevice device) {
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    sim_visible_uuid(sim_state.visible[device], (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult sim_device_bus_text(char *text, int length, int device) {
    if (!text || length < BUS_TEXT_BYTES) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, (size_t)length, "0000:%02X:00.0", (unsigned)(SIM_FIRST_BUS + sim_state.visible[device]));
    return CUDA_SUCCESS;
}

CUresult sim_device_priority_range(int *least, int *greatest) {
    if (least) *least = LEAST_PRIORITY;
    if (greatest) *greatest = SIM_GREATEST_PRIORITY;
    return CUDA_SUCCESS;
}

#define REPEAT_ATTRIBUTE(type, name, attribute)                                                                             \
    if ((attribute) != 0) properties->name = (type)sim_device_value((attribute), device);
#define NO_ATTRIBUTE(type, name, attribute)
#define NO_ARRAY(type, name, count)

/* Fields that both versions of the structure have and that are no device attribute. */
#define FILL_COMMON()                                                                                                       \
    do {                                                                                                                    \
        CUuuid uuid;                                                                                                        \
        sim_device_name(properties->name, (int)sizeof properties->name, device);                                            \
        sim_device_uuid(&uuid, device);                                                                                     \
        memcpy(properties->uuid, uuid.bytes, sizeof properties->uuid);                                                      \
        properties->total_memory = sim_budget_total();                                                                      \
        for (int axis = 0; axis < 3; axis++) {                                                                              \
            properties->block_dimensions[axis] = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + axis, device);      \
            properties->grid_dimensions[axis] = sim_device_value(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + axis, device);        \
        }                                                                                                                   \
    } while (0)

CUresult sim_device_properties_12(sim_properties_12_t *properties, int device) {
    if (!properties) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    *properties = (sim_properties_12_t){0};
    SIM_PROPERTY_FIELDS(REPEAT_ATTRIBUTE, NO_ARRAY, REPEAT_ATTRIBUTE, NO_ARRAY, NO_ATTRIBUTE, NO_ARRAY)
    FILL_COMMON();
    return CUDA_SUCCESS;
}

CUresult sim_device_properties_13(sim_properties_13_t *properties, int device) {
    if (!properties) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    *properties = (sim_properties_13_t){0};
    SIM_PROPERTY_FIELDS(REPEAT_ATTRIBUTE, NO_ARRAY, NO_ATTRIBUTE, NO_ARRAY, REPEAT_ATTRIBUTE, NO_ARRAY)
    FILL_COMMON();
    return CUDA_SUCCESS;
}
