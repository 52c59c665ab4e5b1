/* The release of freed segments. They are out of the registry, and the callee owns them. Resources that the driver fails to
 * release are quarantined and retried.
 *
 * Any thread, without the saver's lock, which is taken for the registries and counters. */
#ifndef TMS_RETIRE_H
#define TMS_RETIRE_H

#include "core/saver.h"
#include "device/wait.h"

/* Releases a freed segment whose memory no device uses any more. Resources that the driver fails to release are quarantined,
 * with a log line. */
void tms_saver_dispose(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced);
/* tms_saver_dispose for a segment that may be mapped: waits for the devices first. If that is forbidden (a capture), fails,
 * or is cancelled (`wait`, which may be NULL), the free is deferred, unless the device is lost and so runs nothing. */
void tms_saver_retire(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait);

/* Unmaps a segment's guard page (core/guard.h), if it is mapped, and drops the reference. On failure nothing changes. */
tms_status_t tms_saver_unguard(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced,
                               const tms_error_context_t *context, tms_error_t *error);
/* Drops a reference to a device's guard page, and disposes of the page if it was the last. */
void tms_saver_drop_guard(tms_saver_t *saver, int device);

/* Whether the devices may still use memory, or read a guard page. */
typedef enum tms_use {
    TMS_UNUSED,
    TMS_USED_UNTIL_CAPTURE_ENDS, /* devices must not be waited for before that */
    TMS_PERHAPS_IN_USE
} tms_use_t;
/* Waits for `users`, the devices that have access to a segment; 0: none. *quiesced is written for TMS_UNUSED only. *reason
 * is the failure to wait. */
tms_use_t tms_saver_await_users(tms_saver_t *saver, const tms_segment_t *segment, tms_device_mask_t users, tms_wait_t *wait,
                                tms_quiesced_t *quiesced, tms_error_t *reason);

/* Takes a share of the lock of a segment's device, which the caller holds (device_lock.h), for a segment that a call owns. A
 * segment has one share at most: does nothing if it has one. */
void tms_saver_retain_lock(tms_saver_t *saver, tms_segment_t *segment);
/* Releases the share of a segment that was resumed with exclusive=True. Called after its memory was released, so that a
 * process that waits for the lock finds memory. Memory that the driver fails to release does not keep the lock. */
void tms_saver_release_lock(tms_saver_t *saver, tms_segment_t *segment);

#endif
