/* Hands out the addresses of reserved ranges, side by side, for allocations of one kind. Bookkeeping only: the owner
 * reserves and frees ranges, and maps memory.
 *
 * A range is cut into pieces without gaps. A piece has an owner, or is free. A free piece is *bare*, or *backed* by memory
 * that is still mapped there; neighbours with the same backing become one. Free pieces are found among lists by size, in
 * constant time: a handful of those of the size class are compared, then the first of the next class that has one is taken.
 * So giving back never allocates, and never fails.
 *
 * The first range of a space is as large as its first piece, each further one as large as all others together, or as the
 * piece that found no room. So few ranges hold many pieces, and a space of equal pieces reserves at most twice what it ever
 * had in use. A piece of TMS_SPACE_ALONE_BYTES or more gets a range of its own size.
 *
 * The user embeds the ranges in its own values. Every call needs its lock. */
#ifndef TMS_ADDRESS_SPACE_H
#define TMS_ADDRESS_SPACE_H

#include <stdbool.h>

#include "base/registry.h"

/* More neighbours than that gain nothing: docs/performance.md has the times of handles by size. */
#define TMS_SPACE_ALONE_BYTES ((uint64_t)1 << 30)
/* The largest range for several pieces. */
#define TMS_SPACE_RANGE_MOST_BYTES ((uint64_t)64 << 30)

enum { TMS_SPACE_CLASSES = 64 };

typedef struct tms_piece {
    uint64_t begin, end;
    struct tms_range *range;
    struct tms_piece *before, *after;            /* its neighbours in the range */
    void *owner;                                 /* NULL: free */
    void *backing;                               /* of a free piece: the memory mapped there; NULL: bare */
    bool listed;                                 /* free, and may be taken */
    struct tms_piece *previous_free, *next_free; /* while it is listed: those of its list */
} tms_piece_t;

typedef struct tms_range {
    tms_registry_node_t node; /* first: [begin, end); for the user's registry of ranges */
    struct tms_space *space;
    tms_piece_t *first;
} tms_range_t;

/* Free pieces by the number of bits of their size. */
typedef struct tms_piece_lists {
    tms_piece_t *of[TMS_SPACE_CLASSES];
} tms_piece_lists_t;

typedef struct tms_space {
    tms_piece_lists_t bare, backed;
    uint64_t reserved_bytes; /* of all its ranges */
    uint64_t backed_bytes;   /* of free pieces, listed or not */
    uint64_t steps;          /* free pieces that searches have compared; for complexity tests */
} tms_space_t;

/* The size of the range to add for a piece of `bytes` that found no room. */
uint64_t tms_space_growth(const tms_space_t *space, uint64_t bytes);
/* Adds a range whose node has the addresses that the user has reserved, all of them bare; the rest of it is 0. False: out of
 * host memory. */
bool tms_space_add(tms_space_t *space, tms_range_t *range);
/* Removes a range that is one bare piece (tms_range_is_bare). */
void tms_space_remove(tms_range_t *range);

/* Whether there is a bare piece of `bytes` or more. */
bool tms_space_has_room(tms_space_t *space, uint64_t bytes);
/* A piece of exactly `bytes` for `owner`, from the bare ones or from the backed ones. NULL: there is none, or no host memory
 * to cut one. */
tms_piece_t *tms_space_take(tms_space_t *space, uint64_t bytes, void *owner);
tms_piece_t *tms_space_take_backed(tms_space_t *space, uint64_t bytes, void *owner);
/* Frees a piece. `backing` is the memory mapped there, NULL if there is none. `listed` false: the piece cannot be taken, and
 * does not change, until tms_space_settle. */
void tms_space_give_back(tms_piece_t *piece, void *backing, bool listed);

/* Takes the free pieces from `first` up to the address `end` off the lists. They stay as they are until tms_space_settle. */
void tms_space_hold(tms_piece_t *first, uint64_t end);
/* Those pieces are bare: nothing is mapped there any more. */
void tms_space_unback(tms_piece_t *first, uint64_t end);
/* The free pieces that were held may be taken again. `first` may be a part of another piece afterwards. */
void tms_space_settle(tms_piece_t *first, uint64_t end);

/* Whether the whole range is free, and has no memory. */
static inline bool tms_range_is_bare(const tms_range_t *range) {
    const tms_piece_t *piece = range->first;
    return !piece->owner && !piece->backing && piece->listed && !piece->after;
}
static inline uint64_t tms_piece_bytes(const tms_piece_t *piece) { return piece->end - piece->begin; }

#endif
