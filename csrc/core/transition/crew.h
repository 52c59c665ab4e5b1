/* The devices' parts of one call, in parallel. Called on the thread of the call, with no lock held. */
#ifndef TMS_CREW_H
#define TMS_CREW_H

#include "core/transition/transition.h"

/* One device's part of a call. It runs on the thread of the call or on its own thread, concurrently with other devices'
 * parts, and changes only the segments of its device. `wait` is the call's, or one that is cancelled with the call or after
 * the failure of another part. */
typedef tms_status_t (*tms_crew_work_t)(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error);
/* Performs `work` for every device of the mask in parallel, and waits for all parts. Returns the first failure. After
 * TMS_FORKED the threads exist only in the parent. */
tms_status_t tms_crew_perform(tms_transition_t *t, tms_device_mask_t devices, tms_crew_work_t work, tms_error_t *error);

#endif
