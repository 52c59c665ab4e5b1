#include "device/synchronize.h"

#include "device/capture_mode.h"

tms_status_t tms_devices_current_context(tms_devices_t *devices, tms_current_context_t *current,
                                         const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    tms_current_context_t found = {.context = NULL, .device = TMS_NO_DEVICE};
    tms_status_t status = tms_devices_load(devices, &driver, NULL, context, error);
    if (status == TMS_OK && driver->cuCtxGetCurrent)
        status = TMS_DRIVER_CALL(driver, context, error, cuCtxGetCurrent, &found.context);
    if (status != TMS_OK) return status;
    if (found.context) {
        tms_error_t reason;
        status = tms_devices_current(devices, &found.device, context, &reason);
        bool none = status == TMS_INVALID_STATE || /* the context's device is not in the table */
                    (status != TMS_OK && reason.driver_result == CUDA_ERROR_CONTEXT_IS_DESTROYED);
        if (none) found = (tms_current_context_t){.context = NULL, .device = TMS_NO_DEVICE};
        if (status != TMS_OK && !none && error) *error = reason;
        if (status != TMS_OK && !none) return status;
    }
    *current = found;
    return TMS_OK;
}

/* Only the result of cuCtxSynchronize in the device's own context shows that the device is lost. While another device is
 * lost, the driver may fail other calls with that device's error (cuDevicePrimaryCtxRetain on an H200). */
static bool runs_nothing(tms_status_t synchronized) { return synchronized == TMS_OK || synchronized == TMS_DEVICE_LOST; }

/* Waits for a device's primary context. *primary stays NULL if that context is not active. */
static tms_status_t synchronize_primary(tms_devices_t *devices, const tms_driver_table_t *driver, CUdevice device,
                                        CUcontext *primary, bool *idle, const tms_error_context_t *context,
                                        tms_error_t *error) {
    unsigned int flags = 0;
    int active = 0;
    *primary = NULL;
    *idle = false;
    tms_status_t status = TMS_DRIVER_CALL(driver, context, error, cuDevicePrimaryCtxGetState, device, &flags, &active);
    if (status != TMS_OK) return status;
    /* Without an active primary context the device has no work in flight, and entering would create one. */
    *idle = !active;
    if (!active) return TMS_OK;
    status = tms_devices_enter(devices, context->device, context, error);
    if (status != TMS_OK) return status;
    if (driver->cuCtxGetCurrent) status = TMS_DRIVER_CALL(driver, context, error, cuCtxGetCurrent, primary);
    if (status == TMS_OK) {
        status = TMS_DRIVER_CALL(driver, context, error, cuCtxSynchronize);
        *idle = runs_nothing(status);
    }
    tms_devices_leave(devices, context->device);
    return status;
}

/* Waits for a context that is not the primary one. A context that another thread has destroyed runs nothing. */
static tms_status_t synchronize_other(tms_devices_t *devices, const tms_driver_table_t *driver, CUcontext other, bool *idle,
                                      const tms_error_context_t *context, tms_error_t *error) {
    tms_log_once(
        devices->driver->log, &devices->warned_other_context, TMS_LOG_WARNING,
        "%s: this thread's current context is not the primary one of device %d (cuCtxCreate, or a green context). It "
        "is waited for, but work in other such contexts is not: synchronize them before pause(), and before memory "
        "that they use is freed",
        context->operation, context->device);
    tms_capture_mode_relax(driver, devices->driver->log);
    tms_status_t status = tms_devices_push(devices, other, context, error);
    *idle = false;
    if (status == TMS_OK) {
        status = TMS_DRIVER_CALL(driver, context, error, cuCtxSynchronize);
        *idle = runs_nothing(status);
        tms_devices_pop(devices, context);
    }
    tms_capture_mode_restore(driver, devices->driver->log);
    if (status == TMS_OK ||
        (error->driver_result != CUDA_ERROR_INVALID_CONTEXT && error->driver_result != CUDA_ERROR_CONTEXT_IS_DESTROYED))
        return status;
    *idle = true;
    return TMS_OK;
}

/* Keeps the more important failure in *status and *kept: any other failure outranks a lost device, which runs nothing. Logs
 * the other failure, because the caller gets only one. */
static void note_failure(const tms_devices_t *devices, tms_status_t one, const tms_error_t *reason, tms_status_t *status,
                         tms_error_t *kept) {
    if (one == TMS_OK) return;
    bool outranks = *status == TMS_OK || (*status == TMS_DEVICE_LOST && one != TMS_DEVICE_LOST);
    if (*status != TMS_OK)
        tms_log_recurring(devices->driver->log, TMS_LOG_ANOTHER_FAILED, TMS_LOG_WARNING, outranks ? kept : reason,
                          "Another device or context failed as well; the call reports only that failure.");
    if (!outranks) return;
    *status = one;
    *kept = *reason;
}

tms_status_t tms_devices_synchronize(tms_devices_t *devices, tms_device_mask_t mask, const tms_current_context_t *current,
                                     tms_device_mask_t *idle, const tms_error_context_t *context, tms_error_t *error) {
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    tms_device_mask_t idle_devices = 0;
    tms_error_t kept;
    tms_status_t status = tms_devices_load(devices, &driver, &table, context, &kept);
    for (int i = 0; table && i < table->count; i++) {
        tms_error_context_t here = *context;
        tms_error_t reason;
        CUcontext primary = NULL;
        bool is_idle = false;
        if (!(mask >> i & 1)) continue;
        here.device = i;
        tms_status_t one = synchronize_primary(devices, driver, table->device[i].handle, &primary, &is_idle, &here, &reason);
        note_failure(devices, one, &reason, &status, &kept);
        if (is_idle && current->context && current->device == i && current->context != primary) {
            one = synchronize_other(devices, driver, current->context, &is_idle, &here, &reason);
            note_failure(devices, one, &reason, &status, &kept);
        }
        if (is_idle) idle_devices |= (tms_device_mask_t)1 << i;
    }
    if (status != TMS_OK && error) *error = kept;
    if (idle) *idle = idle_devices;
    return status;
}
