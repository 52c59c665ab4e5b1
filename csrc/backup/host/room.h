/* How much more host memory the store may take, and how it makes room. Any thread, without the store's lock. */
#ifndef TMS_HOST_ROOM_H
#define TMS_HOST_ROOM_H

#include "backup/host/state.h"

/* Whether `bytes` more may become resident beside what is in flight; what the tightest limit is. */
bool tms_host_store_fits(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom);
/* Gives back what waits for that, then idle pooled memory, until `bytes` more fit. */
bool tms_host_store_make_room(tms_host_store_t *store, uint64_t bytes, tms_host_headroom_t *headroom);

/* ---- memory that is not the store's ---- */

/* Backup files of a file system in memory are host memory, too: they count against the limits and in resident_bytes. A claim
 * asks whether there is room; its bytes are in flight until tms_host_store_claim_used says that the system counts them.
 * TMS_OUT_OF_HOST_MEMORY, as for a piece of the store. */
tms_status_t tms_host_store_claim(tms_host_store_t *store, uint64_t bytes, const tms_error_context_t *context,
                                  tms_error_t *error);
void tms_host_store_claim_used(tms_host_store_t *store, uint64_t bytes);
/* The memory is back with the system, after tms_host_store_claim_used. Takes no lock. */
void tms_host_store_disclaim(tms_host_store_t *store, uint64_t bytes);

#endif
