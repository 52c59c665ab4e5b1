#include "backup/content.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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

/* The live parts of a segment as extents, packed without gaps; adjacent ones are merged. */
static tms_status_t find_extents(const tms_live_t *live, uint64_t address, uint64_t bytes, tms_backup_content_t *content,
                                 const tms_error_context_t *context, tms_error_t *error) {
    size_t first = first_range(live, address), last = first, count = 0;
    while (last < live->range_count && live->ranges[last].begin < address + bytes) last++;
    if (first == last) return TMS_OK; /* nothing is live */
    tms_extent_t *extents = calloc(last - first, sizeof *extents);
    if (!extents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    uint64_t packed = 0;
    for (size_t i = first; i < last; i++) {
        tms_live_range_t part = clip(&live->ranges[i], address, address + bytes);
        uint64_t offset = part.begin - address, size = part.end - part.begin;
        if (size == 0) continue;
        if (count > 0 && extents[count - 1].offset + extents[count - 1].bytes == offset)
            extents[count - 1].bytes += size;
        else
            extents[count++] = (tms_extent_t){.offset = offset, .packed = packed, .bytes = size};
        packed += size;
    }
    content->bytes = packed;
    if (packed == 0 || packed == bytes) {
        free(extents);
    } else {
        content->extents = extents;
        content->extent_count = count;
    }
    return TMS_OK;
}

tms_status_t tms_backup_content_choose(tms_backup_content_t *content, tms_backup_kind_t kind, const tms_live_t *live,
                                       uint64_t address, uint64_t bytes, const tms_error_context_t *context,
                                       tms_error_t *error) {
    *content = (tms_backup_content_t){.kind = kind};
    if (kind == TMS_BACKUP_NONE) return TMS_OK;
    if (live && tms_live_lists(live, address)) return find_extents(live, address, bytes, content, context, error);
    content->bytes = bytes;
    return TMS_OK;
}
