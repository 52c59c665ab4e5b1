#include "device/capture_stream.h"

static const tms_error_context_t asking = {.operation = "look for captures", .device = TMS_NO_DEVICE};

uintptr_t tms_capture_key(void *stream) {
    static _Thread_local char own_stream;
    return stream == (void *)CU_STREAM_PER_THREAD ? (uintptr_t)&own_stream : (uintptr_t)stream;
}

/* Gets the identifier of the device's primary context. Returns false if there is no such context or its identifier is
 * unknown. */
static bool find_primary(tms_devices_t *devices, const tms_driver_table_t *driver, int device,
                         unsigned long long *identifier) {
    if (tms_devices_enter(devices, device, &asking, NULL) != TMS_OK) return false;
    bool found = driver->cuCtxGetId && driver->cuCtxGetId(NULL, identifier) == CUDA_SUCCESS;
    tms_devices_leave(devices, device);
    return found;
}

tms_capture_stream_t tms_capture_locate(tms_devices_t *devices, void *stream) {
    tms_capture_stream_t where = {.key = tms_capture_key(stream), .stream = stream, .device = TMS_NO_DEVICE};
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    const tms_device_table_t *table = atomic_load(&devices->table);
    CUcontext context = NULL;
    unsigned long long primary = 0;
    tms_device_mask_t active = 0;
    if (!driver || !table || tms_is_default_stream(stream) || !driver->cuStreamIsCapturing || !driver->cuStreamGetCtx ||
        !driver->cuCtxGetId || driver->cuStreamGetCtx(stream, &context) != CUDA_SUCCESS ||
        driver->cuCtxGetId(context, &where.context) != CUDA_SUCCESS ||
        tms_devices_active(devices, &active, &asking, NULL) != TMS_OK)
        return where;
    for (int i = 0; i < table->count && where.device == TMS_NO_DEVICE; i++) {
        if (active >> i & 1 && find_primary(devices, driver, i, &primary) && primary == where.context) where.device = i;
    }
    return where;
}

bool tms_capture_has_ended(tms_devices_t *devices, const tms_capture_stream_t *where) {
    const tms_driver_table_t *driver = atomic_load(&devices->driver->table);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    tms_device_mask_t active = 0;
    unsigned long long now = 0;
    bool ended = false;
    if (where->device == TMS_NO_DEVICE || tms_devices_active(devices, &active, &asking, NULL) != TMS_OK) return false;
    if (!(active >> where->device & 1)) return true; /* the stream has gone with its context; entering would create one */
    if (tms_devices_enter(devices, where->device, &asking, NULL) != TMS_OK) return false;
    if (driver->cuCtxGetId(NULL, &now) == CUDA_SUCCESS) {
        ended = now != where->context;
        if (!ended && driver->cuStreamIsCapturing(where->stream, &status) == CUDA_SUCCESS)
            ended = status == CU_STREAM_CAPTURE_STATUS_NONE;
    }
    tms_devices_leave(devices, where->device);
    return ended;
}
