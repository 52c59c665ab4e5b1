#include "backup/fingerprints.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

tms_extent_t tms_fingerprints_chunk(const tms_extent_t *extent, uint64_t done) {
    const uint64_t begin = extent->offset + done, left = extent->bytes - done;
    const uint64_t most = TMS_FINGERPRINT_CHUNK_BYTES - begin % TMS_FINGERPRINT_VECTOR_BYTES;
    return (tms_extent_t){.offset = begin, .packed = extent->packed + done, .bytes = left < most ? left : most};
}

uint64_t tms_fingerprints_count(const tms_backup_content_t *content) {
    tms_extent_t whole;
    size_t count;
    const tms_extent_t *extents = tms_backup_extents(content, &whole, &count);
    uint64_t chunks = 0;
    for (size_t i = 0; i < count; i++) {
        const uint64_t bytes = extents[i].offset % TMS_FINGERPRINT_VECTOR_BYTES + extents[i].bytes;
        chunks += (bytes + TMS_FINGERPRINT_CHUNK_BYTES - 1) / TMS_FINGERPRINT_CHUNK_BYTES;
    }
    return chunks;
}

bool tms_fingerprints_renew(tms_fingerprints_t *fingerprints, const tms_fingerprint_t *values, uint64_t count,
                            uint64_t key) {
    tms_fingerprints_cancel(fingerprints);
    fingerprints->fresh_key = key;
    fingerprints->fresh = malloc(count * sizeof *values);
    if (fingerprints->fresh) memcpy(fingerprints->fresh, values, count * sizeof *values);
    return fingerprints->fresh != NULL;
}

void tms_fingerprints_commit(tms_fingerprints_t *fingerprints) {
    free(fingerprints->kept);
    fingerprints->kept = fingerprints->fresh;
    fingerprints->kept_key = fingerprints->fresh_key;
    fingerprints->fresh = NULL;
}

void tms_fingerprints_cancel(tms_fingerprints_t *fingerprints) {
    free(fingerprints->fresh);
    fingerprints->fresh = NULL;
}

void tms_fingerprints_forget(tms_fingerprints_t *fingerprints) {
    tms_fingerprints_cancel(fingerprints);
    tms_fingerprints_commit(fingerprints);
}

bool tms_fingerprints_are_comparable(const tms_fingerprints_t *fingerprints) {
    return fingerprints->kept && fingerprints->fresh && fingerprints->kept_key == fingerprints->fresh_key;
}

/* Appends a chunk, as a part of the extent before it if they are neighbours. */
static void append(tms_backup_content_t *content, const tms_extent_t *chunk) {
    tms_extent_t *last = content->extent_count > 0 ? &content->extents[content->extent_count - 1] : NULL;
    if (last && last->offset + last->bytes == chunk->offset && last->packed + last->bytes == chunk->packed)
        last->bytes += chunk->bytes;
    else
        content->extents[content->extent_count++] = *chunk;
    content->bytes += chunk->bytes;
}

/* Fills *wide with the part of `content` in the blocks of the backup that `changed` touches. *wide has room. */
static void widen(const tms_backup_content_t *content, const tms_backup_content_t *changed, uint64_t block,
                  tms_backup_content_t *wide) {
    tms_extent_t whole;
    size_t count, next = 0;
    const tms_extent_t *extents = tms_backup_extents(content, &whole, &count);
    for (size_t i = 0; i < count; i++) {
        const uint64_t end = extents[i].packed + extents[i].bytes;
        uint64_t at = extents[i].packed;
        while (at < end && next < changed->extent_count) {
            const tms_extent_t *touched = &changed->extents[next];
            const uint64_t blocks_begin = touched->packed / block * block;
            const uint64_t blocks_end = (touched->packed + touched->bytes + block - 1) / block * block;
            if (blocks_begin >= end) break;
            if (blocks_end <= at) {
                next++;
                continue;
            }
            const uint64_t from = at > blocks_begin ? at : blocks_begin, to = end < blocks_end ? end : blocks_end;
            const tms_extent_t part = {extents[i].offset + (from - extents[i].packed), from, to - from};
            append(wide, &part);
            at = to;
        }
    }
}

static tms_status_t find_changes(const tms_fingerprints_t *fingerprints, const tms_backup_content_t *content,
                                 tms_backup_content_t *changed, const tms_error_context_t *context, tms_error_t *error) {
    tms_extent_t whole, chunk;
    size_t count;
    uint64_t index = 0;
    const uint64_t chunks = tms_fingerprints_count(content);
    const tms_extent_t *extents = tms_backup_extents(content, &whole, &count);
    *changed = (tms_backup_content_t){.kind = content->kind};
    for (size_t i = 0; i < count; i++) {
        for (uint64_t done = 0; done < extents[i].bytes; done += chunk.bytes, index++) {
            chunk = tms_fingerprints_chunk(&extents[i], done);
            if (memcmp(&fingerprints->kept[index], &fingerprints->fresh[index], sizeof *fingerprints->kept) == 0) continue;
            if (!changed->extents) changed->extents = calloc(chunks - index, sizeof *changed->extents);
            if (!changed->extents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
            append(changed, &chunk);
        }
    }
    return TMS_OK;
}

tms_status_t tms_fingerprints_compare(const tms_fingerprints_t *fingerprints, const tms_backup_content_t *content,
                                      uint64_t block, tms_backup_content_t *changed, const tms_error_context_t *context,
                                      tms_error_t *error) {
    tms_backup_content_t wide = {.kind = content->kind};
    tms_status_t status = find_changes(fingerprints, content, changed, context, error);
    if (status != TMS_OK || changed->bytes == 0 || block == 1) return status;
    const size_t most = changed->extent_count + (content->extents ? content->extent_count : 1);
    wide.extents = calloc(most, sizeof *wide.extents);
    if (!wide.extents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    widen(content, changed, block, &wide);
    tms_backup_content_forget(changed);
    *changed = wide;
    return TMS_OK;
}
