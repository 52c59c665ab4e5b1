#include "backup/host/pool.h"

#include "backup/host/release.h"

/* ---- pieces without buffers ---- */

void tms_host_pool_take(tms_host_piece_t *piece) {
    piece->open = true;
    atomic_fetch_add(&piece->block->store->pooled_bytes, piece->bytes);
}

void tms_host_piece_retire(tms_host_piece_t *piece, tms_host_policy_t policy, tms_backup_kind_t kind) {
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

/* ---- the list of a block ---- */

static void count_in(tms_host_piece_t *piece) {
    if (piece->buffers++ == 0 && piece->open && piece->state == TMS_PIECE_USABLE)
        atomic_fetch_sub(&piece->block->store->pooled_bytes, piece->bytes);
}

/* The last piece that a buffer lies in. */
static tms_host_piece_t *last_piece(const tms_host_buffer_t *buffer) {
    return tms_host_piece_at(buffer->block, buffer->offset + tms_host_buffer_extent(buffer) - 1);
}

void tms_host_buffer_link(tms_host_buffer_t *buffer, tms_host_buffer_t *after) {
    struct tms_host_block *block = buffer->block;
    buffer->previous = after;
    buffer->next = after ? after->next : block->first;
    *(buffer->previous ? &buffer->previous->next : &block->first) = buffer;
    *(buffer->next ? &buffer->next->previous : &block->last) = buffer;
    block->used += tms_host_buffer_extent(buffer);
    if (!block->pieces) return; /* planned: counted when the block is mapped */
    for (tms_host_piece_t *piece = tms_host_piece_at(block, buffer->offset); piece <= last_piece(buffer); piece++)
        count_in(piece);
}

void tms_host_buffer_unlink(tms_host_buffer_t *buffer) {
    struct tms_host_block *block = buffer->block;
    *(buffer->previous ? &buffer->previous->next : &block->first) = buffer->next;
    *(buffer->next ? &buffer->next->previous : &block->last) = buffer->previous;
    block->used -= tms_host_buffer_extent(buffer);
    for (int i = 0; i < TMS_MAX_DEVICES; i++) {
        if (block->store->recent[i] == buffer) block->store->recent[i] = buffer->previous;
    }
    if (!block->pieces) return;
    tms_host_policy_t policy = (tms_host_policy_t)atomic_load(&buffer->policy);
    for (tms_host_piece_t *piece = tms_host_piece_at(block, buffer->offset); piece <= last_piece(buffer); piece++) {
        if (--piece->buffers == 0) tms_host_piece_retire(piece, policy, buffer->kind);
    }
}

/* ---- places ---- */

static bool is_placeable(const tms_host_piece_t *piece) {
    if (!piece->open || piece->state > TMS_PIECE_USABLE || piece->state == TMS_PIECE_ABSENT) return false;
    return piece->state == TMS_PIECE_USABLE || !piece->block->failed;
}

/* Finds room for `bytes` in the gap after `after` (NULL: before the first buffer), in pieces of the pool only. */
static bool find_in_gap(const struct tms_host_block *block, const tms_host_buffer_t *after, uint64_t bytes,
                        uint64_t *offset) {
    const tms_host_buffer_t *next = after ? after->next : block->first;
    uint64_t begin = after ? after->offset + tms_host_buffer_extent(after) : 0, end = next ? next->offset : block->bytes;
    uint64_t at = begin;
    while (at < end && end - begin >= bytes) {
        const tms_host_piece_t *piece = tms_host_piece_at(block, at);
        at = piece->offset + piece->bytes;
        if (!is_placeable(piece)) {
            begin = at;
        } else if (at - begin >= bytes) {
            *offset = begin;
            return true;
        }
    }
    return false;
}

static bool place_in_gap(struct tms_host_block *block, tms_host_buffer_t *after, tms_host_buffer_t *buffer, int device) {
    uint64_t offset = 0;
    if (!find_in_gap(block, after, tms_host_buffer_extent(buffer), &offset)) return false;
    buffer->block = block;
    buffer->offset = offset;
    buffer->memory = block->memory + offset;
    tms_host_buffer_link(buffer, after);
    block->store->recent[device] = buffer;
    return true;
}

static bool place_in_block(struct tms_host_block *block, tms_host_buffer_t *buffer, int device) {
    if (block->bytes - block->used < buffer->bytes) return false;
    if (place_in_gap(block, NULL, buffer, device)) return true;
    for (tms_host_buffer_t *after = block->first; after; after = after->next) {
        if (place_in_gap(block, after, buffer, device)) return true;
    }
    return false;
}

bool tms_host_pool_place(tms_host_store_t *store, tms_host_buffer_t *buffer, int device) {
    tms_host_buffer_t *recent = store->recent[device];
    if (recent && place_in_gap(recent->block, recent, buffer, device)) return true;
    for (struct tms_host_block *block = store->blocks; block; block = block->next) {
        if (block->device == device && place_in_block(block, buffer, device)) return true;
    }
    for (struct tms_host_block *block = store->blocks; block; block = block->next) {
        if (block->device != device && place_in_block(block, buffer, device)) return true;
    }
    return false;
}

/* ---- the pool ---- */

static bool is_idle(const tms_host_piece_t *piece) {
    return piece->open && piece->state == TMS_PIECE_USABLE && piece->buffers == 0;
}

void tms_host_pool_give_up(tms_host_store_t *store, uint64_t bytes) {
    uint64_t given = 0;
    for (struct tms_host_block *block = store->blocks; block && given < bytes; block = block->next) {
        for (size_t i = block->piece_count; i-- > 0 && given < bytes;) {
            tms_host_piece_t *piece = &block->pieces[i];
            if (!is_idle(piece)) continue;
            given += piece->bytes;
            atomic_fetch_sub(&store->pooled_bytes, piece->bytes);
            tms_host_release_queue(piece, TMS_BACKUP_PINNED);
        }
    }
}
