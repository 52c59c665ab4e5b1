/* The gaps of the pool: its memory without buffers, where buffers may be placed. The functions are called on any thread,
 * with the store's lock held.
 *
 * A gap is as long as possible: it ends at a buffer, at memory that is not in the pool, or at the end of its block. Gaps are
 * found by address in a tree, and by size in lists. Each list has the gaps of one device whose sizes have the same number of
 * bits. A search compares a limited number of gaps of its own list, and takes the first gap of the next list that has one.
 * So a search costs no more when there are thousands of buffers. It may miss a gap of its own list that would fit.
 *
 * Giving memory back allocates nothing. A block has a gap for each of its chunks and for each buffer that was placed in it,
 * because a gap begins where a chunk begins or where a buffer ends. */
#ifndef TMS_HOST_GAPS_H
#define TMS_HOST_GAPS_H

#include "backup/host/types.h"

/* Called when a block has been mapped, which has no gaps yet. */
void tms_host_gaps_prepare(struct tms_host_block *block);
/* Frees the gaps of a block whose memory is gone. */
void tms_host_gaps_release(struct tms_host_block *block);

/* Makes a part of a block available. It is merged with the gaps beside it. */
void tms_host_gaps_add(struct tms_host_block *block, uint64_t offset, uint64_t end);
/* Makes a part of a block unavailable, if it was available. */
void tms_host_gaps_remove(struct tms_host_block *block, uint64_t offset, uint64_t end);

/* Finds a gap of `bytes` or more, in memory of `device` first. Returns NULL if no gap was found. */
tms_host_gap_t *tms_host_gaps_find(tms_host_store_t *store, int device, uint64_t bytes);
/* Takes `bytes` from the beginning of a gap, for a buffer. *offset is their offset in its block. Returns false if there is
 * no memory for another gap. */
bool tms_host_gaps_take(tms_host_gap_t *gap, uint64_t bytes, uint64_t *offset);

#endif
