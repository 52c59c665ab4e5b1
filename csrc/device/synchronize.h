/* Waiting for devices: work queued on them before the call has finished when it returns.
 *
 * The driver's wait cannot be interrupted; wait.h makes it on a helper thread if the call can be cancelled. Any thread, no
 * lock.
 */
#ifndef TMS_SYNCHRONIZE_H
#define TMS_SYNCHRONIZE_H

#include "device/device.h"

/* A thread's current context and its device; NULL if it has none. It may be one of cuCtxCreate, or of a green context. */
typedef struct tms_current_context {
    CUcontext context;
    int device;
} tms_current_context_t;
/* Gets the current context of the calling thread. A destroyed context counts as none. */
tms_status_t tms_devices_current_context(tms_devices_t *devices, tms_current_context_t *current,
                                         const tms_error_context_t *context, tms_error_t *error);

/* Waits until each device of `mask` whose primary context is active has finished all work queued there before the call.
 * `current` is the current context of the thread that pauses or frees, which need not be this one. If it is not a primary
 * context and belongs to a device of the mask, it is waited for as well. The driver has no list of such contexts, so work in
 * others is not waited for; a warning is logged once.
 *
 * Continues after a failure, and returns the first one; TMS_DEVICE_LOST only if there is no other. Logs further failures.
 * Fills *idle (may be NULL) in any case: the devices of `mask` that run nothing, because they are idle, not in use, or
 * lost. Work on the others may be in flight. */
tms_status_t tms_devices_synchronize(tms_devices_t *devices, tms_device_mask_t mask, const tms_current_context_t *current,
                                     tms_device_mask_t *idle, const tms_error_context_t *context, tms_error_t *error);

#endif
