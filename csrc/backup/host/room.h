/* How much more host memory the store may use, and how it makes room. Any thread, without the store's lock. */
#ifndef TMS_HOST_ROOM_H
#define TMS_HOST_ROOM_H

#include "backup/host/types.h"

/* Whether `bytes` more may become resident in addition to the bytes in flight. *headroom: the tightest limit. */
bool tms_host_store_fits(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom);
/* Releases queued chunks, then idle pooled memory, until `bytes` more fit. */
bool tms_host_store_make_room(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom);

/* ---- memory outside the store ---- */

/* Backup files on a file system in memory (tmpfs) are host memory as well: they count against the limits and in
 * resident_bytes. A claim checks for room; its bytes are in flight until tms_host_store_claim_used, when the system counts
 * them. TMS_OUT_OF_HOST_MEMORY, as for a chunk of the store. */
tms_status_t tms_host_store_claim(tms_host_store_t *store, uint64_t bytes, const tms_error_context_t *context,
                                  tms_error_t *error);
void tms_host_store_claim_used(tms_host_store_t *store, uint64_t bytes);
/* Called when the memory has been released to the system, after tms_host_store_claim_used. Takes no lock. */
void tms_host_store_disclaim(tms_host_store_t *store, uint64_t bytes);

#endif
