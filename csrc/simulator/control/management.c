/* The part of NVML that frameworks use: the devices of the machine, regardless of CUDA_VISIBLE_DEVICES, and the processes
 * that use them. It does not initialise the simulator, because a process may still fork after it has used only
 * NVML. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "simulator/base/simulation.h"
#include "simulator/control/environment.h"
#include "simulator/devices/budget.h"
#include "simulator/devices/device.h"
#include "simulator/devices/visible.h"
#include "simulator/simulator.h"

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
};

/* A machine index plus one. */
typedef void *nvml_device_t;

/* nvmlProcessInfo_v1_t, and nvmlProcessInfo_t, which versions 2 and 3 of the function fill. */
typedef struct nvml_process_v1 {
    unsigned pid;
    unsigned long long used_bytes;
} nvml_process_v1_t;
typedef struct nvml_process {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance; /* without MIG: all ones */
} nvml_process_t;

/* nvmlMemory_t */
typedef struct nvml_memory {
    unsigned long long total_bytes, free_bytes, used_bytes;
} nvml_memory_t;

/* nvmlUtilization_t: per cent of the time */
typedef struct nvml_utilization {
    unsigned gpu, memory;
} nvml_utilization_t;

static unsigned machine_devices(void) { return (unsigned)sim_environment_devices(); }

static int machine_index_of(nvml_device_t device) { return (int)(uintptr_t)device - 1; }

static bool is_device(nvml_device_t device) { return device && (uintptr_t)device <= machine_devices(); }

static int find(unsigned machine_index, nvml_device_t *device) {
    if (!device) return NVML_ERROR_INVALID_ARGUMENT;
    if (machine_index >= machine_devices()) return NVML_ERROR_NOT_FOUND;
    *device = (nvml_device_t)(uintptr_t)(machine_index + 1);
    return NVML_SUCCESS;
}

static int write_text(const char *from, char *text, unsigned length) {
    if (!text) return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(from) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(text, from, strlen(from) + 1);
    return NVML_SUCCESS;
}

/* Some functions have a later version with the same behaviour. */
TMS_SIM_EXPORT int nvmlInit(void);
TMS_SIM_EXPORT int nvmlInit_v2(void) __attribute__((alias("nvmlInit")));
TMS_SIM_EXPORT int nvmlInitWithFlags(unsigned flags);
TMS_SIM_EXPORT int nvmlShutdown(void);
TMS_SIM_EXPORT int nvmlSystemGetCudaDriverVersion(int *version);
TMS_SIM_EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) __attribute__((alias("nvmlSystemGetCudaDriverVersion")));
TMS_SIM_EXPORT int nvmlDeviceGetCount(unsigned *count);
TMS_SIM_EXPORT int nvmlDeviceGetCount_v2(unsigned *count) __attribute__((alias("nvmlDeviceGetCount")));
TMS_SIM_EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, nvml_device_t *device);
TMS_SIM_EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvml_device_t *device)
    __attribute__((alias("nvmlDeviceGetHandleByIndex")));
TMS_SIM_EXPORT int nvmlDeviceGetHandleByPciBusId(const char *text, nvml_device_t *device);
TMS_SIM_EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvml_device_t *device)
    __attribute__((alias("nvmlDeviceGetHandleByPciBusId")));
TMS_SIM_EXPORT int nvmlDeviceGetUUID(nvml_device_t device, char *text, unsigned length);
TMS_SIM_EXPORT int nvmlDeviceGetName(nvml_device_t device, char *text, unsigned length);
TMS_SIM_EXPORT int nvmlDeviceGetComputeRunningProcesses(nvml_device_t device, unsigned *count, nvml_process_v1_t *processes);
TMS_SIM_EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(nvml_device_t device, unsigned *count, nvml_process_t *processes);
TMS_SIM_EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(nvml_device_t device, unsigned *count, nvml_process_t *processes)
    __attribute__((alias("nvmlDeviceGetComputeRunningProcesses_v2")));
