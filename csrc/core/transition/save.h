/* Saving contents of the segments on a call's list: into their own backups (a pause), or into others (guard_bytes.h,
 * verification.h).
 *
 * The choices and the plans are made on the thread of the call, the copies on the threads of the devices' parts. The call
 * owns the segments; no lock. The caller starts the batch of the stores after the last plan, and ends it after the copies.
 */
#ifndef TMS_SAVE_H
#define TMS_SAVE_H

#include "core/transition/transition.h"

/* Chooses the segment's contents that are saved in `backup`. `live` NULL: all of them. */
tms_status_t tms_save_choose(tms_transition_t *t, tms_segment_t *segment, tms_backup_t *backup, tms_backup_kind_t kind,
                             const tms_live_t *live, tms_error_t *error);
/* Plans to save the chosen contents. Adds the segment's device to *copying if there are contents to copy. Checks for
 * cancellation. The progress of the call does not count the copies yet. */
tms_status_t tms_save_plan(tms_transition_t *t, tms_segment_t *segment, tms_host_policy_t policy, tms_device_mask_t *copying,
                           tms_error_t *error);
/* Copies the planned contents of the device's segments, and waits for the copies. */
tms_status_t tms_save_copy(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error);
/* Does the same, and counts the bytes that have been copied in *done, unless that is NULL. */
tms_status_t tms_save_copy_counted(tms_transition_t *t, int device, _Atomic uint64_t *done, tms_wait_t *wait,
                                   tms_error_t *error);

#endif
