/* Tries again what waits to be given back: the quarantine, references to contexts, deferred frees once no capture is
 * visible, and damaged segments.
 *
 * Any thread, without the saver's lock. Called by pause, resume, the end of a capture, and allocations that ran out of
 * memory. Cheap when nothing waits. */
#ifndef TMS_RECLAIM_H
#define TMS_RECLAIM_H

#include "core/saver.h"
#include "device/wait.h"

/* A damaged segment becomes PAUSED when the driver takes back what it refused. During the try it is REPAIRING, and belongs
 * to this thread. Host memory is tried on a thread of its own, for which no call waits. */
void tms_saver_reclaim(tms_saver_t *saver);
/* The same in a call that can be cancelled, also while it waits for devices here: the caller checks `wait` afterwards. */
void tms_saver_reclaim_within(tms_saver_t *saver, tms_wait_t *wait);
bool tms_saver_has_reclaimable(tms_saver_t *saver);

#endif
