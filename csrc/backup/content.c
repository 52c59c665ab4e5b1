#include "backup/content.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "include/tms_fingerprint.h"

void tms_backup_content_forget(tms_backup_content_t *content) {
    free(content->extents);
    *content = (tms_backup_content_t){.kind = TMS_BACKUP_NONE};
}

bool tms_backup_contents_match(const tms_backup_content_t *a, const tms_backup_content_t *b) {
    if (a->kind != b->kind || a->bytes != b->bytes || a->extent_count != b->extent_count) return false;
    return a->extent_count == 0 || memcmp(a->extents, b->extents, a->extent_count * sizeof *a->extents) == 0;
}

bool tms_live_lists(const tms_live_t *live, uint64_t address) {
    size_t low = 0, high = live->allocation_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (live->allocations[middle] < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < live->allocation_count && live->allocations[low] == address;
}

/* The first range that ends after `address`. */
static size_t first_range(const tms_live_t *live, uint64_t address) {
    size_t low = 0, high = live->range_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (live->ranges[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Clips a range to [begin, end). Empty if they do not overlap. */
static tms_live_range_t clip(const tms_live_range_t *range, uint64_t begin, uint64_t end) {
    tms_live_range_t part = {range->begin > begin ? range->begin : begin, range->end < end ? range->end : end};
    if (part.end < part.begin) part.end = part.begin;
    return part;
}

/* The live ranges of a segment: those at [first, last) of the list. */
typedef struct found {
    const tms_live_t *live;
    size_t first, last;
    uint64_t address, bytes; /* of the segment */
} found_t;

static found_t find_ranges(const tms_live_t *live, uint64_t address, uint64_t bytes) {
    found_t found = {.live = live, .address = address, .bytes = bytes};
    found.first = found.last = first_range(live, address);
    while (found.last < live->range_count && live->ranges[found.last].begin < address + bytes) found.last++;
    return found;
}

/* ---- neighbours together ---- */

/* The live parts of a segment as extents, packed without gaps; adjacent ones are merged. */
static tms_status_t find_extents(const found_t *found, tms_backup_content_t *content, const tms_error_context_t *context,
                                 tms_error_t *error) {
    size_t count = 0;
    if (found->first == found->last) return TMS_OK; /* nothing is live */
    tms_extent_t *extents = calloc(found->last - found->first, sizeof *extents);
    if (!extents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    uint64_t packed = 0;
    for (size_t i = found->first; i < found->last; i++) {
        tms_live_range_t part = clip(&found->live->ranges[i], found->address, found->address + found->bytes);
        uint64_t offset = part.begin - found->address, size = part.end - part.begin;
        if (size == 0) continue;
        if (count > 0 && extents[count - 1].offset + extents[count - 1].bytes == offset)
            extents[count - 1].bytes += size;
        else
            extents[count++] = (tms_extent_t){.offset = offset, .packed = packed, .bytes = size};
        packed += size;
    }
    content->bytes = packed;
    if (packed == 0 || packed == found->bytes) {
        free(extents);
    } else {
        content->extents = extents;
        content->extent_count = count;
    }
    return TMS_OK;
}

/* ---- each block alone ---- */

/* The size of the first piece of a block's part that begins at `offset`. */
static uint64_t piece_size(uint64_t offset, uint64_t bytes) {
    enum { VECTOR = TMS_FINGERPRINT_VECTOR_BYTES };
    const uint64_t before = (VECTOR - offset % VECTOR) % VECTOR;
    if (before > 0) return bytes < before ? bytes : before;
    if (bytes > TMS_MAX_OBJECT_BYTES) return TMS_MAX_OBJECT_BYTES;
    return bytes < TMS_MIN_OBJECT_BYTES ? bytes : bytes / VECTOR * VECTOR;
}

/* Cuts a block of the segment into pieces, behind those that `content` has, which has room for them. If `content` has no
 * extents, it only counts them. */
static void cut(const tms_live_range_t *block, tms_backup_content_t *content) {
    for (uint64_t size, offset = block->begin; offset < block->end; offset += size) {
        size = piece_size(offset, block->end - offset);
        if (content->extents)
            content->extents[content->extent_count] =
                (tms_extent_t){.offset = offset, .packed = content->bytes, .bytes = size};
        content->extent_count++;
        content->bytes += size;
    }
}

static void cut_blocks(const found_t *found, tms_backup_content_t *content) {
    for (size_t i = found->first; i < found->last; i++) {
        tms_live_range_t block = found->live->ranges[i];
        if (found->live->used) block.end = found->live->used[i];
        block = clip(&block, found->address, found->address + found->bytes);
        block.begin -= found->address;
        block.end -= found->address;
        cut(&block, content);
    }
}

static tms_status_t find_pieces(const found_t *found, tms_backup_content_t *content, const tms_error_context_t *context,
                                tms_error_t *error) {
    tms_backup_content_t counted = {.kind = content->kind};
    cut_blocks(found, &counted);
    if (counted.extent_count == 0) return TMS_OK;
    content->extents = calloc(counted.extent_count, sizeof *content->extents);
    if (!content->extents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    cut_blocks(found, content);
    return TMS_OK;
}

tms_status_t tms_backup_content_choose(tms_backup_content_t *content, tms_backup_kind_t kind, const tms_live_t *live,
                                       uint64_t address, uint64_t bytes, const tms_error_context_t *context,
                                       tms_error_t *error) {
    *content = (tms_backup_content_t){.kind = kind};
    if (kind == TMS_BACKUP_NONE) return TMS_OK;
    const tms_live_range_t all = {.begin = address, .end = address + bytes};
    const tms_live_t unknown = {.ranges = &all, .range_count = 1};
    const bool listed = live && tms_live_lists(live, address);
    const found_t found = find_ranges(listed ? live : &unknown, address, bytes);
    if (kind == TMS_BACKUP_SHARED) return find_pieces(&found, content, context, error);
    if (listed) return find_extents(&found, content, context, error);
    content->bytes = bytes;
    return TMS_OK;
}
