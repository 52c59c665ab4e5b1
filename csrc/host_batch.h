/* A batch of the host store under way: what host_batch.c (planning, beginning and ending) and host_work.c (the work, on the
 * threads of the batch or on those that wait for it) share. All under the store's lock. */
#ifndef TMS_HOST_BATCH_H
#define TMS_HOST_BATCH_H

#include "host_block.h"

enum { TMS_HOST_TOUCHING_THREADS = 15 };

/* A piece, in the order in which they are to become usable. Named so because its block may not be mapped yet. */
typedef struct tms_host_entry {
    struct tms_host_block *block;
    size_t piece;
} tms_host_entry_t;

struct tms_host_batch {
    tms_host_store_t *store;
    tms_error_context_t context;
    pid_t process; /* that made it */
    struct tms_host_block **blocks;
    size_t block_count;
    tms_host_entry_t *entries;
    size_t entry_count, entry_capacity;
    bool mapped, stop, failed;
    size_t allowed;         /* entries that may be touched */
    size_t touching;        /* entries all of whose parts have been given out */
    uint64_t touch_offset;  /* and so much of the next */
    uint64_t allowed_below; /* in_flight_bytes must be less before it is worth asking again whether more may be touched */
    pthread_t touchers[TMS_HOST_TOUCHING_THREADS];
    int toucher_count;
};

static inline tms_host_piece_t *tms_host_entry_piece(const tms_host_entry_t *entry) {
    return &entry->block->pieces[entry->piece];
}

/* host_batch.c, for tms_host_store_reserve. Plans a block without buffers, for the pool; maps what is planned, and tells the
 * store. */
tms_status_t tms_host_batch_plan_pool(struct tms_host_batch *batch, int device, uint64_t bytes,
                                      const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_host_batch_map(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error);

int tms_host_batch_touchers(const struct tms_host_batch *batch); /* how many threads are to touch */

/* host_work.c */
void tms_host_work_start(struct tms_host_batch *batch); /* as many threads as can be had */
void tms_host_work_stop(struct tms_host_batch *batch);  /* and joins them */
/* Works until all is usable, or the batch has failed or is to stop. */
void tms_host_work_through(struct tms_host_batch *batch);
/* With the lock, which it gives up meanwhile: page-locks a touched piece, and where no thread touches, touches. False: there
 * is nothing to do for it now. */
bool tms_host_work_help(struct tms_host_batch *batch, tms_host_piece_t *piece);

#endif
