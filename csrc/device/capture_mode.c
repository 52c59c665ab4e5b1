#include "device/capture_mode.h"

/* The changes to this thread's own mode. Only this thread can restore it. */
static _Thread_local struct {
    unsigned depth;             /* number of nested calls of tms_capture_mode_relax */
    bool changed;               /* the mode was `before` and is relaxed now */
    CUstreamCaptureMode before; /* the former mode, if `changed` */
} own;

static const tms_error_context_t context = {.operation = "change the thread's capture mode", .device = TMS_NO_DEVICE};

void tms_capture_mode_relax(const tms_driver_table_t *driver, tms_log_t *log) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    tms_error_t reason;
    if (own.depth++ > 0 || own.changed || !driver->cuThreadExchangeStreamCaptureMode) return;
    own.changed = TMS_DRIVER_CALL(driver, &context, &reason, cuThreadExchangeStreamCaptureMode, &mode) == TMS_OK;
    own.before = mode;
    if (!own.changed && !tms_driver_is_gone(&reason))
        tms_log_recurring(log, TMS_LOG_NOT_RELAXED, TMS_LOG_WARNING, &reason,
                          "This may invalidate a stream capture of another thread.");
}

static bool restore(const tms_driver_table_t *driver, tms_error_t *reason) {
    CUstreamCaptureMode mode = own.before;
    if (TMS_DRIVER_CALL(driver, &context, reason, cuThreadExchangeStreamCaptureMode, &mode) != TMS_OK &&
        !tms_driver_is_gone(reason))
        return false;
    own.changed = false;
    return true;
}

void tms_capture_mode_restore(const tms_driver_table_t *driver, tms_log_t *log) {
    tms_error_t reason;
    if (--own.depth > 0 || !own.changed) return;
    for (int i = 0; i < TMS_UNDO_ATTEMPTS; i++) {
        if (restore(driver, &reason)) return;
    }
    tms_log_write(log, TMS_LOG_ERROR, "%s This thread's capture mode stays relaxed until a later call can restore it.",
                  reason.message);
}

void tms_capture_mode_settle(const tms_driver_table_t *driver) {
    tms_error_t reason;
    if (own.depth == 0 && own.changed) (void)restore(driver, &reason);
}
