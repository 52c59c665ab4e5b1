#include "backup/shared/contents.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- making ---- */

/* The number of fingerprints of an extent, whose chunks are those of tms_fingerprints_chunk. */
static size_t chunks_of(const tms_extent_t *extent) {
    const tms_backup_content_t alone = {
        .bytes = extent->bytes, .extents = (tms_extent_t *)(uintptr_t)extent, .extent_count = 1};
    return tms_fingerprints_count(&alone);
}

/* Adds the object of this name, and links it if it exists. *held: it does. */
static tms_status_t add_object(tms_shared_store_t *store, tms_shared_contents_t *contents, const tms_extent_t *extent,
                               const tms_shared_name_t *name, int device, bool *held, const tms_error_context_t *context,
                               tms_error_t *error) {
    tms_shared_object_t *object = tms_shared_object_use(store, name, extent->bytes, device);
    tms_shared_attempt_t attempt;
    bool here;
    *held = false;
    if (!object) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    contents->parts[contents->part_count++] =
        (tms_shared_part_t){.offset = extent->offset, .bytes = extent->bytes, .object = object};
    tms_status_t status = tms_shared_object_try(store, object, false, &attempt, &here, context, error);
    *held = status == TMS_OK && attempt.state == TMS_SHARED_HELD;
    return status;
}

static void add_rest(tms_shared_contents_t *contents, const tms_extent_t *extent) {
    tms_backup_content_t *rest = &contents->rest;
    rest->extents[rest->extent_count++] =
        (tms_extent_t){.offset = extent->offset, .packed = rest->bytes, .bytes = extent->bytes};
    rest->bytes += extent->bytes;
}

/* Returns empty contents with room for `count` extents of each sort, and for at least one. NULL: memory is short. */
static tms_shared_contents_t *make_empty(size_t count) {
    tms_shared_contents_t *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->parts = calloc(count, sizeof *made->parts);
    made->rest = (tms_backup_content_t){.kind = TMS_BACKUP_PINNED, .extents = calloc(count, sizeof *made->rest.extents)};
    if (made->parts && made->rest.extents) return made;
    tms_backup_content_forget(&made->rest);
    free(made->parts);
    free(made);
    return NULL;
}

