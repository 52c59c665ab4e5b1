/* The part of a segment that a backup keeps: everything, or the live bytes. A value owned by its backup; no lock, any
 * thread.
 *
 * Neighbouring live ranges are one extent, except in a backup of kind SHARED, which keeps each live block as extents of its
 * own, at its requested size. Two processes place equal blocks differently, so only what lies inside a block can be shared.
 * Memory whose blocks are unknown is one block. */
#ifndef TMS_BACKUP_CONTENT_H
#define TMS_BACKUP_CONTENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* An extent of a backup of kind SHARED is one piece of a live block: at most TMS_MAX_OBJECT_BYTES, and neighbours stay
 * apart. It is an object (backup/shared) if it has at least TMS_MIN_OBJECT_BYTES. An object begins and ends at a vector
 * of the kernel that computes fingerprints. The bytes of a block before its first vector, and those after the last
 * vector of an object, are extents of their own. */
#define TMS_MAX_OBJECT_BYTES ((uint64_t)64 << 20)
#define TMS_MIN_OBJECT_BYTES ((uint64_t)256 << 10)

/* A kept part of a segment: its offset in the segment and its offset (`packed`) in the backup, which has no gaps. */
typedef struct tms_extent {
    uint64_t offset, packed, bytes;
} tms_extent_t;

typedef struct tms_backup_content {
    tms_backup_kind_t kind; /* the kind of store */
    uint64_t bytes;         /* in total */
    tms_extent_t *extents;  /* sorted; NULL: everything, or nothing where `bytes` is 0; never NULL if SHARED has bytes */
    size_t extent_count;
} tms_backup_content_t;

/* Chooses the part that a backup of this kind keeps of the segment of `bytes` at `address`. `live` NULL: everything is live.
 * TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_backup_content_choose(tms_backup_content_t *content, tms_backup_kind_t kind, const tms_live_t *live,
                                       uint64_t address, uint64_t bytes, const tms_error_context_t *context,
                                       tms_error_t *error);
/* Whether `live` describes the segment at `address`. */
bool tms_live_lists(const tms_live_t *live, uint64_t address);
/* Whether two contents keep the same parts of a segment, in a store of the same kind. */
bool tms_backup_contents_match(const tms_backup_content_t *a, const tms_backup_content_t *b);
/* Whether an extent of a backup of kind SHARED is an object. */
static inline bool tms_extent_is_object(const tms_extent_t *extent) { return extent->bytes >= TMS_MIN_OBJECT_BYTES; }
/* Frees the extents and makes the content empty. */
void tms_backup_content_forget(tms_backup_content_t *content);

/* The extents of `content`, sorted. `whole` is storage for the single extent of a complete content. */
static inline const tms_extent_t *tms_backup_extents(const tms_backup_content_t *content, tms_extent_t *whole,
                                                     size_t *count) {
    *whole = (tms_extent_t){.offset = 0, .packed = 0, .bytes = content->bytes};
    *count = content->extents ? content->extent_count : content->bytes > 0;
    return content->extents ? content->extents : whole;
}

#endif
