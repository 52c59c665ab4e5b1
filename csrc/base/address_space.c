#include "base/address_space.h"

#include <stdlib.h>

/* The maximum number of free spans of a size's own class that a search compares. All spans of the next classes are large
 * enough. */
enum { MAX_COMPARED = 16, BITS = 64 };

static int class_of(uint64_t bytes) { return BITS - 1 - __builtin_clzll(bytes); }

static tms_span_t **list_of(const tms_span_t *span) {
    tms_space_t *space = span->range->space;
    return &(span->backing ? &space->backed : &space->bare)->by_class[class_of(tms_span_bytes(span))];
}

static void push(tms_span_t *span) {
    tms_span_t **list = list_of(span);
    span->listed = true;
    span->previous_free = NULL;
    span->next_free = *list;
    if (*list) (*list)->previous_free = span;
    *list = span;
}

static void pop(tms_span_t *span) {
    if (span->previous_free)
        span->previous_free->next_free = span->next_free;
    else
        *list_of(span) = span->next_free;
    if (span->next_free) span->next_free->previous_free = span->previous_free;
    span->previous_free = span->next_free = NULL;
    span->listed = false;
}

/* ---- ranges ---- */

uint64_t tms_space_growth(const tms_space_t *space, uint64_t bytes) {
    if (bytes >= TMS_SPACE_ALONE_BYTES) return bytes;
    uint64_t size = space->reserved_bytes < TMS_MAX_SPACE_RANGE_BYTES ? space->reserved_bytes : TMS_MAX_SPACE_RANGE_BYTES;
    return size > bytes ? size : bytes;
}

bool tms_space_add(tms_space_t *space, tms_range_t *range) {
    tms_span_t *span = calloc(1, sizeof *span);
    if (!span) return false;
    *span = (tms_span_t){.begin = range->node.begin, .end = range->node.end, .range = range};
    range->space = space;
    range->first = span;
    space->reserved_bytes += tms_span_bytes(span);
    push(span);
    return true;
}

void tms_space_remove(tms_range_t *range) {
    range->space->reserved_bytes -= tms_span_bytes(range->first);
    pop(range->first);
    free(range->first);
    range->first = NULL;
    range->space = NULL;
}

/* ---- spans ---- */

/* The smallest of the compared spans of the class that is large enough, or NULL. */
static tms_span_t *compare(tms_space_t *space, tms_span_t *span, uint64_t bytes) {
    tms_span_t *best = NULL;
    for (int compared = 0; span && compared < MAX_COMPARED; compared++, span = span->next_free) {
        space->steps++;
        uint64_t size = tms_span_bytes(span);
        if (size >= bytes && (!best || size < tms_span_bytes(best))) best = span;
    }
    return best;
}

static tms_span_t *find(tms_space_t *space, const tms_span_lists_t *lists, uint64_t bytes) {
    tms_span_t *span = compare(space, lists->by_class[class_of(bytes)], bytes);
    for (int i = class_of(bytes) + 1; i < TMS_SPACE_CLASSES && !span; i++) span = lists->by_class[i];
    return span;
}

bool tms_space_has_room(tms_space_t *space, uint64_t bytes) { return find(space, &space->bare, bytes) != NULL; }

/* Gives the first `bytes` of a listed span to `owner`. */
static tms_span_t *cut(tms_span_t *span, uint64_t bytes, void *owner) {
    tms_span_t *rest = NULL;
    if (tms_span_bytes(span) > bytes && !(rest = calloc(1, sizeof *rest))) return NULL;
    pop(span);
    if (rest) {
        *rest = (tms_span_t){.begin = span->begin + bytes,
                             .end = span->end,
                             .range = span->range,
                             .before = span,
                             .after = span->after,
                             .backing = span->backing};
        if (rest->after) rest->after->before = rest;
        span->after = rest;
        span->end = rest->begin;
        push(rest);
    }
    span->owner = owner;
    return span;
}

tms_span_t *tms_space_take(tms_space_t *space, uint64_t bytes, void *owner) {
    tms_span_t *span = find(space, &space->bare, bytes);
    return span ? cut(span, bytes, owner) : NULL;
}

tms_span_t *tms_space_take_backed(tms_space_t *space, uint64_t bytes, void *owner) {
    tms_span_t *span = find(space, &space->backed, bytes);
    span = span ? cut(span, bytes, owner) : NULL;
    if (span) space->backed_bytes -= bytes;
    return span;
}

/* Whether two neighbours may be merged. */
static bool are_alike(const tms_span_t *one, const tms_span_t *other) {
    return one->listed && other->listed && one->backing == other->backing;
}

/* Merges a listed span with the neighbour after it, if they are alike. */
static void join_next(tms_span_t *span) {
    tms_span_t *next = span->after;
    if (!next || !are_alike(span, next)) return;
    pop(next);
    pop(span);
    span->end = next->end;
    span->after = next->after;
    if (span->after) span->after->before = span;
    free(next);
    push(span);
}

/* Lists a free span, and merges it with neighbours that are alike. Returns the span that contains it now. */
static tms_span_t *list(tms_span_t *span) {
    push(span);
    join_next(span);
    if (!span->before || !are_alike(span->before, span)) return span;
    span = span->before;
    join_next(span);
    return span;
}

void tms_space_give_back(tms_span_t *span, void *backing, bool listed) {
    span->owner = NULL;
    span->backing = backing;
    if (backing) span->range->space->backed_bytes += tms_span_bytes(span);
    if (listed) (void)list(span);
}

void tms_space_hold(tms_span_t *first, uint64_t end) {
    for (tms_span_t *span = first; span && span->begin < end; span = span->after) {
        if (span->listed) pop(span);
    }
}

void tms_space_unback(tms_span_t *first, uint64_t end) {
    for (tms_span_t *span = first; span && span->begin < end; span = span->after) {
        if (span->owner || !span->backing) continue;
        span->range->space->backed_bytes -= tms_span_bytes(span);
        span->backing = NULL;
    }
}

void tms_space_settle(tms_span_t *first, uint64_t end) {
    for (tms_span_t *span = first; span && span->begin < end; span = span->after) {
        if (!span->owner && !span->listed) span = list(span);
    }
}
