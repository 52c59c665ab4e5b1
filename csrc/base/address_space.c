#include "base/address_space.h"

#include <stdlib.h>

/* The maximum number of free pieces of a size's own class that a search compares. All pieces of the next classes are large
 * enough. */
enum { MAX_COMPARED = 16, BITS = 64 };

static int class_of(uint64_t bytes) { return BITS - 1 - __builtin_clzll(bytes); }

static tms_span_t **list_of(const tms_span_t *piece) {
    tms_space_t *space = piece->range->space;
    return &(piece->backing ? &space->backed : &space->bare)->of[class_of(tms_span_bytes(piece))];
}

static void push(tms_span_t *piece) {
    tms_span_t **list = list_of(piece);
    piece->listed = true;
    piece->previous_free = NULL;
    piece->next_free = *list;
    if (*list) (*list)->previous_free = piece;
    *list = piece;
}

static void pop(tms_span_t *piece) {
    if (piece->previous_free)
        piece->previous_free->next_free = piece->next_free;
    else
        *list_of(piece) = piece->next_free;
    if (piece->next_free) piece->next_free->previous_free = piece->previous_free;
    piece->previous_free = piece->next_free = NULL;
    piece->listed = false;
}

/* ---- ranges ---- */

uint64_t tms_space_growth(const tms_space_t *space, uint64_t bytes) {
    if (bytes >= TMS_SPACE_ALONE_BYTES) return bytes;
    uint64_t size = space->reserved_bytes < TMS_MAX_SPACE_RANGE_BYTES ? space->reserved_bytes : TMS_MAX_SPACE_RANGE_BYTES;
    return size > bytes ? size : bytes;
}

bool tms_space_add(tms_space_t *space, tms_range_t *range) {
    tms_span_t *piece = calloc(1, sizeof *piece);
    if (!piece) return false;
    *piece = (tms_span_t){.begin = range->node.begin, .end = range->node.end, .range = range};
    range->space = space;
    range->first = piece;
    space->reserved_bytes += tms_span_bytes(piece);
    push(piece);
    return true;
}

void tms_space_remove(tms_range_t *range) {
    range->space->reserved_bytes -= tms_span_bytes(range->first);
    pop(range->first);
    free(range->first);
    range->first = NULL;
    range->space = NULL;
}

/* ---- pieces ---- */

/* The smallest of the compared pieces of the class that is large enough, or NULL. */
static tms_span_t *compare(tms_space_t *space, tms_span_t *piece, uint64_t bytes) {
    tms_span_t *best = NULL;
    for (int compared = 0; piece && compared < MAX_COMPARED; compared++, piece = piece->next_free) {
        space->steps++;
        uint64_t size = tms_span_bytes(piece);
        if (size >= bytes && (!best || size < tms_span_bytes(best))) best = piece;
    }
    return best;
}

static tms_span_t *find(tms_space_t *space, const tms_span_lists_t *lists, uint64_t bytes) {
    tms_span_t *piece = compare(space, lists->of[class_of(bytes)], bytes);
    for (int i = class_of(bytes) + 1; i < TMS_SPACE_CLASSES && !piece; i++) piece = lists->of[i];
    return piece;
}

bool tms_space_has_room(tms_space_t *space, uint64_t bytes) { return find(space, &space->bare, bytes) != NULL; }

/* Gives the first `bytes` of a listed piece to `owner`. */
static tms_span_t *cut(tms_span_t *piece, uint64_t bytes, void *owner) {
    tms_span_t *rest = NULL;
    if (tms_span_bytes(piece) > bytes && !(rest = calloc(1, sizeof *rest))) return NULL;
    pop(piece);
    if (rest) {
        *rest = (tms_span_t){.begin = piece->begin + bytes,
                             .end = piece->end,
                             .range = piece->range,
                             .before = piece,
                             .after = piece->after,
                             .backing = piece->backing};
        if (rest->after) rest->after->before = rest;
        piece->after = rest;
        piece->end = rest->begin;
        push(rest);
    }
    piece->owner = owner;
    return piece;
}

tms_span_t *tms_space_take(tms_space_t *space, uint64_t bytes, void *owner) {
    tms_span_t *piece = find(space, &space->bare, bytes);
    return piece ? cut(piece, bytes, owner) : NULL;
}

tms_span_t *tms_space_take_backed(tms_space_t *space, uint64_t bytes, void *owner) {
    tms_span_t *piece = find(space, &space->backed, bytes);
    piece = piece ? cut(piece, bytes, owner) : NULL;
    if (piece) space->backed_bytes -= bytes;
    return piece;
}

/* Whether two neighbours may be merged. */
static bool are_alike(const tms_span_t *one, const tms_span_t *other) {
    return one->listed && other->listed && one->backing == other->backing;
}

/* Merges a listed piece with the neighbour after it, if they are alike. */
static void join_next(tms_span_t *piece) {
    tms_span_t *next = piece->after;
    if (!next || !are_alike(piece, next)) return;
    pop(next);
    pop(piece);
    piece->end = next->end;
    piece->after = next->after;
    if (piece->after) piece->after->before = piece;
    free(next);
    push(piece);
}

/* Lists a free piece, and merges it with neighbours that are alike. Returns the piece that contains it now. */
static tms_span_t *list(tms_span_t *piece) {
    push(piece);
    join_next(piece);
    if (!piece->before || !are_alike(piece->before, piece)) return piece;
    piece = piece->before;
    join_next(piece);
    return piece;
}

void tms_space_give_back(tms_span_t *piece, void *backing, bool listed) {
    piece->owner = NULL;
    piece->backing = backing;
    if (backing) piece->range->space->backed_bytes += tms_span_bytes(piece);
    if (listed) (void)list(piece);
}

void tms_space_hold(tms_span_t *first, uint64_t end) {
    for (tms_span_t *piece = first; piece && piece->begin < end; piece = piece->after) {
        if (piece->listed) pop(piece);
    }
}

void tms_space_unback(tms_span_t *first, uint64_t end) {
    for (tms_span_t *piece = first; piece && piece->begin < end; piece = piece->after) {
        if (piece->owner || !piece->backing) continue;
        piece->range->space->backed_bytes -= tms_span_bytes(piece);
        piece->backing = NULL;
    }
}

void tms_space_settle(tms_span_t *first, uint64_t end) {
    for (tms_span_t *piece = first; piece && piece->begin < end; piece = piece->after) {
        if (!piece->owner && !piece->listed) piece = list(piece);
    }
}
