#include "backup/host/batch.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "backup/host/block.h"
#include "backup/host/gaps.h"
#include "backup/host/pool.h"
#include "backup/host/release.h"
#include "backup/host/room.h"
#include "backup/host/work.h"
#include "base/hash.h"

/* More bytes than a process can address. Sums of smaller sizes do not overflow. */
static const uint64_t too_much = (uint64_t)1 << 47;

tms_status_t tms_host_batch_create(struct tms_host_batch **batch, tms_host_store_t *store,
                                   const tms_error_context_t *context, tms_error_t *error) {
    struct tms_host_batch *made = calloc(1, sizeof *made);
    if (!made) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    made->store = store;
    made->context = (tms_error_context_t){.operation = context->operation, .device = TMS_NO_DEVICE};
    made->process = getpid();
    made->allowed_below = UINT64_MAX;
    *batch = made;
    return TMS_OK;
}

/* ---- planning ---- */

/* Returns the slot of the block for requests with these properties, or the free slot for it. */
static struct tms_host_block **find_slot(struct tms_host_batch *batch, int device, tms_backup_kind_t kind,
                                         const void *group) {
    const size_t mask = 2 * batch->block_capacity - 1;
    uint64_t hash = tms_hash_number(tms_hash_mix((uintptr_t)group), (uint64_t)device);
    for (hash = tms_hash_number(hash, (uint64_t)kind);; hash++) {
        struct tms_host_block **slot = &batch->slots[hash & mask];
        batch->steps++;
        if (!*slot || ((*slot)->device == device && (*slot)->kind == kind && (*slot)->group == group)) return slot;
    }
}

/* Makes room for one more block. Returns the name of the function of the C library that failed, or NULL. */
static const char *grow_blocks(struct tms_host_batch *batch) {
    enum { FIRST = 8 };
    if (batch->block_count < batch->block_capacity) return NULL;
    const size_t capacity = batch->block_capacity ? 2 * batch->block_capacity : FIRST;
    struct tms_host_block **grown = realloc(batch->blocks, capacity * sizeof(struct tms_host_block *));
    if (!grown) return "realloc";
    batch->blocks = grown;
    struct tms_host_block **slots = calloc(2 * capacity, sizeof(struct tms_host_block *));
    if (!slots) return "calloc";
    free(batch->slots);
    batch->slots = slots;
    batch->block_capacity = capacity;
    for (size_t i = 0; i < batch->block_count; i++) {
        const struct tms_host_block *block = batch->blocks[i];
        *find_slot(batch, block->device, block->kind, block->group) = batch->blocks[i];
    }
    return NULL;
}

/* Returns the block for requests like this one, which is made if there is none yet. Returns NULL and fills *error if memory
 * is short. */
static struct tms_host_block *block_for(struct tms_host_batch *batch, const tms_host_request_t *request,
                                        const tms_error_context_t *context, tms_error_t *error) {
    struct tms_host_block *block = NULL;
    const char *failed = grow_blocks(batch);
    if (!failed) {
        struct tms_host_block **slot = find_slot(batch, request->device, request->kind, request->group);
        block = *slot;
        if (block) return block;
        block = calloc(1, sizeof *block);
        *slot = block;
        if (!block) failed = "calloc";
    }
    if (failed) {
        (void)tms_error_set_os(error, context, failed, ENOMEM, NULL);
        return NULL;
    }
    block->store = batch->store;
    block->batch = batch;
    block->device = request->device;
    block->kind = request->kind;
    block->group = request->group;
    batch->blocks[batch->block_count++] = block;
    return block;
}

static bool add_entries(struct tms_host_batch *batch, struct tms_host_block *block, uint64_t bytes) {
    uint64_t unit = batch->store->chunk_bytes;
    size_t first = (size_t)((block->bytes + unit - 1) / unit), end = (size_t)((block->bytes + bytes + unit - 1) / unit);
    size_t wanted = batch->entry_count + (end - first);
    if (wanted > batch->entry_capacity) {
        size_t capacity = wanted * 2;
        tms_host_entry_t *grown = realloc(batch->entries, capacity * sizeof *grown);
        if (!grown) return false;
        batch->entries = grown;
        batch->entry_capacity = capacity;
    }
    for (size_t i = first; i < end; i++) batch->entries[batch->entry_count++] = (tms_host_entry_t){block, i};
    return true;
}

/* Extends the block for requests like this one by request->bytes. *end is its previous end. `for_pool`: the batch is a
 * reservation for the pool. */
