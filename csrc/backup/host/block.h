/* The system and driver calls on a block and its pieces. Any thread, without the store's lock; the caller has taken the
 * piece into a state in which no other thread uses it (backup/host/state.h). */
#ifndef TMS_HOST_BLOCK_H
#define TMS_HOST_BLOCK_H

#include "backup/host/state.h"

/* What a thread prefaults before it looks for more work. */
#define TMS_HOST_PREFAULT_BYTES ((uint64_t)4 << 20)

/* Maps block->bytes, which it rounds up (TMS_HOST_HUGE_PAGE_BYTES at most), and makes the pieces, none of which is resident.
 * TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_block_map(struct tms_host_block *block, const tms_error_context_t *context, tms_error_t *error);
/* Undoes that, before anything was prefaulted. */
void tms_host_block_unmap(struct tms_host_block *block);
/* Prefaults [from, from + bytes) of a piece: the system finds its pages. */
void tms_host_piece_prefault(tms_host_piece_t *piece, uint64_t from, uint64_t bytes);
/* Pins a piece. Where the driver refuses, it stays ordinary memory with piece->pinned false, and that is TMS_OK.
 * TMS_DRIVER_UNAVAILABLE where the driver has gone. */
tms_status_t tms_host_piece_pin(tms_host_piece_t *piece, const tms_error_context_t *context, tms_error_t *error);
/* Gives a piece back to the driver and the system. A driver that has gone may not have stopped the device: the piece is then
 * left as it is, and that is TMS_OK. */
tms_status_t tms_host_piece_give_back(tms_host_piece_t *piece, tms_error_t *error);
void tms_host_block_free(struct tms_host_block *block); /* NULL is fine */

#endif
