#include "backup/host/pool.h"

#include <errno.h>

#include "backup/host/gaps.h"
#include "backup/host/release.h"

/* Whether a chunk of the pool is usable or is still being prepared. */
static bool is_placeable(const tms_host_chunk_t *chunk) {
    if (!chunk->open || chunk->state > TMS_HOST_CHUNK_USABLE || chunk->state == TMS_HOST_CHUNK_ABSENT) return false;
    return chunk->state >= TMS_HOST_CHUNK_PINNING || !chunk->block->failed;
}

/* ---- chunks without buffers ---- */

void tms_host_pool_take(tms_host_chunk_t *chunk) {
    if (!chunk->open) tms_host_gaps_add(chunk->block, chunk->offset, chunk->offset + chunk->bytes);
    chunk->open = true;
    atomic_fetch_add(&chunk->block->store->pooled_bytes, chunk->bytes);
}

void tms_host_chunk_retire(tms_host_chunk_t *chunk, tms_host_policy_t policy, tms_backup_kind_t kind) {
    tms_host_store_t *store = chunk->block->store;
    /* A chunk in another state belongs to its batch, which retires it at the end. */
    if (chunk->state != TMS_HOST_CHUNK_USABLE && chunk->state != TMS_HOST_CHUNK_ABSENT) return;
    /* Reserved chunks will enter the pool in any case. */
    uint64_t held = atomic_load(&store->pooled_bytes) + store->reserving_bytes;
    bool fits = chunk->bytes <= store->pool_limit_bytes && held <= store->pool_limit_bytes - chunk->bytes;
    if (chunk->state == TMS_HOST_CHUNK_USABLE && policy == TMS_HOST_POOL && fits)
        tms_host_pool_take(chunk);
    else
        tms_host_release_queue(chunk, kind);
}

void tms_host_pool_give_up_unusable(tms_host_chunk_t *chunk) {
    if (chunk->open && chunk->state < TMS_HOST_CHUNK_PINNING)
        tms_host_gaps_remove(chunk->block, chunk->offset, chunk->offset + chunk->bytes);
}

/* ---- buffers ---- */

static void count_in(tms_host_chunk_t *chunk) {
    if (chunk->buffers++ == 0 && chunk->open && chunk->state == TMS_HOST_CHUNK_USABLE)
        atomic_fetch_sub(&chunk->block->store->pooled_bytes, chunk->bytes);
}

/* Returns the last chunk that a buffer lies in. */
static tms_host_chunk_t *last_chunk(const tms_host_buffer_t *buffer) {
    return tms_host_chunk_at(buffer->block, buffer->offset + tms_host_buffer_extent(buffer) - 1);
}

void tms_host_buffer_link(tms_host_buffer_t *buffer) {
    struct tms_host_block *block = buffer->block;
    buffer->previous = NULL;
    buffer->next = block->first;
    if (buffer->next) buffer->next->previous = buffer;
    block->first = buffer;
    if (!block->chunks) return; /* planned: counted when the block is mapped */
    for (tms_host_chunk_t *chunk = tms_host_chunk_at(block, buffer->offset); chunk <= last_chunk(buffer); chunk++)
        count_in(chunk);
}

/* Makes the part of a removed buffer that lies in the chunk available to other buffers. */
static void leave_gap(const tms_host_chunk_t *chunk, const tms_host_buffer_t *buffer) {
    const uint64_t end = buffer->offset + tms_host_buffer_extent(buffer), end_of_chunk = chunk->offset + chunk->bytes;
    if (is_placeable(chunk))
        tms_host_gaps_add(chunk->block, buffer->offset > chunk->offset ? buffer->offset : chunk->offset,
                          end < end_of_chunk ? end : end_of_chunk);
}

void tms_host_buffer_unlink(tms_host_buffer_t *buffer) {
    struct tms_host_block *block = buffer->block;
    *(buffer->previous ? &buffer->previous->next : &block->first) = buffer->next;
    if (buffer->next) buffer->next->previous = buffer->previous;
    if (!block->chunks) return;
    tms_host_policy_t policy = (tms_host_policy_t)atomic_load(&buffer->policy);
    for (tms_host_chunk_t *chunk = tms_host_chunk_at(block, buffer->offset); chunk <= last_chunk(buffer); chunk++) {
        leave_gap(chunk, buffer);
        if (--chunk->buffers == 0) tms_host_chunk_retire(chunk, policy, buffer->kind);
    }
    block->placed -= buffer->placed;
}

tms_status_t tms_host_pool_place(tms_host_store_t *store, tms_host_buffer_t *buffer, int device,
                                 const tms_error_context_t *context, tms_error_t *error) {
    const uint64_t bytes = tms_host_buffer_extent(buffer);
    tms_host_gap_t *gap = tms_host_gaps_find(store, device, bytes);
    if (!gap) return TMS_OK;
    struct tms_host_block *block = gap->block; /* the gap may belong to other memory afterwards */
    if (!tms_host_gaps_take(gap, bytes, &buffer->offset)) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    buffer->block = block;
    buffer->memory = block->memory + buffer->offset;
    buffer->placed = true;
    tms_host_buffer_link(buffer);
    return TMS_OK;
}

/* ---- the pool ---- */

static bool is_idle(const tms_host_chunk_t *chunk) {
    return chunk->open && chunk->state == TMS_HOST_CHUNK_USABLE && chunk->buffers == 0;
}

void tms_host_pool_give_up(tms_host_store_t *store, uint64_t bytes) {
    uint64_t given = 0;
    for (struct tms_host_block *block = store->blocks; block && given < bytes; block = block->next) {
        for (size_t i = block->chunk_count; i-- > 0 && given < bytes;) {
            tms_host_chunk_t *chunk = &block->chunks[i];
            if (!is_idle(chunk)) continue;
            given += chunk->bytes;
            atomic_fetch_sub(&store->pooled_bytes, chunk->bytes);
            tms_host_release_queue(chunk, TMS_BACKUP_PINNED);
        }
    }
}
