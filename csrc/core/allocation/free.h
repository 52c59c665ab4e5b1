/* Frees. A free takes a segment out of the registry (tms_saver_unpublish), *retires* it, which waits for the devices or
 * defers the rest, and *releases* what it holds: its backup, its guard page, its share of a run and its addresses. Resources
 * that the driver fails to release are quarantined and retried.
 *
 * Any thread, without the saver's lock, which is taken for the registries and counters, unless a comment says otherwise. */
#ifndef TMS_FREE_H
#define TMS_FREE_H

#include "core/model/run.h"
#include "core/model/saver.h"
#include "device/wait.h"

/* tms_api_t.free. A free of mapped memory waits for the devices. A free of a segment in transition is recorded, and the
 * owner of the transition finishes it. */
tms_status_t tms_free_address(tms_saver_t *saver, uint64_t address, tms_error_t *error);
/* Ends a freed segment that may be mapped: waits for the devices, unless it is an orphan (orphans.h), then releases it. The
 * free is deferred if the wait is forbidden by a capture, fails, or is cancelled by `wait` (NULL: never). It is not deferred
 * if the device is lost, because a lost device runs nothing.
 */
void tms_free_retire(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait);
/* Releases a freed segment, which the callee owns, and whose memory no device uses any more. Resources that the driver fails
 * to release are quarantined, with a log line. Returns false, with only the backup released, if a device has got access
 * since the wait and must be waited for. This cannot happen if `quiesced` covers every device or the segment has no
 * memory. */
bool tms_free_release_segment(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced);
/* Releases the memory of a run to which no segment refers any more, and which no device uses. Quarantines what the driver
 * fails to release, with a log line. */
void tms_free_release_run(tms_saver_t *saver, tms_run_t *run, tms_quiesced_t quiesced);
/* Under the lock: ends a call's ownership of these runs. `damages`: the segments of a run that still has memory become
 * DAMAGED. Slack can be handed out again if its run has memory; otherwise the slack is gone. Adds the freed segments that
 * have waited to *freed, linked by `next_in_transition`, for tms_free_retire. */
void tms_free_disown_runs(tms_saver_t *saver, tms_run_t *runs, bool damages, tms_segment_t **freed);

/* Unmaps a segment's guard page (core/model/guard.h), if it is mapped, and drops the reference. On failure nothing changes.
 */
tms_status_t tms_free_unguard(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced,
                              const tms_error_context_t *context, tms_error_t *error);
/* Drops a reference to a device's guard page, and releases the page if it was the last. */
void tms_free_drop_guard(tms_saver_t *saver, int device);

/* Whether the devices may still use memory, or read a guard page. */
typedef enum tms_use {
    TMS_UNUSED,
    TMS_USED_UNTIL_CAPTURE_ENDS, /* the devices must not be waited for before the end */
    TMS_MAYBE_IN_USE
} tms_use_t;
/* Waits for `users`, the devices that have access to a segment; 0: none. *quiesced is written for TMS_UNUSED only. In the
 * other cases *reason says why. */
tms_use_t tms_free_await_users(tms_saver_t *saver, const tms_segment_t *segment, tms_device_mask_t users, tms_wait_t *wait,
                               tms_quiesced_t *quiesced, tms_error_t *reason);

/* Takes a share of the lock of a segment's device, which the caller holds (device_lock.h), for a segment that a call owns. A
 * segment has one share at most: does nothing if it has one. */
void tms_free_retain_lock(tms_saver_t *saver, tms_segment_t *segment);
/* Releases the share of a segment that was resumed with exclusive=True. Called after its memory was released, so that a
 * process that waits for the lock finds memory. Memory that the driver fails to release does not keep the lock. */
void tms_free_release_lock(tms_saver_t *saver, tms_segment_t *segment);

#endif
