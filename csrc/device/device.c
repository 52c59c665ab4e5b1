#include "device/device.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "device/capture_mode.h"

void tms_devices_init(tms_devices_t *devices, tms_driver_t *driver) {
    devices->driver = driver;
    atomic_init(&devices->table, NULL);
    atomic_init(&devices->helpers, 0);
    atomic_init(&devices->warned_other_context, false);
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        atomic_init(&devices->queried[i], 0);
        atomic_init(&devices->reachable[i], 0);
        atomic_init(&devices->unreleased[i], 0);
    }
}

void tms_devices_release(tms_devices_t *devices) {
    while (atomic_load(&devices->helpers) > 0) sched_yield();
    free((void *)atomic_exchange(&devices->table, NULL));
}

static CUmemAllocationProp device_properties(int ordinal) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal}};
    return properties;
}

/* Checks the granularity, with which sizes and addresses are computed. */
static tms_status_t check_granularity(const tms_device_t *device, int ordinal, const tms_error_context_t *context,
                                      tms_error_t *error) {
    size_t granularity = device->granularity;
    bool is_power_of_two = granularity != 0 && (granularity & (granularity - 1)) == 0;
    if (is_power_of_two && granularity >= (size_t)sysconf(_SC_PAGESIZE) && granularity <= device->total_bytes) return TMS_OK;
    tms_error_context_t here = *context;
    here.device = ordinal;
    return tms_error_set(error, TMS_DRIVER, &here,
                         "cuMemGetAllocationGranularity returned %zu bytes, which is not a power of two between the page "
                         "size and the device's memory (%llu bytes)",
                         granularity, (unsigned long long)device->total_bytes);
}

/* Whether a device has a capability. If the driver does not know the attribute, no device has it. */
static tms_status_t read_capability(const tms_driver_table_t *driver, CUdevice device, CUdevice_attribute attribute,
                                    bool *capable, const tms_error_context_t *context, tms_error_t *error) {
    int value = 0;
    CUresult result = driver->cuDeviceGetAttribute(&value, attribute, device);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE)
        return tms_driver_fail(driver, context, "cuDeviceGetAttribute", result, error);
    *capable = result == CUDA_SUCCESS && value != 0;
    return TMS_OK;
}

static tms_status_t read_device(const tms_driver_table_t *driver, int ordinal, tms_device_t *device,
                                const tms_error_context_t *context, tms_error_t *error) {
    int vmm = 0;
    size_t total = 0;
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuDeviceGet, &device->handle, ordinal);
    if (status == TMS_OK) status = TMS_DRIVER_CALL(driver, context, error, cuDeviceTotalMem, &total, device->handle);
    if (status == TMS_OK) {
        status = TMS_DRIVER_CALL(driver, context, error, cuDeviceGetAttribute, &vmm,
                                 CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device->handle);
    }
    if (status != TMS_OK) return status;
    device->total_bytes = total;
    if (!vmm) return TMS_OK; /* allocations on it will fail; other devices are usable */
    status = read_capability(driver, device->handle, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                             &device->rdma_capable, context, error);
    if (status == TMS_OK)
        status = read_capability(driver, device->handle, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                 &device->exportable, context, error);
    if (status != TMS_OK) return status;
    CUmemAllocationProp properties = device_properties(ordinal);
    status = TMS_DRIVER_CALL(driver, context, error, cuMemGetAllocationGranularity, &device->granularity, &properties,
                             CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    return status == TMS_OK ? check_granularity(device, ordinal, context, error) : status;
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
        if (!made) {
            tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
            return TMS_OUT_OF_HOST_MEMORY;
        }
        status = read_table(loaded, made, context, error);
        if (status != TMS_OK) {
            free(made);
            return status;
        }
        /* Two threads may read it at once. Both read the same values, and the first to finish publishes its table. */
        if (atomic_compare_exchange_strong(&devices->table, &known, made))
            known = made;
        else
            free(made);
    }
    if (driver) *driver = loaded;
    if (table) *table = known;
    return TMS_OK;
}

