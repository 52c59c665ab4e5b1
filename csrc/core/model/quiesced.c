#include "core/model/quiesced.h"

static tms_quiesced_t make(tms_device_mask_t devices) { return (tms_quiesced_t){.quiesced_devices = devices}; }

tms_status_t tms_quiesce(tms_wait_t *wait, tms_devices_t *devices, tms_device_mask_t mask, tms_quiesced_t *quiesced,
                         tms_device_mask_t *idle, const tms_log_t *log, const tms_error_context_t *context,
                         tms_error_t *error) {
    tms_status_t status = tms_wait_for_devices(wait, devices, mask, idle, log, context, error);
    if (status == TMS_OK) *quiesced = make(mask);
    return status;
}

/* The next two functions return the same value. Their names say which reason the caller has. */
tms_quiesced_t tms_quiesced_without_users(void) { return make(~(tms_device_mask_t)0); }

tms_quiesced_t tms_quiesced_by_program(void) { return make(~(tms_device_mask_t)0); }

tms_quiesced_t tms_quiesced_idle_or_lost(tms_device_mask_t devices) { return make(devices); }

bool tms_quiesced_covers(tms_quiesced_t quiesced, tms_device_mask_t devices) {
    return (devices & ~quiesced.quiesced_devices) == 0;
}
