/* Access for peers: devices that come into use after memory was allocated get access to it.
 *
 * A look asks the driver about every segment, under the saver's lock. */
#ifndef TMS_PEERS_H
#define TMS_PEERS_H

#include "core/saver.h"

/* tms_api_t.refresh_peers: gives access to devices that have come into use. */
tms_status_t tms_saver_refresh_peers(tms_saver_t *saver, tms_error_t *error);
/* The same after an allocation, which stands whatever comes of it: a failure is logged. Where one segment keeps failing 1,
 * 2, 4, ... allocations leave the look out after each that failed; the next pause, resume or explicit call, and every device
 * that comes into use, begin anew. */
void tms_peers_refresh_after_allocation(tms_saver_t *saver);
/* The devices in use as of the last look; takes the lock. */
tms_device_mask_t tms_peers_seen(tms_saver_t *saver);
/* Under the lock: a segment becomes ACTIVE, and looks since `seen` had this value have skipped it. True where there was such
 * a look; the next one is then at everything. */
bool tms_peers_note_skipped(tms_saver_t *saver, tms_device_mask_t seen);

#endif