static tms_status_t plan(struct tms_host_batch *batch, const tms_host_request_t *request, bool for_pool,
                         struct tms_host_block **block, uint64_t *end, const tms_error_context_t *context,
                         tms_error_t *error) {
    if (request->bytes > too_much) return tms_error_set_os(error, context, "mmap", ENOMEM, NULL);
    uint64_t bytes = tms_host_round(request->bytes, tms_host_page_bytes());
    struct tms_host_block *found = block_for(batch, request, context, error);
    if (!found) return TMS_OUT_OF_HOST_MEMORY;
    if (found->bytes + bytes > too_much) return tms_error_set_os(error, context, "mmap", ENOMEM, NULL);
    if (!add_entries(batch, found, bytes)) return tms_error_set_os(error, context, "realloc", ENOMEM, NULL);
    found->for_pool = for_pool;
    *block = found;
    *end = found->bytes;
    found->bytes += bytes;
    return TMS_OK;
}

tms_status_t tms_host_batch_plan_pool(struct tms_host_batch *batch, int device, uint64_t bytes,
                                      const tms_error_context_t *context, tms_error_t *error) {
    const tms_host_request_t request = {.bytes = bytes, .device = device, .kind = TMS_BACKUP_PINNED};
    struct tms_host_block *block = NULL;
    uint64_t end = 0;
    return plan(batch, &request, true, &block, &end, context, error);
}

tms_status_t tms_host_batch_add(struct tms_host_batch *batch, const tms_host_request_t *request, tms_host_buffer_t **buffer,
                                const tms_error_context_t *context, tms_error_t *error) {
    tms_host_store_t *store = batch->store;
    tms_status_t status = TMS_OK;
    tms_host_buffer_t *made = calloc(1, sizeof *made);
    if (!made) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    *made = (tms_host_buffer_t){.store = store, .kind = request->kind, .bytes = request->bytes, .process = batch->process};
    atomic_init(&made->references, 1);
    atomic_init(&made->policy, TMS_HOST_RELEASE);
    pthread_mutex_lock(&store->lock);
    if (request->bytes <= too_much) status = tms_host_pool_place(store, made, request->device, context, error);
    pthread_mutex_unlock(&store->lock);
    if (status == TMS_OK && !made->placed) {
        status = plan(batch, request, false, &made->block, &made->offset, context, error);
        if (status == TMS_OK) tms_host_buffer_link(made); /* the block is still private to this thread */
    }
    if (status != TMS_OK) {
        free(made);
        return status;
    }
    atomic_fetch_add(&store->buffer_bytes, made->bytes);
    *buffer = made;
    return TMS_OK;
}

/* ---- starting ---- */

/* Adds a mapped block to the store and sets the addresses of its buffers. Under the lock. */
static void list_block(struct tms_host_block *block) {
    tms_host_store_t *store = block->store;
    block->next = store->blocks;
    if (block->next) block->next->previous = block;
    store->blocks = block;
    block->listed = true;
    for (size_t i = 0; i < block->chunk_count; i++) {
        tms_host_chunk_t *chunk = &block->chunks[i];
        chunk->state = TMS_HOST_CHUNK_PLANNED;
        chunk->open = chunk->reserved = block->for_pool;
        store->planned_bytes += chunk->bytes;
        if (chunk->reserved) store->reserving_bytes += chunk->bytes;
    }
    if (block->for_pool) tms_host_gaps_add(block, 0, block->bytes);
    for (tms_host_buffer_t *buffer = block->first; buffer; buffer = buffer->next) {
        uint64_t end = buffer->offset + tms_host_buffer_extent(buffer);
        buffer->memory = block->memory + buffer->offset;
        for (uint64_t at = buffer->offset; at < end;) {
            tms_host_chunk_t *chunk = tms_host_chunk_at(block, at);
            chunk->buffers++;
            at = chunk->offset + chunk->bytes;
        }
    }
}

/* Maps a block, and adds an entry for a last chunk created by rounding. */
static tms_status_t add_last_chunk(struct tms_host_batch *batch, struct tms_host_block *block,
                                   const tms_error_context_t *context, tms_error_t *error) {
    uint64_t unit = batch->store->chunk_bytes, planned = block->bytes;
    tms_status_t status = tms_host_block_map(block, context, error);
    if (status != TMS_OK) return status;
    uint64_t mapped = block->bytes;
    block->bytes = planned;
    bool added = (mapped + unit - 1) / unit == (planned + unit - 1) / unit || add_entries(batch, block, mapped - planned);
    block->bytes = mapped;
    return added ? TMS_OK : tms_error_set_os(error, context, "realloc", ENOMEM, NULL);
}

