/* The work of a batch: chunks are allowed (checked against the headroom), prefaulted in parts, and pinned. The batch's own
 * threads prefault; a thread that waits for a chunk pins it. Fields of a batch change under the store's lock. */
#ifndef TMS_HOST_WORK_H
#define TMS_HOST_WORK_H

#include "backup/host/types.h"

enum { TMS_HOST_PREFAULTING_THREADS = 15 };

/* A chunk of a batch, by block and index, because the block may not be mapped yet. Entries become usable in order. */
typedef struct tms_host_entry {
    struct tms_host_block *block;
    size_t chunk;
} tms_host_entry_t;

struct tms_host_batch {
    tms_host_store_t *store;
    tms_error_context_t context;
    pid_t process; /* the process that made it */
    struct tms_host_block **blocks;
    size_t block_count, block_capacity; /* the capacity is a power of two */
    struct tms_host_block **slots;      /* the blocks by device, kind and group: open addressing, half of it free */
    uint64_t steps;                     /* slots that searches have visited; for complexity tests */
    tms_host_entry_t *entries;
    size_t entry_count, entry_capacity;
    bool mapped, cancelled, failed;
    size_t allowed;                 /* entries that may be prefaulted */
    size_t prefaulting;             /* entries whose parts have all been assigned to threads */
    uint64_t prefault_offset;       /* the assigned part of the next entry */
    size_t helped[TMS_MAX_DEVICES]; /* entries before this one need no help with the chunks of the device */
    uint64_t allowed_below;         /* room is checked again once in_flight_bytes is less */
    pthread_t prefaulters[TMS_HOST_PREFAULTING_THREADS];
    int prefaulter_count;
};

static inline tms_host_chunk_t *tms_host_entry_chunk(const tms_host_entry_t *entry) {
    return &entry->block->chunks[entry->chunk];
}

void tms_host_work_start(struct tms_host_batch *batch); /* starts as many threads as possible */
void tms_host_work_stop(struct tms_host_batch *batch);  /* cancels the work and joins the threads */
/* Works until every entry is usable, or the batch has failed or was cancelled. */
void tms_host_work_through(struct tms_host_batch *batch);
/* Called with the lock held, which it releases while it works. Pins a prefaulted chunk, or prefaults if the batch has no
 * thread. Returns false if there is nothing to do for this chunk now. */
bool tms_host_work_help(struct tms_host_batch *batch, tms_host_chunk_t *chunk);

#endif
