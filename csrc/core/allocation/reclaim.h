/* Retries failed and deferred releases: the quarantine, references to contexts, deferred frees once no capture is visible,
 * and damaged segments.
 *
 * Any thread, without the saver's lock. Called by pause, resume, the end of a capture, and allocations that ran out of
 * memory. Cheap when there is nothing to retry. */
#ifndef TMS_RECLAIM_H
#define TMS_RECLAIM_H

#include "core/model/saver.h"
#include "device/wait.h"

/* Makes all these retries. A damaged segment becomes PAUSED when its memory can be released. During the attempt it is
 * REPAIRING and belongs to this thread. Host memory is retried on a background thread, for which no call waits. */
void tms_reclaim_all(tms_saver_t *saver);
/* Reclaims on behalf of a call that can be cancelled, even while it waits for devices here. The caller checks `wait`
 * afterwards. */
void tms_reclaim_within(tms_saver_t *saver, tms_wait_t *wait);
bool tms_reclaim_is_needed(tms_saver_t *saver);

#endif
