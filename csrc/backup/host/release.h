/* Releasing host memory: the queue of pieces that are not needed any more, and the threads that give them back. */
#ifndef TMS_HOST_RELEASE_H
#define TMS_HOST_RELEASE_H

#include "backup/host/state.h"

/* ---- under the store's lock ---- */

/* A piece in which nothing lies is to be given back. */
void tms_host_release_queue(tms_host_piece_t *piece, tms_backup_kind_t kind);
/* Takes a block off the store's list if nothing is left of it, to be freed by the caller; else NULL. */
struct tms_host_block *tms_host_block_forget(struct tms_host_block *block);

/* ---- without it ---- */

/* Starts the releasing thread if there is something for it to do. */
void tms_host_release_start(tms_host_store_t *store);
/* On this thread: releases everything of kind MMAP that waits for it. Also waits for what another thread is releasing. */
void tms_host_store_release_now(tms_host_store_t *store);
/* Has everything in the quarantine that holds host memory tried again on a thread, because unpinning waits for the device
 * and no caller should. Cheap when there is nothing. */
void tms_host_store_retry(tms_host_store_t *store);
/* Returns when nothing waits to be released; releases on this thread too. */
void tms_host_store_settle(tms_host_store_t *store);

#endif