TMS_SIM_EXPORT int nvmlDeviceGetMemoryInfo(nvml_device_t device, nvml_memory_t *memory);
TMS_SIM_EXPORT int nvmlDeviceGetClockInfo(nvml_device_t device, int type, unsigned *megahertz);
TMS_SIM_EXPORT int nvmlDeviceGetMaxClockInfo(nvml_device_t device, int type, unsigned *megahertz)
    __attribute__((alias("nvmlDeviceGetClockInfo")));
TMS_SIM_EXPORT int nvmlDeviceGetPowerUsage(nvml_device_t device, unsigned *milliwatts);
TMS_SIM_EXPORT int nvmlDeviceGetTemperature(nvml_device_t device, int sensor, unsigned *celsius);
TMS_SIM_EXPORT int nvmlDeviceGetUtilizationRates(nvml_device_t device, nvml_utilization_t *rates);
TMS_SIM_EXPORT int nvmlDeviceGetHandleByUUID(const char *text, nvml_device_t *device);
TMS_SIM_EXPORT int nvmlDeviceGetGpuFabricInfoV(nvml_device_t device, void *information);
TMS_SIM_EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(nvml_device_t device, unsigned link, int *type);
TMS_SIM_EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvml_device_t device, unsigned link, void *information);
TMS_SIM_EXPORT const char *nvmlErrorString(int result);

int nvmlInit(void) { return NVML_SUCCESS; }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return NVML_SUCCESS;
}

int nvmlShutdown(void) { return NVML_SUCCESS; }

int nvmlSystemGetCudaDriverVersion(int *version) {
    if (!version) return NVML_ERROR_INVALID_ARGUMENT;
    *version = TMS_SIM_DRIVER_VERSION;
    return NVML_SUCCESS;
}

int nvmlDeviceGetCount(unsigned *count) {
    if (!count) return NVML_ERROR_INVALID_ARGUMENT;
    *count = machine_devices();
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByIndex(unsigned index, nvml_device_t *device) {
    int result = find(index, device);
    return result == NVML_ERROR_NOT_FOUND ? NVML_ERROR_INVALID_ARGUMENT : result;
}

int nvmlDeviceGetHandleByPciBusId(const char *text, nvml_device_t *device) {
    unsigned domain = 0, bus = 0;
    if (!text || sscanf(text, "%x:%x:", &domain, &bus) != 2) return NVML_ERROR_INVALID_ARGUMENT;
    return domain == 0 && bus >= SIM_FIRST_BUS ? find(bus - SIM_FIRST_BUS, device) : NVML_ERROR_NOT_FOUND;
}

int nvmlDeviceGetUUID(nvml_device_t device, char *text, unsigned length) {
    char uuid[SIM_UUID_TEXT_BYTES];
    if (!is_device(device)) return NVML_ERROR_INVALID_ARGUMENT;
    sim_visible_uuid_text(machine_index_of(device), uuid);
    return write_text(uuid, text, length);
}

int nvmlDeviceGetName(nvml_device_t device, char *text, unsigned length) {
    return is_device(device) ? write_text("Simulated GPU", text, length) : NVML_ERROR_INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *text, nvml_device_t *device) {
    char uuid[SIM_UUID_TEXT_BYTES];
    if (!text) return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned index = 0; index < machine_devices(); index++) {
        sim_visible_uuid_text((int)index, uuid);
        if (strcmp(uuid, text) == 0) return find(index, device);
    }
    return NVML_ERROR_NOT_FOUND;
}

/* The processes with a context on the device, which itself takes no memory here, and those that hold memory without one.
 * `capacity` is the length of the program's array, and becomes the number of processes. */
