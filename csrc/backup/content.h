/* What is kept of a segment: all of it, or the parts that are live. Values without a lock; any thread. */
#ifndef TMS_BACKUP_CONTENT_H
#define TMS_BACKUP_CONTENT_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* A part of a segment that is kept, `offset` from its start, and where it lies in the backup, which has no gaps. */
typedef struct tms_extent {
    uint64_t offset, packed, bytes;
} tms_extent_t;

typedef struct tms_backup_content {
    tms_backup_kind_t kind; /* where */
    uint64_t bytes;         /* in all */
    tms_extent_t *extents;  /* sorted; NULL: everything, or nothing where `bytes` is 0 */
    size_t extent_count;
} tms_backup_content_t;

/* What a backup of this kind keeps of the segment of `bytes` at `address`. `live`: what is live, or NULL: everything is.
 * TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_backup_content_choose(tms_backup_content_t *content, tms_backup_kind_t kind, const tms_live_t *live,
                                       uint64_t address, uint64_t bytes, const tms_error_context_t *context,
                                       tms_error_t *error);
/* Nothing is kept any more. */
void tms_backup_content_forget(tms_backup_content_t *content);

/* The parts that `content` is of, in their order. `whole` is room for the only one, where that is everything. */
static inline const tms_extent_t *tms_backup_extents(const tms_backup_content_t *content, tms_extent_t *whole,
                                                     size_t *count) {
    *whole = (tms_extent_t){.offset = 0, .packed = 0, .bytes = content->bytes};
    *count = content->extents ? content->extent_count : content->bytes > 0;
    return content->extents ? content->extents : whole;
}

#endif
