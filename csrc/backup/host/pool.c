#include "backup/host/pool.h"

#include <errno.h>

#include "backup/host/gaps.h"
#include "backup/host/release.h"

/* Whether a piece of the pool is usable or is still being prepared. */
static bool is_placeable(const tms_host_chunk_t *piece) {
    if (!piece->open || piece->state > TMS_PIECE_USABLE || piece->state == TMS_PIECE_ABSENT) return false;
    return piece->state >= TMS_PIECE_PINNING || !piece->block->failed;
}

/* ---- pieces without buffers ---- */

void tms_host_pool_take(tms_host_chunk_t *piece) {
    if (!piece->open) tms_host_gaps_add(piece->block, piece->offset, piece->offset + piece->bytes);
    piece->open = true;
    atomic_fetch_add(&piece->block->store->pooled_bytes, piece->bytes);
}

void tms_host_chunk_retire(tms_host_chunk_t *piece, tms_host_policy_t policy, tms_backup_kind_t kind) {
    tms_host_store_t *store = piece->block->store;
    /* A piece in another state belongs to its batch, which retires it at the end. */
    if (piece->state != TMS_PIECE_USABLE && piece->state != TMS_PIECE_ABSENT) return;
    /* Reserved pieces will enter the pool in any case. */
    uint64_t held = atomic_load(&store->pooled_bytes) + store->reserving_bytes;
    bool fits = piece->bytes <= store->pool_limit_bytes && held <= store->pool_limit_bytes - piece->bytes;
    if (piece->state == TMS_PIECE_USABLE && policy == TMS_HOST_POOL && fits)
        tms_host_pool_take(piece);
    else
        tms_host_release_queue(piece, kind);
}

void tms_host_pool_give_up_unusable(tms_host_chunk_t *piece) {
    if (piece->open && piece->state < TMS_PIECE_PINNING)
        tms_host_gaps_remove(piece->block, piece->offset, piece->offset + piece->bytes);
}

/* ---- buffers ---- */

static void count_in(tms_host_chunk_t *piece) {
    if (piece->buffers++ == 0 && piece->open && piece->state == TMS_PIECE_USABLE)
        atomic_fetch_sub(&piece->block->store->pooled_bytes, piece->bytes);
}

/* Returns the last piece that a buffer lies in. */
static tms_host_chunk_t *last_piece(const tms_host_buffer_t *buffer) {
    return tms_host_chunk_at(buffer->block, buffer->offset + tms_host_buffer_extent(buffer) - 1);
}

void tms_host_buffer_link(tms_host_buffer_t *buffer) {
    struct tms_host_block *block = buffer->block;
    buffer->previous = NULL;
    buffer->next = block->first;
    if (buffer->next) buffer->next->previous = buffer;
    block->first = buffer;
    if (!block->pieces) return; /* planned: counted when the block is mapped */
    for (tms_host_chunk_t *piece = tms_host_chunk_at(block, buffer->offset); piece <= last_piece(buffer); piece++)
        count_in(piece);
}

/* Makes the part of a removed buffer that lies in the piece available to other buffers. */
static void leave_gap(const tms_host_chunk_t *piece, const tms_host_buffer_t *buffer) {
    const uint64_t end = buffer->offset + tms_host_buffer_extent(buffer), end_of_piece = piece->offset + piece->bytes;
    if (is_placeable(piece))
        tms_host_gaps_add(piece->block, buffer->offset > piece->offset ? buffer->offset : piece->offset,
                          end < end_of_piece ? end : end_of_piece);
}

void tms_host_buffer_unlink(tms_host_buffer_t *buffer) {
    struct tms_host_block *block = buffer->block;
    *(buffer->previous ? &buffer->previous->next : &block->first) = buffer->next;
    if (buffer->next) buffer->next->previous = buffer->previous;
    if (!block->pieces) return;
    tms_host_policy_t policy = (tms_host_policy_t)atomic_load(&buffer->policy);
    for (tms_host_chunk_t *piece = tms_host_chunk_at(block, buffer->offset); piece <= last_piece(buffer); piece++) {
        leave_gap(piece, buffer);
        if (--piece->buffers == 0) tms_host_chunk_retire(piece, policy, buffer->kind);
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

static bool is_idle(const tms_host_chunk_t *piece) {
    return piece->open && piece->state == TMS_PIECE_USABLE && piece->buffers == 0;
}

void tms_host_pool_give_up(tms_host_store_t *store, uint64_t bytes) {
    uint64_t given = 0;
    for (struct tms_host_block *block = store->blocks; block && given < bytes; block = block->next) {
        for (size_t i = block->piece_count; i-- > 0 && given < bytes;) {
            tms_host_chunk_t *piece = &block->pieces[i];
            if (!is_idle(piece)) continue;
            given += piece->bytes;
            atomic_fetch_sub(&store->pooled_bytes, piece->bytes);
            tms_host_release_queue(piece, TMS_BACKUP_PINNED);
        }
    }
}
