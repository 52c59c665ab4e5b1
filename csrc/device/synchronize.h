/* Waiting for devices: the work queued on them before the call has finished after it.
 *
 * The driver's wait cannot be interrupted; wait.h makes it on another thread where the caller may stop. Any thread, no lock.
 */
#ifndef TMS_SYNCHRONIZE_H
#define TMS_SYNCHRONIZE_H

#include "device/device.h"

/* A thread's current context and its device; NULL where it has none. It may be one of cuCtxCreate, or of a green context. */
typedef struct tms_current_context {
    CUcontext context;
    int device;
} tms_current_context_t;
/* That of the calling thread. One that has been destroyed counts as none. */
tms_status_t tms_devices_current_context(tms_devices_t *devices, tms_current_context_t *current,
                                         const tms_error_context_t *context, tms_error_t *error);

/* Waits until each device of `mask` whose primary context is active has finished all work queued there before the call.
 * `current` is that of the thread that pauses or frees, which may not be this one: where it is no primary context, and on a
 * device of the mask, it is waited for as well. There is no list of such contexts, so work in others is not waited for; a
 * warning is logged once.
 *
 * Goes on where one device fails, and returns the first failure; TMS_DEVICE_LOST only if there is no other. Further failures
 * are logged. *at_rest (NULL: not asked) is filled in any case: the devices of `mask` that run nothing
 * any more, because they are idle, not in use, or themselves lost. Work of the others may still be under way. */
tms_status_t tms_devices_synchronize(tms_devices_t *devices, tms_device_mask_t mask, const tms_current_context_t *current,
                                     tms_device_mask_t *at_rest, const tms_error_context_t *context, tms_error_t *error);

#endif