tms_status_t tms_devices_check(const tms_device_table_t *table, const tms_error_context_t *context, tms_error_t *error) {
    if (context->device >= 0 && context->device < table->count) return TMS_OK;
    return tms_error_set(error, TMS_INVALID_ARGUMENT, context, "devices 0 to %d exist", table->count - 1);
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

/* Whether `peer` can access memory of `owner`. Queried once for each pair. */
static tms_status_t can_reach(tms_devices_t *devices, const tms_driver_table_t *driver, const tms_device_table_t *table,
                              int peer, int owner, bool *reaches, const tms_error_context_t *context, tms_error_t *error) {
    tms_device_mask_t bit = (tms_device_mask_t)1 << peer;
    if (!(atomic_load(&devices->queried[owner]) & bit)) {
        int can = 0;
        tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuDeviceCanAccessPeer, &can,
                                              table->device[peer].handle, table->device[owner].handle);
        if (status != TMS_OK) return status;
        if (can) atomic_fetch_or(&devices->reachable[owner], bit);
        atomic_fetch_or(&devices->queried[owner], bit); /* set last: a thread that sees it also sees `reachable` */
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

tms_device_mask_t tms_devices_may_reach(tms_devices_t *devices, int owner) {
    const tms_device_mask_t queried = atomic_load(&devices->queried[owner]); /* read first, because it is set last */
    return ~queried | atomic_load(&devices->reachable[owner]);
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
    return tms_error_set(error, TMS_INVALID_STATE, context, "the current device is not in the driver's list of devices");
}

/* ---- entering and leaving ---- */

/* The contexts that the library pushed on this thread's stack. Only this thread can pop them. */
enum { MAX_ENTERED = 8, MAX_UNPOPPED = 64 };
static _Thread_local struct {
    struct {
        CUcontext context;
        unsigned below;     /* number of `unpopped` contexts below it on the stack */
    } entered[MAX_ENTERED]; /* not left yet; calls nest only a few levels */
    unsigned depth;
    CUcontext unpopped[MAX_UNPOPPED]; /* left, but the driver failed to pop them; the last one is on top */
    unsigned count;
} pushed;

static void settle_stack(const tms_driver_table_t *driver) {
    while (pushed.count > 0) {
        CUcontext current = NULL;
        /* If another library has changed the stack since, a pop would remove one of its contexts. */
        if (!driver->cuCtxGetCurrent || !driver->cuCtxPopCurrent || driver->cuCtxGetCurrent(&current) != CUDA_SUCCESS ||
            current != pushed.unpopped[pushed.count - 1] || driver->cuCtxPopCurrent(&current) != CUDA_SUCCESS)
            return;
        pushed.count--;
    }
}

static void note_entered(CUcontext context) {
    if (pushed.depth < MAX_ENTERED) {
        pushed.entered[pushed.depth].context = context;
        pushed.entered[pushed.depth].below = pushed.count;
    }
    pushed.depth++;
}

/* Records that a context stays on the stack, above the first `below` unpopped ones. */
static void note_unpopped(CUcontext context, unsigned below) {
    if (!context || pushed.count == MAX_UNPOPPED) return;
    for (unsigned i = pushed.count; i > below; i--) pushed.unpopped[i] = pushed.unpopped[i - 1];
    pushed.unpopped[below] = context;
    pushed.count++;
}

static void pop(const tms_devices_t *devices, const tms_driver_table_t *driver, const tms_error_context_t *context) {
    tms_error_t reason;
    tms_status_t status = TMS_DRIVER;
    CUcontext popped_context = NULL;
    settle_stack(driver);
    unsigned below = pushed.count;
    if (pushed.depth > 0 && --pushed.depth < MAX_ENTERED) {
        popped_context = pushed.entered[pushed.depth].context;
        below = pushed.entered[pushed.depth].below < pushed.count ? pushed.entered[pushed.depth].below : pushed.count;
    }
    if (below < pushed.count) { /* an unpopped context of an inner call lies above */
        note_unpopped(popped_context, below);
        return;
    }
    for (int i = 0; i < TMS_UNDO_ATTEMPTS && status != TMS_OK; i++) {
        CUcontext popped = NULL;
        status = TMS_DRIVER_CALL(driver, context, &reason, cuCtxPopCurrent, &popped);
        if (status != TMS_OK && tms_driver_is_gone(&reason)) return;
    }
    if (status == TMS_OK) return;
    note_unpopped(popped_context, below);
    tms_log_write(devices->driver->log, TMS_LOG_ERROR, "%s This thread's current device may have changed.", reason.message);
}

tms_status_t tms_devices_push(tms_devices_t *devices, CUcontext pushed_context, const tms_error_context_t *context,
                              tms_error_t *error) {
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuCtxPushCurrent, pushed_context);
    if (status == TMS_OK) note_entered(pushed_context);
    return status;
}

void tms_devices_pop(tms_devices_t *devices, const tms_error_context_t *context) {
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    pop(devices, driver, context);
    settle_stack(driver);
}

static tms_status_t release_reference(const tms_driver_table_t *driver, CUdevice device, const tms_error_context_t *context,
                                      tms_error_t *error) {
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuDevicePrimaryCtxRelease, device);
    /* A context that was reset or is lost has no references left to release. */
    bool gone = status != TMS_OK && (tms_driver_is_gone(error) || error->driver_result == CUDA_ERROR_INVALID_CONTEXT ||
                                     error->driver_result == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return gone ? TMS_OK : status;
}

static void release(tms_devices_t *devices, const tms_driver_table_t *driver, int ordinal, CUdevice device,
                    const tms_error_context_t *context) {
    tms_error_t reason;
    if (release_reference(driver, device, context, &reason) == TMS_OK) return;
    atomic_fetch_add(&devices->unreleased[ordinal], 1);
    tms_log_recurring(devices->driver->log, TMS_LOG_CONTEXT_KEPT, TMS_LOG_ERROR, &reason, "Later calls retry it.");
}

tms_status_t tms_devices_enter(tms_devices_t *devices, int ordinal, const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, error);
    if (status != TMS_OK) return status;
    CUdevice device = table->device[ordinal].handle;
    settle_stack(driver);
    tms_capture_mode_relax(driver, devices->driver->log);
    bool existed = is_active(driver, device, &status, context, error), kept = false;
    CUcontext primary = NULL;
    if (status == TMS_OK) status = TMS_DRIVER_CALL(driver, context, error, cuDevicePrimaryCtxRetain, &primary, device);
    if (status != TMS_OK) {
        tms_capture_mode_restore(driver, devices->driver->log);
        return status;
    }
    if (!existed) {
        CUcontext again = NULL; /* one more reference, never released: otherwise leaving would destroy it */
        status = TMS_DRIVER_CALL(driver, context, error, cuDevicePrimaryCtxRetain, &again, device);
        kept = status == TMS_OK;
    }
    if (status == TMS_OK) status = tms_devices_push(devices, primary, context, error);
    if (status != TMS_OK) {
        if (kept) release(devices, driver, ordinal, device, context);
        release(devices, driver, ordinal, device, context);
        tms_capture_mode_restore(driver, devices->driver->log);
    }
    return status;
}

