/* Peer access: devices that come into use after memory was allocated get access to it. The saver owns the state. Any thread.
 *
 * A scan grants access to every ACTIVE segment, under the saver's lock. */
#ifndef TMS_PEERS_H
#define TMS_PEERS_H

#include "core/model/saver.h"

/* tms_api_t.refresh_peers: grants access to devices that have come into use. */
tms_status_t tms_peers_refresh(tms_saver_t *saver, tms_error_t *error);
/* Grants this access after an allocation. The allocation succeeds in any case, and a failure to grant access is logged.
 * After each failed scan 1, 2, 4, ... allocations skip the scan. The next pause, resume or explicit call, and every device
 * that comes into use, reset that. */
void tms_peers_refresh_after_allocation(tms_saver_t *saver);
/* The devices in use as of the last scan; takes the lock. */
tms_device_mask_t tms_peers_seen(tms_saver_t *saver);
/* Under the lock: called when a segment becomes ACTIVE that scans may have skipped since `seen` was read. Returns true if
 * there was such a scan; the next scan then covers every segment. */
bool tms_peers_note_skipped(tms_saver_t *saver, tms_device_mask_t seen);
/* Under the lock: called when slack of `run` becomes an ACTIVE segment. A scan does not find a run while all of its segments
 * are being freed. If the run lacks access that every ACTIVE segment is thought to have, the next scan covers every
 * segment. */
void tms_peers_note_reused(tms_saver_t *saver, const tms_run_t *run);

#endif
