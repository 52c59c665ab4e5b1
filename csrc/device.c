#include "device.h"

#include <stdlib.h>

void tms_devices_init(tms_devices_t *devices, tms_driver_t *driver) {
    devices->driver = driver;
    atomic_init(&devices->table, NULL);
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        atomic_init(&devices->asked[i], 0);
        atomic_init(&devices->reachable[i], 0);
    }
}

void tms_devices_release(tms_devices_t *devices) { free((void *)atomic_exchange(&devices->table, NULL)); }

static CUmemAllocationProp device_properties(int ordinal) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal}};
    return properties;
}

static tms_status_t read_device(const tms_driver_table_t *driver, int ordinal, tms_device_t *device,
                                const tms_error_context_t *context, tms_error_t *error) {
    int vmm = 0, rdma = 0;
    size_t total = 0;
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuDeviceGet, &device->handle, ordinal);
    if (status == TMS_OK) status = TMS_DRIVER_CALL(driver, context, error, cuDeviceTotalMem, &total, device->handle);
    if (status == TMS_OK) {
        status = TMS_DRIVER_CALL(driver, context, error, cuDeviceGetAttribute, &vmm,
                                 CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device->handle);
    }
    if (status != TMS_OK) return status;
    device->total_bytes = total;
    if (!vmm) return TMS_OK; /* allocations on it will be refused; the others are usable */
    /* A driver that does not know this attribute has no device that is capable. */
    if (driver->cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device->handle) ==
        CUDA_SUCCESS)
        device->rdma_capable = rdma != 0;
    CUmemAllocationProp properties = device_properties(ordinal);
    return TMS_DRIVER_CALL(driver, context, error, cuMemGetAllocationGranularity, &device->granularity, &properties,
                           CU_MEM_ALLOC_GRANULARITY_MINIMUM);
}

static tms_status_t read_table(const tms_driver_table_t *driver, tms_device_table_t *table,
                               const tms_error_context_t *context, tms_error_t *error) {
    int count = 0;
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuDeviceGetCount, &count);
    if (status != TMS_OK) return status;
    if (count <= 0)
        return tms_error_set(error, TMS_DRIVER_UNAVAILABLE, context,
                             "the driver sees no device; is CUDA_VISIBLE_DEVICES empty?");
    table->count = count < TMS_MAX_DEVICES ? count : TMS_MAX_DEVICES;
    for (int i = 0; i < table->count && status == TMS_OK; i++)
        status = read_device(driver, i, &table->device[i], context, error);
    return status;
}

tms_status_t tms_devices_load(tms_devices_t *devices, const tms_driver_table_t **driver, const tms_device_table_t **table,
                              const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *loaded = NULL;
    tms_status_t status = tms_driver_load(devices->driver, &loaded, context, error);
    if (status != TMS_OK) return status;
    const tms_device_table_t *known = atomic_load_explicit(&devices->table, memory_order_acquire);
    if (!known) {
        tms_device_table_t *made = calloc(1, sizeof *made);
        if (!made) return tms_error_set(error, TMS_OUT_OF_HOST_MEMORY, context, "no memory for the table of devices");
        status = read_table(loaded, made, context, error);
        if (status != TMS_OK) {
            free(made);
            return status;
        }
        /* Two threads may have read it at once; both read the same, and the first to finish wins. */
        if (atomic_compare_exchange_strong(&devices->table, &known, made))
            known = made;
        else
            free(made);
    }
    if (driver) *driver = loaded;
    if (table) *table = known;
    return TMS_OK;
}

static bool is_active(const tms_driver_table_t *driver, CUdevice device, tms_status_t *status,
                      const tms_error_context_t *context, tms_error_t *error) {
    unsigned int flags = 0;
    int active = 0;
    *status = TMS_DRIVER_CALL(driver, context, error, cuDevicePrimaryCtxGetState, device, &flags, &active);
    return *status == TMS_OK && active;
}

tms_status_t tms_devices_active(tms_devices_t *devices, tms_device_mask_t *mask, const tms_error_context_t *context,
                                tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, error);
    if (status != TMS_OK) return status;
    tms_device_mask_t active = 0;
    for (int i = 0; i < table->count; i++) {
        if (is_active(driver, table->device[i].handle, &status, context, error)) active |= (tms_device_mask_t)1 << i;
        if (status != TMS_OK) return status;
    }
    *mask = active;
    return TMS_OK;
}

