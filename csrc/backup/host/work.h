/* The work of a batch: its pieces are allowed, prefaulted in parts, and pinned. The batch's own threads prefault; a thread
 * that waits for a piece pins it. Fields of a batch change under the store's lock. */
#ifndef TMS_HOST_WORK_H
#define TMS_HOST_WORK_H

#include "backup/host/state.h"

enum { TMS_HOST_PREFAULTING_THREADS = 15 };

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
    bool mapped, cancelled, failed;
    size_t allowed;           /* entries that may be prefaulted */
    size_t prefaulting;       /* entries all of whose parts have been given out */
    uint64_t prefault_offset; /* and so much of the next */
    uint64_t allowed_below;   /* in_flight_bytes must be less before it is worth asking for more room again */
    pthread_t prefaulters[TMS_HOST_PREFAULTING_THREADS];
    int prefaulter_count;
};

static inline tms_host_piece_t *tms_host_entry_piece(const tms_host_entry_t *entry) {
    return &entry->block->pieces[entry->piece];
}

void tms_host_work_start(struct tms_host_batch *batch); /* as many threads as can be had */
void tms_host_work_stop(struct tms_host_batch *batch);  /* and joins them */
/* Works until all is usable, or the batch has failed or was cancelled. */
void tms_host_work_through(struct tms_host_batch *batch);
/* With the lock, which it releases while it works: pins a prefaulted piece; prefaults where the batch has no thread for
 * that. False: there is nothing to do for it now. */
bool tms_host_work_help(struct tms_host_batch *batch, tms_host_piece_t *piece);

#endif
