/* Freed segments, which go back to the driver. They are out of the registry and belong to the callee. What the driver
 * refuses goes to the quarantine, which tries it again.
 *
 * Any thread, without the saver's lock, which is taken for the books. */
#ifndef TMS_RETIRE_H
#define TMS_RETIRE_H

#include "core/saver.h"
#include "device/wait.h"

/* Finishes a free whose owner has gone, of memory that no device uses any more. What the driver refuses goes to the
 * quarantine, with a log line. */
void tms_saver_dispose(tms_saver_t *saver, tms_segment_t *segment, tms_quiesced_t quiesced);
/* tms_saver_dispose for a segment that may be mapped: waits for the devices first. Where that is forbidden (a capture),
 * fails, or is cancelled (`wait`, which may be NULL) it is deferred, except on a device that is lost, which runs nothing any
 * more. */
void tms_saver_retire(tms_saver_t *saver, tms_segment_t *segment, tms_wait_t *wait);

/* Whether the devices may still use a mapped segment. */
typedef enum tms_use {
    TMS_UNUSED,
    TMS_USED_UNTIL_CAPTURE_ENDS, /* it is forbidden to ask before that */
    TMS_PERHAPS_IN_USE
} tms_use_t;
/* Waits for the devices that may still use a segment; *quiesced is written where it is TMS_UNUSED. Where waiting fails
 * *reason says why. */
tms_use_t tms_saver_await_users(tms_saver_t *saver, const tms_segment_t *segment, tms_wait_t *wait, tms_quiesced_t *quiesced,
                                tms_error_t *reason);

/* Releases the share that a segment resumed with exclusive=True has of its device's lock, once its memory is released: a
 * process that waits for the lock then finds memory. What the driver refused to take back does not keep the lock, since that
 * may take for ever. */
void tms_saver_release_lock(tms_saver_t *saver, tms_segment_t *segment);
/* The range that the driver has just reserved for a segment: whether no other segment of ours has it. Where a segment in the
 * quarantine has it, the driver has taken it back although it reported a failure, and the quarantine gives up its claim. */
tms_status_t tms_saver_claim_range(tms_saver_t *saver, const tms_segment_t *segment, const tms_error_context_t *context,
                                   tms_error_t *error);

#endif