/* Whether `peer` can access memory of `owner`; asked once a pair. */
static tms_status_t can_reach(tms_devices_t *devices, const tms_driver_table_t *driver, const tms_device_table_t *table,
                              int peer, int owner, bool *reaches, const tms_error_context_t *context, tms_error_t *error) {
    tms_device_mask_t bit = (tms_device_mask_t)1 << peer;
    if (!(atomic_load(&devices->asked[owner]) & bit)) {
        int can = 0;
        tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuDeviceCanAccessPeer, &can,
                                              table->device[peer].handle, table->device[owner].handle);
        if (status != TMS_OK) return status;
        if (can) atomic_fetch_or(&devices->reachable[owner], bit);
        atomic_fetch_or(&devices->asked[owner], bit); /* last: whoever sees it sees the answer */
    }
    *reaches = (atomic_load(&devices->reachable[owner]) & bit) != 0;
    return TMS_OK;
}

tms_status_t tms_devices_peers(tms_devices_t *devices, int owner, tms_device_mask_t *peers,
                               const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, error);
    if (status != TMS_OK) return status;
    tms_device_mask_t active = 0, found = 0;
    if (table->count > 1) status = tms_devices_active(devices, &active, context, error);
    for (int i = 0; i < table->count && status == TMS_OK; i++) {
        bool reaches = false;
        if (i == owner || !(active >> i & 1)) continue;
        status = can_reach(devices, driver, table, i, owner, &reaches, context, error);
        if (reaches) found |= (tms_device_mask_t)1 << i;
    }
    if (status == TMS_OK) *peers = found;
    return status;
}

tms_status_t tms_devices_current(tms_devices_t *devices, int *ordinal, const tms_error_context_t *context,
                                 tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, error);
    if (status != TMS_OK) return status;
    CUdevice current = table->device[0].handle;
    CUresult result = driver->cuCtxGetDevice ? driver->cuCtxGetDevice(&current) : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_ERROR_INVALID_CONTEXT)
        current = table->device[0].handle; /* no context: the runtime's default */
    else if (result != CUDA_SUCCESS)
        return tms_driver_fail(driver, context, "cuCtxGetDevice", result, error);
    for (int i = 0; i < table->count; i++) {
        if (table->device[i].handle == current) {
            *ordinal = i;
            return TMS_OK;
        }
    }
    return tms_error_set(error, TMS_INVALID_STATE, context,
                         "the current device is none of the devices that the driver lists");
}

tms_status_t tms_devices_enter(tms_devices_t *devices, int ordinal, const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, error);
    if (status != TMS_OK) return status;
    CUdevice device = table->device[ordinal].handle;
    bool existed = is_active(driver, device, &status, context, error);
    CUcontext primary = NULL;
    if (status == TMS_OK) status = TMS_DRIVER_CALL(driver, context, error, cuDevicePrimaryCtxRetain, &primary, device);
    if (status != TMS_OK) return status;
    if (!existed) {
        CUcontext kept = NULL; /* one more reference, never given back: see the header */
        status = TMS_DRIVER_CALL(driver, context, error, cuDevicePrimaryCtxRetain, &kept, device);
    }
    if (status == TMS_OK) status = TMS_DRIVER_CALL(driver, context, error, cuCtxPushCurrent, primary);
    if (status != TMS_OK) driver->cuDevicePrimaryCtxRelease(device);
    return status;
}

void tms_devices_leave(tms_devices_t *devices, int ordinal) {
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    const tms_device_table_t *table = atomic_load(&devices->table);
    CUcontext popped = NULL;
    driver->cuCtxPopCurrent(&popped);
    driver->cuDevicePrimaryCtxRelease(table->device[ordinal].handle);
}

static tms_status_t synchronize_one(tms_devices_t *devices, const tms_driver_table_t *driver,
                                    const tms_device_table_t *table, int ordinal, const tms_error_context_t *context,
                                    tms_error_t *error) {
    tms_status_t status = TMS_OK;
    tms_error_context_t here = *context;
    here.device = ordinal;
    /* Without an active primary context no work can be in flight, and asking for it would create one. */
    if (!is_active(driver, table->device[ordinal].handle, &status, &here, error)) return status;
    status = tms_devices_enter(devices, ordinal, &here, error);
    if (status != TMS_OK) return status;
    status = TMS_DRIVER_CALL(driver, &here, error, cuCtxSynchronize);
    tms_devices_leave(devices, ordinal);
    return status;
}

tms_status_t tms_devices_synchronize(tms_devices_t *devices, tms_device_mask_t mask, const tms_error_context_t *context,
                                     tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, error);
    for (int i = 0; status == TMS_OK && i < table->count; i++) {
        if (mask >> i & 1) status = synchronize_one(devices, driver, table, i, context, error);
    }
    return status;
}
