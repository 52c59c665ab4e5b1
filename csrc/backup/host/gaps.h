/* The gaps of the pool: its memory without buffers, where buffers may be placed. The functions are called on any thread,
 * with the store's lock held.
 *
 * A gap is as long as possible: it ends at a buffer, at memory that is not in the pool, or at the end of its block. Gaps are
 * found by address in a tree, and by size among lists, of which each has the gaps of one device whose sizes have the same
 * number of bits. A search compares a limited number of gaps of its own list, and takes the first gap of the next list that
 * has one. So it costs no more where there are thousands of buffers, and may miss a gap that is not much too large.
 *
 * Giving memory back allocates nothing. A block has a gap for each of its pieces and for each buffer that was placed in it,
 * because a gap begins where a piece begins or where a buffer ends. */
#ifndef TMS_HOST_GAPS_H
#define TMS_HOST_GAPS_H

#include "backup/host/types.h"

/* A block was mapped, without gaps so far. */
void tms_host_gaps_prepare(struct tms_host_block *block);
/* Frees the gaps of a block whose memory is gone. */
void tms_host_gaps_release(struct tms_host_block *block);

/* A part of a block becomes available. It joins the gaps beside it. */
void tms_host_gaps_add(struct tms_host_block *block, uint64_t offset, uint64_t end);
/* A part of a block is not available any more, if it was. */
void tms_host_gaps_remove(struct tms_host_block *block, uint64_t offset, uint64_t end);

/* Finds a gap of `bytes` or more, in memory of `device` first. Returns NULL if no gap was found. */
tms_host_gap_t *tms_host_gaps_find(tms_host_store_t *store, int device, uint64_t bytes);
/* Takes `bytes` from the beginning of a gap, for a buffer. *offset: where they are in its block. False: the system has no
 * memory for another gap. */
bool tms_host_gaps_take(tms_host_gap_t *gap, uint64_t bytes, uint64_t *offset);

#endif
