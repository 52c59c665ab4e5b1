/* The placement of buffers in their blocks, and the pool of idle memory. Any thread may call, with the store's lock held. */
#ifndef TMS_HOST_POOL_H
#define TMS_HOST_POOL_H

#include "backup/host/types.h"

/* Places a buffer in the pool, if that has room: links the buffer and sets its block, offset and memory, and `placed`.
 * TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_pool_place(tms_host_store_t *store, tms_host_buffer_t *buffer, int device,
                                 const tms_error_context_t *context, tms_error_t *error);
/* Add a buffer to the list of its block and to the chunks that it overlaps, or remove it. */
void tms_host_buffer_link(tms_host_buffer_t *buffer);
void tms_host_buffer_unlink(tms_host_buffer_t *buffer);
/* Adds a usable chunk without buffers to the pool. */
void tms_host_pool_take(tms_host_chunk_t *chunk);
/* Keeps buffers out of a chunk that will not become usable. Does nothing for other chunks. */
void tms_host_pool_give_up_unusable(tms_host_chunk_t *chunk);
/* Queues idle pooled memory for release: at least `bytes`, or all. */
void tms_host_pool_give_up(tms_host_store_t *store, uint64_t bytes);
/* Keeps a chunk whose last buffer was removed in the pool, or queues it for release. */
void tms_host_chunk_retire(tms_host_chunk_t *chunk, tms_host_policy_t policy, tms_backup_kind_t kind);

#endif