tms_status_t tms_shared_contents_make(tms_shared_store_t *store, const tms_backup_content_t *content,
                                      const tms_fingerprint_t *fingerprints, int device, tms_shared_contents_t **made,
                                      const tms_error_context_t *context, tms_error_t *error) {
    tms_extent_t whole;
    size_t count;
    const tms_extent_t *extents = tms_backup_extents(content, &whole, &count);
    tms_shared_contents_t *contents = make_empty(count > 0 ? count : 1);
    bool held;
    tms_status_t status = TMS_OK;
    if (!contents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    for (size_t i = 0; status == TMS_OK && i < count; i++) {
        if (fingerprints && tms_extent_is_object(&extents[i])) {
            const tms_shared_name_t name =
                tms_shared_name(store->folder.key, fingerprints, chunks_of(&extents[i]), extents[i].bytes);
            status = add_object(store, contents, &extents[i], &name, device, &held, context, error);
        } else {
            add_rest(contents, &extents[i]);
        }
        if (fingerprints) fingerprints += chunks_of(&extents[i]);
    }
    if (status == TMS_OK)
        *made = contents;
    else
        tms_shared_contents_drop(store, contents);
    return status;
}

tms_status_t tms_shared_contents_link(tms_shared_store_t *store, const tms_shared_name_t *name, uint64_t bytes, int device,
                                      tms_shared_contents_t **made, bool *found, const tms_error_context_t *context,
                                      tms_error_t *error) {
    const tms_extent_t whole = {.bytes = bytes};
    tms_shared_contents_t *contents = make_empty(1);
    *found = false;
    if (!contents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    tms_status_t status = add_object(store, contents, &whole, name, device, found, context, error);
    if (*found)
        *made = contents;
    else
        tms_shared_contents_drop(store, contents);
    return status;
}

/* ---- its life ---- */

void tms_shared_contents_want_registration(tms_shared_store_t *store, tms_shared_contents_t *contents,
                                           bool wants_registration) {
    if (contents->wants_registration == wants_registration) return;
    contents->wants_registration = wants_registration;
    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < contents->part_count; i++) {
        tms_shared_object_t *object = contents->parts[i].object;
        if (object) object->registration_users += wants_registration ? 1u : (unsigned)-1;
    }
    pthread_mutex_unlock(&store->lock);
}

/* gcc's analyzer does not see that all parts were cleared when they were made. */
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wanalyzer-use-of-uninitialized-value"
#endif
void tms_shared_contents_drop_private(tms_shared_contents_t *contents, tms_host_policy_t policy) {
    const tms_host_policy_t kept = policy == TMS_HOST_RELEASE ? TMS_HOST_RELEASE : TMS_HOST_POOL;
    if (contents->buffer) atomic_store(&contents->buffer->policy, kept);
    tms_host_buffer_drop(contents->buffer);
    contents->buffer = NULL;
    for (size_t i = 0; i < contents->part_count; i++) {
        tms_host_buffer_drop(contents->parts[i].alone);
        contents->parts[i].alone = NULL;
    }
}
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

void tms_shared_contents_drop(tms_shared_store_t *store, tms_shared_contents_t *contents) {
    if (!contents) return;
    tms_shared_contents_want_registration(store, contents, false);
    tms_shared_contents_drop_private(contents, contents->buffer ? atomic_load(&contents->buffer->policy) : TMS_HOST_RELEASE);
    for (size_t i = 0; i < contents->part_count; i++) {
        if (contents->parts[i].object) tms_shared_object_drop(store, contents->parts[i].object);
    }
    tms_backup_content_forget(&contents->rest);
    free(contents->parts);
    free(contents);
}

bool tms_shared_contents_drop_replaced(tms_shared_store_t *store, tms_shared_contents_t *contents) {
    bool dropped = false;
    for (size_t i = 0; i < contents->part_count; i++) {
        tms_shared_part_t *part = &contents->parts[i];
        if (!part->object || !tms_shared_object_drop_last(store, part->object, contents->wants_registration)) continue;
        part->object = NULL;
        dropped = true;
    }
    return dropped;
}

/* ---- its bytes ---- */

tms_status_t tms_shared_contents_list_missing(tms_shared_store_t *store, const tms_shared_contents_t *contents,
                                              tms_backup_content_t *missing, const tms_error_context_t *context,
                                              tms_error_t *error) {
    const size_t most = contents->part_count + contents->rest.extent_count;
    *missing = (tms_backup_content_t){.kind = TMS_BACKUP_SHARED};
    if (most == 0) return TMS_OK;
    missing->extents = calloc(most, sizeof *missing->extents);
    if (!missing->extents) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    for (size_t i = 0; i < contents->rest.extent_count; i++) {
        missing->extents[missing->extent_count++] = contents->rest.extents[i];
        missing->bytes += contents->rest.extents[i].bytes;
    }
    for (size_t i = 0; i < contents->part_count; i++) {
        const tms_shared_part_t *part = &contents->parts[i];
        if (tms_shared_object_is_here(store, part->object)) continue;
        missing->extents[missing->extent_count++] = (tms_extent_t){.offset = part->offset, .bytes = part->bytes};
        missing->bytes += part->bytes;
    }
    return TMS_OK;
}

/* Returns the memory that has the byte at `offset`, and in *bytes how many follow there. NULL: none. */
static const char *memory_at(const tms_shared_contents_t *contents, uint64_t offset, uint64_t *bytes) {
    for (size_t i = 0; i < contents->part_count; i++) {
        const tms_shared_part_t *part = &contents->parts[i];
        if (offset < part->offset || offset - part->offset >= part->bytes) continue;
        *bytes = part->bytes - (offset - part->offset);
        const char *memory = part->object ? part->object->memory : part->alone ? part->alone->memory : NULL;
        return memory ? memory + (offset - part->offset) : NULL;
    }
    for (size_t i = 0; contents->buffer && i < contents->rest.extent_count; i++) {
        const tms_extent_t *extent = &contents->rest.extents[i];
        if (offset < extent->offset || offset - extent->offset >= extent->bytes) continue;
        *bytes = extent->bytes - (offset - extent->offset);
        return (const char *)contents->buffer->memory + extent->packed + (offset - extent->offset);
    }
    return NULL;
}

bool tms_shared_contents_read(const tms_shared_contents_t *contents, uint64_t offset, uint64_t bytes, void *destination) {
    for (uint64_t part = 0, done = 0; done < bytes; done += part) {
        const char *memory = memory_at(contents, offset + done, &part);
        if (!memory) return false;
        if (part > bytes - done) part = bytes - done;
        memcpy((char *)destination + done, memory, part);
    }
    return true;
}
