/* The system and driver calls on a block and its chunks. Any thread, without the store's lock. The caller has put the chunk
 * into a state in which it owns the chunk (backup/host/types.h). */
#ifndef TMS_HOST_BLOCK_H
#define TMS_HOST_BLOCK_H

#include "backup/host/types.h"

/* The bytes that a thread prefaults in one step. */
#define TMS_HOST_PREFAULT_BYTES ((uint64_t)4 << 20)

/* Maps block->bytes, rounded up to whole pages or huge pages, and creates the chunks, none of which is resident.
 * TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_block_map(struct tms_host_block *block, const tms_error_context_t *context, tms_error_t *error);
/* Undoes tms_host_block_map before anything was prefaulted. */
void tms_host_block_unmap(struct tms_host_block *block);
/* Prefaults [from, from + bytes) of a chunk. */
void tms_host_chunk_prefault(tms_host_chunk_t *chunk, uint64_t from, uint64_t bytes);
/* Pins a chunk. If the driver fails to, the chunk stays pageable with chunk->pinned false, and the result is TMS_OK.
 * TMS_DRIVER_UNAVAILABLE if the driver has shut down. */
tms_status_t tms_host_chunk_pin(tms_host_chunk_t *chunk, const tms_error_context_t *context, tms_error_t *error);
/* Unpins and unmaps a chunk. If the driver has shut down, the device may still be running: the chunk is left unchanged, and
 * the result is TMS_OK. */
tms_status_t tms_host_chunk_give_back(tms_host_chunk_t *chunk, tms_error_t *error);
void tms_host_block_free(struct tms_host_block *block); /* accepts NULL */

#endif
