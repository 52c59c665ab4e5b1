/* Releasing host memory: the queue of chunks that are no longer needed, and the threads that release them. Any thread. */
#ifndef TMS_HOST_RELEASE_H
#define TMS_HOST_RELEASE_H

#include "backup/host/types.h"

/* ---- under the store's lock ---- */

/* Queues a chunk without buffers for release. */
void tms_host_release_queue(tms_host_chunk_t *chunk, tms_backup_kind_t kind);
/* Removes a block from the store's list if nothing is left of it, and returns it to be freed by the caller; else NULL. */
struct tms_host_block *tms_host_block_forget(struct tms_host_block *block);

/* ---- without it ---- */

/* Starts the releasing thread if a chunk is queued. */
void tms_host_release_start(tms_host_store_t *store);
/* Releases all queued chunks of kind MMAP on this thread, and waits for the chunks that other threads are releasing. */
void tms_host_store_release_now(tms_host_store_t *store);
/* Retries the quarantined host memory on a background thread, because unpinning waits for the device. Cheap when there is
 * none. */
void tms_host_store_retry(tms_host_store_t *store);
/* Releases all queued chunks, on this thread as well, and returns when none is left. */
void tms_host_store_settle(tms_host_store_t *store);

#endif
