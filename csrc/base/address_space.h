/* Hands out the addresses of reserved ranges, side by side, for allocations of one kind. Bookkeeping only: the owner
 * reserves and frees ranges.
 *
 * A range is cut into pieces without gaps: each is in use, or free and between pieces in use. A piece is found among lists
 * of free pieces by size, in constant time: a handful of those of its size class are compared, then the first of the next
 * class that has one is taken. So giving back never allocates, and never fails.
 *
 * The first range of a space is as large as its first piece, each further one as large as all others together: a space
 * reserves at most twice what it ever had in use, and few ranges hold many pieces. A piece of TMS_SPACE_ALONE_BYTES or more
 * gets a range of its own size.
 *
 * The owner embeds the ranges in its own values. Every call needs its lock. */
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
    struct tms_piece *before, *after; /* its neighbours in the range */
    bool in_use;
    struct tms_piece *previous_free, *next_free; /* while it is free: those of its class */
} tms_piece_t;

typedef struct tms_range {
    tms_registry_node_t node; /* first: [begin, end); for the owner's registry of ranges */
    struct tms_space *space;
    tms_piece_t *first;
    size_t in_use; /* pieces */
} tms_range_t;

typedef struct tms_space {
    tms_piece_t *free[TMS_SPACE_CLASSES]; /* by the number of bits of the size */
    uint64_t reserved_bytes;              /* of all its ranges */
    uint64_t in_use_bytes;
    uint64_t steps; /* free pieces that searches have compared; for complexity tests */
} tms_space_t;

/* The size of the range to add for a piece of `bytes` that found no room. */
uint64_t tms_space_growth(const tms_space_t *space, uint64_t bytes);
/* Adds a range whose node has the addresses that the owner has reserved, all of them free; the rest of it is 0. False: out
 * of host memory. */
bool tms_space_add(tms_space_t *space, tms_range_t *range);
/* Removes a range without pieces in use. */
void tms_space_remove(tms_range_t *range);

/* Whether there is a free piece of `bytes` or more. */
bool tms_space_has_room(tms_space_t *space, uint64_t bytes);
/* A piece of exactly `bytes`, in use from now on. NULL: there is no room, or no host memory (tms_space_has_room). */
tms_piece_t *tms_space_take(tms_space_t *space, uint64_t bytes);
/* Frees a piece, which becomes one with free neighbours. Returns its range if nothing of it is in use any more, else NULL.
 */
tms_range_t *tms_space_give_back(tms_piece_t *piece);

static inline uint64_t tms_piece_bytes(const tms_piece_t *piece) { return piece->end - piece->begin; }

#endif
