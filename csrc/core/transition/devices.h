/* The devices' parts of one call, at once. */
#ifndef TMS_TRANSITION_DEVICES_H
#define TMS_TRANSITION_DEVICES_H

#include "core/transition/call.h"

/* One device's part of a call. It runs on the thread of the call or on one of its own, beside those of other devices, and
 * changes only the segments of its device. `wait` is the call's, or one that is cancelled when the call is or when another
 * device's part has failed. */
typedef tms_status_t (*tms_device_work_t)(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error);
/* Does that for every device of the mask at once, and waits for all of them. The first failure, if there is one. After
 * TMS_FORKED the threads are the parent's. */
tms_status_t tms_transition_on_devices(tms_transition_t *t, tms_device_mask_t devices, tms_device_work_t work,
                                       tms_error_t *error);

#endif
