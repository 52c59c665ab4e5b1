/* Where buffers lie in their blocks, and the pool of idle memory. Everything here is called with the store's lock held. */
#ifndef TMS_HOST_POOL_H
#define TMS_HOST_POOL_H

#include "backup/host/state.h"

/* A place for a buffer in the pool: links it there and sets its block, offset and memory. */
bool tms_host_pool_place(tms_host_store_t *store, tms_host_buffer_t *buffer, int device);
/* A buffer leaves, or enters, the list of its block between its neighbours and the pieces that it lies in. */
void tms_host_buffer_link(tms_host_buffer_t *buffer, tms_host_buffer_t *after);
void tms_host_buffer_unlink(tms_host_buffer_t *buffer);
/* A usable piece in which nothing lies becomes the pool's. */
void tms_host_pool_take(tms_host_piece_t *piece);
/* Has idle pooled memory wait to be given back: at least `bytes` of it, if there is so much. */
void tms_host_pool_give_up(tms_host_store_t *store, uint64_t bytes);
/* What becomes of a piece whose last buffer has left. */
void tms_host_piece_retire(tms_host_piece_t *piece, tms_host_policy_t policy, tms_backup_kind_t kind);

#endif