tms_status_t tms_host_batch_check_room(struct tms_host_batch *batch, const tms_error_context_t *context,
                                       tms_error_t *error) {
    tms_host_store_t *store = batch->store;
    tms_host_headroom_t headroom;
    uint64_t bytes = 0;
    for (size_t i = 0; i < batch->block_count; i++) bytes += batch->blocks[i]->bytes;
    pthread_mutex_lock(&store->lock);
    uint64_t planned = store->planned_bytes;
    pthread_mutex_unlock(&store->lock);
    if (bytes > 0 && !tms_host_store_make_room(store, bytes + planned, &headroom))
        return tms_host_headroom_fail(&headroom, bytes + planned, context, error);
    return TMS_OK;
}

tms_status_t tms_host_batch_map(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error) {
    tms_host_store_t *store = batch->store;
    tms_status_t status = tms_host_batch_check_room(batch, context, error);
    if (status != TMS_OK) return status;
    for (size_t i = 0; i < batch->block_count && status == TMS_OK; i++)
        status = add_last_chunk(batch, batch->blocks[i], context, error);
    if (status != TMS_OK) {
        for (size_t i = 0; i < batch->block_count; i++) tms_host_block_unmap(batch->blocks[i]);
        return status;
    }
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < batch->block_count; i++) list_block(batch->blocks[i]);
    batch->mapped = true;
    pthread_mutex_unlock(&store->lock);
    return TMS_OK;
}

tms_status_t tms_host_batch_start(struct tms_host_batch *batch, const tms_error_context_t *context, tms_error_t *error) {
    tms_host_release_start(batch->store); /* releases chunks for which no thread could be started before */
    tms_status_t status = tms_host_batch_map(batch, context, error);
    if (status == TMS_OK && batch->entry_count > 0) tms_host_work_start(batch);
    return status;
}

/* ---- ending ---- */

/* Undoes the unfinished work on an entry. Under the lock. */
static void abandon(struct tms_host_batch *batch, size_t index) {
    tms_host_store_t *store = batch->store;
    tms_host_chunk_t *chunk = tms_host_entry_chunk(&batch->entries[index]);
    if (index >= batch->allowed) store->planned_bytes -= chunk->bytes;
    if (chunk->in_flight) store->in_flight_bytes -= chunk->bytes;
    if (chunk->reserved) store->reserving_bytes -= chunk->bytes;
    chunk->in_flight = chunk->reserved = false;
    tms_host_pool_give_up_unusable(chunk);
    if (chunk->state < TMS_HOST_CHUNK_USABLE) chunk->state = TMS_HOST_CHUNK_ABSENT;
    /* A chunk whose buffers have been dropped is retired. Idle chunks of the pool stay. */
    bool idle = chunk->open && chunk->state == TMS_HOST_CHUNK_USABLE;
    if (chunk->buffers == 0 && chunk->state <= TMS_HOST_CHUNK_USABLE && !idle)
        tms_host_chunk_retire(chunk, TMS_HOST_RELEASE, chunk->block->kind);
}

void tms_host_batch_destroy(struct tms_host_batch *batch) {
    if (!batch) return;
    tms_host_store_t *store = batch->store;
    if (batch->process == getpid()) { /* in a forked child its threads and blocks belong to the parent */
        tms_host_work_stop(batch);
        pthread_mutex_lock(&store->lock);
        for (size_t i = 0; batch->mapped && i < batch->entry_count; i++) abandon(batch, i);
        for (size_t i = 0; i < batch->block_count; i++) {
            batch->blocks[i]->batch = NULL;
            batch->blocks[i] = tms_host_block_forget(batch->blocks[i]);
        }
        pthread_cond_broadcast(&store->changed);
        pthread_mutex_unlock(&store->lock);
        for (size_t i = 0; i < batch->block_count; i++) tms_host_block_free(batch->blocks[i]);
        tms_host_release_start(store);
    }
    free(batch->blocks);
    free(batch->slots);
    free(batch->entries);
    free(batch);
}

/* ---- waiting and helping ---- */

