#include "base/address_space.h"

#include <stdlib.h>

/* How many free pieces of the class of a size are compared. Those of the next classes are all large enough. */
enum { COMPARED_MOST = 16, BITS = 64 };

static int class_of(uint64_t bytes) { return BITS - 1 - __builtin_clzll(bytes); }

static void push(tms_piece_t *piece) {
    tms_piece_t **list = &piece->range->space->free[class_of(tms_piece_bytes(piece))];
    piece->in_use = false;
    piece->previous_free = NULL;
    piece->next_free = *list;
    if (*list) (*list)->previous_free = piece;
    *list = piece;
}

static void pop(tms_piece_t *piece) {
    tms_piece_t **list = &piece->range->space->free[class_of(tms_piece_bytes(piece))];
    if (piece->previous_free)
        piece->previous_free->next_free = piece->next_free;
    else
        *list = piece->next_free;
    if (piece->next_free) piece->next_free->previous_free = piece->previous_free;
    piece->previous_free = piece->next_free = NULL;
}

/* ---- ranges ---- */

uint64_t tms_space_growth(const tms_space_t *space, uint64_t bytes) {
    if (bytes >= TMS_SPACE_ALONE_BYTES) return bytes;
    uint64_t size = space->reserved_bytes < TMS_SPACE_RANGE_MOST_BYTES ? space->reserved_bytes : TMS_SPACE_RANGE_MOST_BYTES;
    return size > bytes ? size : bytes;
}

bool tms_space_add(tms_space_t *space, tms_range_t *range) {
    tms_piece_t *piece = calloc(1, sizeof *piece);
    if (!piece) return false;
    *piece = (tms_piece_t){.begin = range->node.begin, .end = range->node.end, .range = range};
    range->space = space;
    range->first = piece;
    space->reserved_bytes += tms_piece_bytes(piece);
    push(piece);
    return true;
}

void tms_space_remove(tms_range_t *range) {
    range->space->reserved_bytes -= tms_piece_bytes(range->first);
    pop(range->first);
    free(range->first);
    range->first = NULL;
    range->space = NULL;
}

/* ---- pieces ---- */

/* The smallest of the compared pieces of the class that is large enough, or NULL. */
static tms_piece_t *compare(tms_space_t *space, uint64_t bytes) {
    tms_piece_t *best = NULL, *piece = space->free[class_of(bytes)];
    for (int compared = 0; piece && compared < COMPARED_MOST; compared++, piece = piece->next_free) {
        space->steps++;
        uint64_t size = tms_piece_bytes(piece);
        if (size >= bytes && (!best || size < tms_piece_bytes(best))) best = piece;
    }
    return best;
}

static tms_piece_t *find(tms_space_t *space, uint64_t bytes) {
    tms_piece_t *piece = compare(space, bytes);
    for (int i = class_of(bytes) + 1; i < TMS_SPACE_CLASSES && !piece; i++) piece = space->free[i];
    return piece;
}

bool tms_space_has_room(tms_space_t *space, uint64_t bytes) { return find(space, bytes) != NULL; }

tms_piece_t *tms_space_take(tms_space_t *space, uint64_t bytes) {
    tms_piece_t *piece = find(space, bytes), *rest = NULL;
    if (!piece) return NULL;
    bool whole = tms_piece_bytes(piece) == bytes;
    if (!whole && !(rest = calloc(1, sizeof *rest))) return NULL;
    pop(piece);
    if (rest) {
        *rest = (tms_piece_t){
            .begin = piece->begin + bytes, .end = piece->end, .range = piece->range, .before = piece, .after = piece->after};
        if (rest->after) rest->after->before = rest;
        piece->after = rest;
        piece->end = rest->begin;
        push(rest);
    }
    piece->in_use = true;
    piece->range->in_use++;
    space->in_use_bytes += bytes;
    return piece;
}

/* Makes a free piece one with the free piece behind it. Both are on no list. */
static void absorb_next(tms_piece_t *piece) {
    tms_piece_t *next = piece->after;
    piece->end = next->end;
    piece->after = next->after;
    if (piece->after) piece->after->before = piece;
    free(next);
}

tms_range_t *tms_space_give_back(tms_piece_t *piece) {
    tms_range_t *range = piece->range;
    range->in_use--;
    range->space->in_use_bytes -= tms_piece_bytes(piece);
    if (piece->after && !piece->after->in_use) {
        pop(piece->after);
        absorb_next(piece);
    }
    if (piece->before && !piece->before->in_use) {
        piece = piece->before;
        pop(piece);
        absorb_next(piece);
    }
    push(piece);
    return range->in_use == 0 ? range : NULL;
}