void tms_devices_leave(tms_devices_t *devices, int ordinal) {
    const tms_error_context_t context = {.operation = "leave a device's context", .device = ordinal};
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    CUdevice device = atomic_load(&devices->table)->device[ordinal].handle;
    tms_devices_pop(devices, &context);
    release(devices, driver, ordinal, device, &context);
    tms_capture_mode_restore(driver, devices->driver->log);
}

void tms_devices_settle(tms_devices_t *devices) {
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    if (!driver) return;
    settle_stack(driver);
    tms_capture_mode_settle(driver);
}

void tms_devices_reclaim(tms_devices_t *devices) {
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    const tms_device_table_t *table = atomic_load(&devices->table);
    for (int i = 0; table && i < table->count; i++) {
        const tms_error_context_t context = {.operation = "reclaim", .device = i};
        tms_error_t reason;
        uint32_t waiting = atomic_exchange(&devices->unreleased[i], 0);
        while (waiting > 0 && release_reference(driver, table->device[i].handle, &context, &reason) == TMS_OK) waiting--;
        if (waiting == 0) continue;
        atomic_fetch_add(&devices->unreleased[i], waiting);
        tms_log_recurring(devices->driver->log, TMS_LOG_CONTEXT_KEPT, TMS_LOG_WARNING, &reason, "Later calls retry it.");
    }
}

uint64_t tms_devices_unreleased(const tms_devices_t *devices) {
    uint64_t sum = 0;
    for (int i = 0; i < TMS_MAX_DEVICES; i++) sum += atomic_load(&devices->unreleased[i]);
    return sum;
}

void tms_devices_after_fork_in_child(tms_devices_t *devices) {
    atomic_store(&devices->helpers, 0);
    for (int i = 0; i < TMS_MAX_DEVICES; i++) atomic_store(&devices->unreleased[i], 0);
}

/* ---- memory ---- */

tms_status_t tms_devices_memory(tms_devices_t *devices, int ordinal, uint64_t *free_bytes, uint64_t *total_bytes,
                                const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    size_t free_now = 0, total = 0;
    CUdevice current = 0;
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, error);
    if (status != TMS_OK) return status;
    CUresult result = driver->cuCtxGetDevice ? driver->cuCtxGetDevice(&current) : CUDA_ERROR_INVALID_CONTEXT;
    /* A thread without a context is not an error. */
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_CONTEXT)
        return tms_driver_fail(driver, context, "cuCtxGetDevice", result, error);
    bool is_current = result == CUDA_SUCCESS && current == table->device[ordinal].handle;
    if (!is_current) status = tms_devices_enter(devices, ordinal, context, error);
    if (status != TMS_OK) return status;
    status = TMS_DRIVER_CALL(driver, context, error, cuMemGetInfo, &free_now, &total);
    if (!is_current) tms_devices_leave(devices, ordinal);
    if (status != TMS_OK) return status;
    *free_bytes = free_now;
    *total_bytes = total;
    return TMS_OK;
}

void tms_device_write_uuid(const CUuuid *uuid, char text[TMS_UUID_BYTES]) {
    static const unsigned dashes = 1u << 4 | 1u << 6 | 1u << 8 | 1u << 10; /* a dash precedes each of these bytes */
    int used = snprintf(text, TMS_UUID_BYTES, "GPU-");
    for (unsigned i = 0; i < sizeof(uuid->bytes); i++) {
        used += snprintf(text + used, (size_t)(TMS_UUID_BYTES - used), "%s%02x", dashes >> i & 1 ? "-" : "",
                         (unsigned)(unsigned char)uuid->bytes[i]);
    }
}
