#include "abi/ordinary_memory.h"

#include <stdlib.h>

/* Memory that the driver failed to free. */
typedef struct unfreed {
    tms_quarantined_t quarantined; /* first; its context is the state */
    uint64_t address;
    int device;
} unfreed_t;

tms_status_t tms_ordinary_allocate(tms_state_t *state, uint64_t bytes, int device, uint64_t *address, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "allocate", .device = device, .bytes = bytes};
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *devices = NULL;
    CUdeviceptr made = 0;
    tms_status_t status = tms_saver_check_process(&state->saver, &context, error);
    if (status == TMS_OK) status = tms_devices_load(&state->devices, &driver, &devices, &context, error);
    if (status == TMS_OK) status = tms_devices_check(devices, &context, error);
    if (status == TMS_OK) status = tms_devices_enter(&state->devices, device, &context, error);
    if (status != TMS_OK) return status;
    status = TMS_DRIVER_CALL(driver, &context, error, cuMemAlloc, &made, bytes);
    tms_devices_leave(&state->devices, device);
    if (status == TMS_OK) *address = made;
    return status;
}

static tms_status_t release(tms_state_t *state, uint64_t address, int device, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "free", .device = device, .address = address};
    const tms_driver_table_t *driver = NULL;
    tms_status_t status = tms_devices_load(&state->devices, &driver, NULL, &context, error);
    if (status == TMS_OK) status = tms_devices_enter(&state->devices, device, &context, error);
    if (status != TMS_OK) return status;
    status = TMS_DRIVER_CALL(driver, &context, error, cuMemFree, address);
    tms_devices_leave(&state->devices, device);
    return status;
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    unfreed_t *unfreed = (unfreed_t *)node;
    tms_error_t reason;
    tms_status_t status = release(node->context, unfreed->address, unfreed->device, &reason);
    if (status != TMS_OK && !tms_driver_is_gone(&reason)) return node->holds;
    free(unfreed);
    return 0;
}

tms_status_t tms_ordinary_free(tms_state_t *state, uint64_t address, int device, tms_error_t *error) {
    if (atomic_load(&state->saver.forked)) return TMS_OK; /* the memory belongs to the parent */
    tms_status_t status = release(state, address, device, error);
    if (status == TMS_OK || tms_driver_is_gone(error)) return status;
    unfreed_t *unfreed = calloc(1, sizeof *unfreed);
    if (!unfreed) return status;
    *unfreed = (unfreed_t){.address = address, .device = device};
    unfreed->quarantined = (tms_quarantined_t){.retry = retry, .context = state, .holds = TMS_QUARANTINE_BIT(HANDLE)};
    tms_quarantine_add(&state->saver.quarantine, &unfreed->quarantined);
    tms_error_append(error, " The memory stays allocated; later calls try again to release it.");
    return status;
}