static int list_processes(nvml_device_t device, unsigned *capacity, const void *array, sim_budget_process_t *rows) {
    char name[SIM_NAME_BYTES];
    if (!is_device(device) || !capacity) return NVML_ERROR_INVALID_ARGUMENT;
    unsigned room = *capacity;
    if (room && !array) return NVML_ERROR_INVALID_ARGUMENT;
    sim_environment_shared_name(name, sizeof name);
    *capacity = sim_budget_processes(name, machine_index_of(device), rows);
    return *capacity <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

int nvmlDeviceGetComputeRunningProcesses(nvml_device_t device, unsigned *count, nvml_process_v1_t *processes) {
    sim_budget_process_t rows[SIM_BUDGET_PROCESSES];
    int result = list_processes(device, count, processes, rows);
    if (result != NVML_SUCCESS) return result;
    for (unsigned i = 0; i < *count; i++) processes[i] = (nvml_process_v1_t){(unsigned)rows[i].pid, rows[i].bytes};
    return NVML_SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(nvml_device_t device, unsigned *count, nvml_process_t *processes) {
    sim_budget_process_t rows[SIM_BUDGET_PROCESSES];
    int result = list_processes(device, count, processes, rows);
    if (result != NVML_SUCCESS) return result;
    for (unsigned i = 0; i < *count; i++) {
        processes[i] = (nvml_process_t){(unsigned)rows[i].pid, rows[i].bytes, UINT32_MAX, UINT32_MAX};
    }
    return NVML_SUCCESS;
}

/* A simulated driver takes no memory itself, so the used memory is the memory that processes hold. */
int nvmlDeviceGetMemoryInfo(nvml_device_t device, nvml_memory_t *memory) {
    sim_budget_process_t rows[SIM_BUDGET_PROCESSES] = {0};
    unsigned count = SIM_BUDGET_PROCESSES;
    unsigned long long used = 0;
    if (!memory) return NVML_ERROR_INVALID_ARGUMENT;
    int result = list_processes(device, &count, rows, rows);
    if (result != NVML_SUCCESS) return result;
    for (unsigned i = 0; i < count; i++) used += rows[i].bytes;
    const unsigned long long total = sim_environment_memory();
    *memory = (nvml_memory_t){.total_bytes = total, .free_bytes = used < total ? total - used : 0, .used_bytes = used};
    return NVML_SUCCESS;
}

/* Clocks, power, temperature and utilisation are constants, as of a device that is idle at its full clock rate. */
int nvmlDeviceGetClockInfo(nvml_device_t device, int type, unsigned *megahertz) {
    enum { GRAPHICS, SM, MEMORY, VIDEO, KILO = 1000 };
    if (!is_device(device) || type < GRAPHICS || type > VIDEO || !megahertz) return NVML_ERROR_INVALID_ARGUMENT;
    int attribute = type == MEMORY ? CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE : CU_DEVICE_ATTRIBUTE_CLOCK_RATE;
    *megahertz = (unsigned)sim_device_value(attribute, 0) / KILO;
    return NVML_SUCCESS;
}

int nvmlDeviceGetPowerUsage(nvml_device_t device, unsigned *milliwatts) {
    enum { IDLE = 70000 };
    if (!is_device(device) || !milliwatts) return NVML_ERROR_INVALID_ARGUMENT;
    *milliwatts = IDLE;
    return NVML_SUCCESS;
}

int nvmlDeviceGetTemperature(nvml_device_t device, int sensor, unsigned *celsius) {
    enum { OF_THE_DIE, ROOM = 25 };
    if (!is_device(device) || sensor != OF_THE_DIE || !celsius) return NVML_ERROR_INVALID_ARGUMENT;
    *celsius = ROOM;
    return NVML_SUCCESS;
}

int nvmlDeviceGetUtilizationRates(nvml_device_t device, nvml_utilization_t *rates) {
    if (!is_device(device) || !rates) return NVML_ERROR_INVALID_ARGUMENT;
    *rates = (nvml_utilization_t){0};
    return NVML_SUCCESS;
}

/* State 0 means a device without a fabric. */
int nvmlDeviceGetGpuFabricInfoV(nvml_device_t device, void *information) {
    enum { SIZE_MASK = 0xFFFFFF };
    uint32_t version = 0; /* the first field of the structure; the program sets it, and it contains the size */
    if (!is_device(device) || !information) return NVML_ERROR_INVALID_ARGUMENT;
    memcpy(&version, information, sizeof version);
    if ((version & SIZE_MASK) > sizeof version)
        memset((char *)information + sizeof version, 0, (version & SIZE_MASK) - sizeof version);
    return NVML_SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(nvml_device_t device, unsigned link, int *type) {
    (void)link;
    return is_device(device) && type ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvml_device_t device, unsigned link, void *information) {
    (void)link;
    return is_device(device) && information ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
}

const char *nvmlErrorString(int result) {
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    default: return "Unknown Error";
    }
}