bool tms_host_batch_help(struct tms_host_batch *batch, int device) {
    tms_host_store_t *store = batch->store;
    tms_host_chunk_t *found = NULL;
    pthread_mutex_lock(&store->lock);
    size_t *first = &batch->helped[device];
    for (size_t i = *first; i < batch->allowed && !found; i++) {
        tms_host_chunk_t *chunk = tms_host_entry_chunk(&batch->entries[i]);
        const bool needs_help = chunk->block->device == device && chunk->state <= TMS_HOST_CHUNK_PREFAULTED;
        store->steps++;
        if (i == *first && !needs_help) ++*first;
        if (needs_help && chunk->state == TMS_HOST_CHUNK_PREFAULTED) found = chunk;
    }
    bool helped = found && tms_host_work_help(batch, found);
    pthread_mutex_unlock(&store->lock);
    return helped;
}

static tms_status_t fail_await(const tms_host_buffer_t *buffer, const tms_error_context_t *context, tms_error_t *error) {
    const struct tms_host_block *block = buffer->block;
    if (block->failed) {
        if (error) *error = block->failure;
        return block->failure.status;
    }
    return tms_error_set(error, TMS_INVALID_STATE, context, "the host memory for this backup is not being prepared%s",
                         block->store->closing ? " any more, because the process is exiting" : "");
}

tms_status_t tms_host_buffer_await(tms_host_buffer_t *buffer, uint64_t offset, tms_wait_t *wait, uint64_t *bytes,
                                   const tms_error_context_t *context, tms_error_t *error) {
    tms_host_store_t *store = buffer->store;
    struct tms_host_block *block = buffer->block;
    tms_status_t status = TMS_OK;
    pthread_mutex_lock(&store->lock);
    for (;;) {
        tms_host_chunk_t *chunk = block->chunks ? tms_host_chunk_at(block, buffer->offset + offset) : NULL;
        if (chunk && chunk->state == TMS_HOST_CHUNK_USABLE) {
            uint64_t in_chunk = chunk->offset + chunk->bytes - (buffer->offset + offset), rest = buffer->bytes - offset;
            *bytes = rest < in_chunk ? rest : in_chunk;
            break;
        }
        if (!chunk || !block->batch || block->failed || store->closing) {
            status = fail_await(buffer, context, error);
            break;
        }
        /* The batch of a reservation has a thread of its own, which also destroys it. */
        if (block->for_pool || !tms_host_work_help(block->batch, chunk))
            tms_wait_on_condition(wait, &store->changed, &store->lock);
        pthread_mutex_unlock(&store->lock);
        status = tms_wait_check(wait, context, error);
        if (status != TMS_OK) return status;
        pthread_mutex_lock(&store->lock);
    }
    pthread_mutex_unlock(&store->lock);
    return status;
}

bool tms_host_buffer_is_pinned(tms_host_buffer_t *buffer, uint64_t offset) {
    tms_host_store_t *store = buffer->store;
    pthread_mutex_lock(&store->lock);
    bool pinned = tms_host_chunk_at(buffer->block, buffer->offset + offset)->pinned;
    pthread_mutex_unlock(&store->lock);
    return pinned;
}

/* ---- references ---- */

void tms_host_buffer_acquire(tms_host_buffer_t *buffer) { atomic_fetch_add(&buffer->references, 1); }

void tms_host_buffer_hand_out(tms_host_buffer_t *buffer) { atomic_store(&buffer->handed_out, true); }

void tms_host_buffer_drop(tms_host_buffer_t *buffer) {
    if (!buffer || atomic_fetch_sub(&buffer->references, 1) != 1) return;
    if (buffer->process == getpid()) { /* in a forked child the store belongs to the parent and has been forgotten */
        tms_host_store_t *store = buffer->store;
        atomic_fetch_sub(&store->buffer_bytes, buffer->bytes);
        pthread_mutex_lock(&store->lock);
        tms_host_buffer_unlink(buffer);
        struct tms_host_block *forgotten = tms_host_block_forget(buffer->block);
        pthread_mutex_unlock(&store->lock);
        tms_host_block_free(forgotten);
        tms_host_release_start(store);
    }
    free(buffer);
}

/* ---- as operations of a store ---- */

tms_status_t tms_host_batch_operation_start(void *batch, const tms_error_context_t *context, tms_error_t *error) {
    return tms_host_batch_start(batch, context, error);
}

tms_status_t tms_host_batch_operation_check_room(void *batch, const tms_error_context_t *context, tms_error_t *error) {
    return tms_host_batch_check_room(batch, context, error);
}

bool tms_host_batch_operation_help(void *batch, int device) { return tms_host_batch_help(batch, device); }

void tms_host_batch_operation_end(void *batch) { tms_host_batch_destroy(batch); }
