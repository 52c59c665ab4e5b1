/* Hands out the addresses of reserved ranges, side by side, for allocations of one kind. Bookkeeping only: the owner
 * reserves and frees ranges, and maps memory.
 *
 * A range is cut into spans without gaps. A span has an owner, or is free. A free span is *bare*, or *backed* by memory
 * that is still mapped there; neighbours with the same backing become one. Free spans are kept in lists by size class, so a
 * search takes constant time: it compares a few spans of the size's own class, then takes the first span of the next class
 * that has one. Giving a span back never allocates and never fails.
 *
 * The first range of a space is as large as its first span. Each further range is as large as all others together, or as
 * the span that found no room. So few ranges hold many spans, and a space of equal spans reserves at most twice what it
 * ever had in use. A span of TMS_SPACE_ALONE_BYTES or more gets a range of its own size.
 *
 * The user embeds the ranges in its own values. Every call needs its lock. */
#ifndef TMS_ADDRESS_SPACE_H
#define TMS_ADDRESS_SPACE_H

#include <stdbool.h>

#include "base/registry.h"

/* For spans of this size, sharing a range gains nothing: docs/performance.md has the times of handles by size. */
#define TMS_SPACE_ALONE_BYTES ((uint64_t)1 << 30)
/* The largest range for several spans. */
#define TMS_MAX_SPACE_RANGE_BYTES ((uint64_t)64 << 30)

enum { TMS_SPACE_CLASSES = 64 };

typedef struct tms_span {
    uint64_t begin, end;
    struct tms_range *range;
    struct tms_span *before, *after;            /* its neighbours in the range */
    void *owner;                                /* NULL: free */
    void *backing;                              /* of a free span: the memory that is mapped there; NULL: bare */
    bool listed;                                /* free, and may be taken */
    struct tms_span *previous_free, *next_free; /* its neighbours in its list, while it is listed */
} tms_span_t;

typedef struct tms_range {
    tms_registry_node_t node; /* first: [begin, end); for the user's registry of ranges */
    struct tms_space *space;
    tms_span_t *first;
} tms_range_t;

/* Free spans by the number of bits of their size. */
typedef struct tms_span_lists {
    tms_span_t *by_class[TMS_SPACE_CLASSES];
} tms_span_lists_t;

typedef struct tms_space {
    tms_span_lists_t bare, backed;
    uint64_t reserved_bytes; /* total size of its ranges */
    uint64_t backed_bytes;   /* total size of backed free spans, listed or not */
    uint64_t steps;          /* free spans that searches have compared; for complexity tests */
} tms_space_t;

/* Returns the size of the range to add for a span of `bytes` that found no room. */
uint64_t tms_space_growth(const tms_space_t *space, uint64_t bytes);
/* Adds a range, all of which is bare. Its node has the addresses that the user has reserved, and its other members are 0.
 * Returns false if host memory is short. */
bool tms_space_add(tms_space_t *space, tms_range_t *range);
/* Removes a range that is one bare span (tms_range_is_bare). */
void tms_space_remove(tms_range_t *range);

/* Whether there is a bare span of `bytes` or more. */
bool tms_space_has_room(tms_space_t *space, uint64_t bytes);
/* Return a span of exactly `bytes` for `owner`, made from a bare span or from a backed one. Return NULL if there is none,
 * or if there is no host memory to cut one. */
tms_span_t *tms_space_take(tms_space_t *space, uint64_t bytes, void *owner);
tms_span_t *tms_space_take_backed(tms_space_t *space, uint64_t bytes, void *owner);
/* Frees a span. `backing` is the memory mapped there, NULL if there is none. `listed` false: the span cannot be taken, and
 * does not change, until tms_space_settle. */
void tms_space_give_back(tms_span_t *span, void *backing, bool listed);

/* Takes the free spans from `first` up to the address `end` off the lists. They stay as they are until tms_space_settle. */
void tms_space_hold(tms_span_t *first, uint64_t end);
/* Makes held spans bare, because nothing is mapped there any more. */
void tms_space_unback(tms_span_t *first, uint64_t end);
/* Puts held spans back on the lists. `first` may be a part of another span afterwards. */
void tms_space_settle(tms_span_t *first, uint64_t end);

/* Whether the whole range is free, and has no memory. */
static inline bool tms_range_is_bare(const tms_range_t *range) {
    const tms_span_t *span = range->first;
    return !span->owner && !span->backing && span->listed && !span->after;
}
static inline uint64_t tms_span_bytes(const tms_span_t *span) { return span->end - span->begin; }

#endif
