/* A store that plans by fingerprint: it keeps what it has saved in host memory under the fingerprint of its first piece, and
 * copies only what it does not have. It replaces the heap store in the list of a
 * fixture, and has the kind SHARED alone. */
#ifndef TMS_TESTS_NAMED_STORE_H
#define TMS_TESTS_NAMED_STORE_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "changes.h"

enum { MAX_NAMES = 64 };

typedef struct named {
    tms_fingerprint_t name;
    uint64_t bytes;
    char *data;
} named_t;

typedef struct named_store {
    tms_fingerprinter_t *fingerprinter;
    const tms_fingerprint_key_t *key; /* set by the next `begin`, unless NULL */
    named_t names[MAX_NAMES];
    int count;
    int planned, planned_with_fingerprints; /* calls of plan with contents */
    tms_status_t fails_in_begin, fails_in_plan;
    uint64_t rejected;
} named_store_t;

static named_store_t named;

/* The contents of a backup. */
typedef struct copy {
    uint64_t bytes;
    char data[];
} copy_t;

static const tms_fingerprint_t *name_of(const tms_backup_t *backup, const tms_extent_t *extent) {
    uint64_t index = 0;
    for (const tms_extent_t *each = backup->planned.extents; each < extent; each++) {
        const tms_backup_content_t one = {
            .bytes = each->bytes, .extents = (tms_extent_t *)(uintptr_t)each, .extent_count = 1};
        index += tms_fingerprints_count(&one);
    }
    return &backup->fingerprints.fresh[index];
}

static const named_t *find_name(const tms_fingerprint_t *name, uint64_t bytes) {
    for (int i = 0; i < named.count; i++) {
        if (named.names[i].bytes == bytes && memcmp(&named.names[i].name, name, sizeof *name) == 0) return &named.names[i];
    }
    return NULL;
}

static tms_status_t named_begin(void *store, void **batch, const tms_error_context_t *context, tms_error_t *error) {
    if (named.fails_in_begin != TMS_OK) return tms_error_set(error, named.fails_in_begin, context, "begin was made to fail");
    if (named.key) tms_fingerprinter_set_key(named.fingerprinter, named.key);
    named.key = NULL;
    *batch = store;
    return TMS_OK;
}

static tms_status_t named_plan(void *store, void *batch, tms_backup_t *backup, tms_backup_slot_t *slot,
                               const tms_backup_request_t *request, const tms_backup_content_t *content,
                               const tms_error_context_t *context, tms_error_t *error) {
    (void)request;
    assert_ptr_equal(batch, store);
    assert_ptr_equal(content, &backup->planned);
    if (named.fails_in_plan != TMS_OK) return tms_error_set(error, named.fails_in_plan, context, "plan was made to fail");
    if (content->bytes == 0) return TMS_OK;
    named.planned++;
    copy_t *fresh = malloc(sizeof *fresh + content->bytes);
    assert_non_null(fresh);
    fresh->bytes = content->bytes;
    slot->fresh = fresh;
    if (!backup->fingerprints.fresh) return TMS_OK;
    named.planned_with_fingerprints++;
    backup->partial = true;
    backup->changed = (tms_backup_content_t){.kind = content->kind};
    backup->changed.extents = calloc(content->extent_count, sizeof *content->extents);
    for (size_t i = 0; i < content->extent_count; i++) {
        const tms_extent_t *extent = &content->extents[i];
        const named_t *found = tms_extent_is_object(extent) ? find_name(name_of(backup, extent), extent->bytes) : NULL;
        if (found) {
            memcpy(fresh->data + extent->packed, found->data, extent->bytes);
            continue;
        }
        backup->changed.extents[backup->changed.extent_count++] = *extent;
        backup->changed.bytes += extent->bytes;
    }
    return TMS_OK;
}

static tms_status_t named_save(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                               CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    copy_t *copy = slot->fresh;
    const tms_backup_content_t *copied = tms_backup_copied(backup);
    tms_status_t status = TMS_OK;
    (void)store;
    for (size_t i = 0; i < copied->extent_count && status == TMS_OK; i++)
        status = tms_copier_to_host(copier, copy->data + copied->extents[i].packed, address + copied->extents[i].offset,
                                    copied->extents[i].bytes, context, error);
    return status;
}

static tms_status_t named_load(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                               CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    const copy_t *copy = slot->kept;
    const tms_extent_t *extents = backup->held.extents;
    tms_status_t status = TMS_OK;
    (void)store;
    for (size_t i = 0; i < backup->held.extent_count && status == TMS_OK; i++)
        status = tms_copier_to_device(copier, address + extents[i].offset, copy->data + extents[i].packed, extents[i].bytes,
                                      context, error);
    return status;
}

static void drop_copy(void **copy) {
    free(*copy);
    *copy = NULL;
}

static void remember(const tms_backup_t *backup, const copy_t *copy) {
    for (size_t i = 0; backup->fingerprints.fresh && i < backup->planned.extent_count; i++) {
        const tms_extent_t *extent = &backup->planned.extents[i];
        const tms_fingerprint_t *name = name_of(backup, extent);
        if (!tms_extent_is_object(extent) || find_name(name, extent->bytes)) continue;
        assert_true(named.count < MAX_NAMES);
        named_t *made = &named.names[named.count++];
        *made = (named_t){.name = *name, .bytes = extent->bytes, .data = malloc(extent->bytes)};
        assert_non_null(made->data);
        memcpy(made->data, copy->data + extent->packed, extent->bytes);
    }
}

static void named_commit(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)store;
    drop_copy(&slot->kept);
    slot->kept = slot->fresh;
    slot->fresh = NULL;
    if (slot->kept) remember(backup, slot->kept);
}

static void named_cancel(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)store, (void)backup;
    drop_copy(&slot->fresh);
}

static bool named_discard(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_host_policy_t policy) {
    (void)store;
    if (policy == TMS_HOST_RETAIN && backup->saved && backup->held.kind == TMS_BACKUP_SHARED) return true;
    drop_copy(&slot->kept);
    return false;
}

static void *named_find(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset,
                        uint64_t bytes, tms_host_buffer_t **buffer) {
    copy_t *copy = slot->kept;
    (void)store, (void)buffer;
    for (size_t i = 0; copy && i < backup->held.extent_count; i++) {
        const tms_extent_t *extent = &backup->held.extents[i];
        if (offset >= extent->offset && offset + bytes <= extent->offset + extent->bytes)
            return copy->data + extent->packed + (offset - extent->offset);
    }
    return NULL;
}

static void named_reject(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset,
                         tms_error_t *error) {
    (void)store;
    assert_true(backup->saved);
    assert_non_null(slot->kept);
    named.rejected = offset;
    tms_error_append(error, " The object is the test's.");
}

static void named_destroy(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)store, (void)backup;
    drop_copy(&slot->fresh);
    drop_copy(&slot->kept);
}

static const tms_backup_operations_t named_operations = {.place = "the test",
                                                         .by_fingerprint = true,
                                                         .plan = named_plan,
                                                         .save = named_save,
                                                         .load = named_load,
                                                         .commit = named_commit,
                                                         .cancel = named_cancel,
                                                         .discard = named_discard,
                                                         .find = named_find,
                                                         .reject = named_reject,
                                                         .destroy = named_destroy,
                                                         .begin = named_begin};

/* A key that depends on `seed`. */
static const tms_fingerprint_key_t *key_of(uint32_t seed) {
    static tms_fingerprint_key_t keys[2];
    fill((uint64_t)(uintptr_t)&keys[seed], sizeof keys[seed], seed + 1);
    return &keys[seed];
}

static int add_named_store(void **state) {
    fixture_t *f = *state;
    tms_backup_stores_t *stores = &f->saver.stores;
    for (int i = 0; i < stores->count; i++) stores->list[i].kinds &= ~TMS_BACKUP_BIT(SHARED);
    stores->list[--stores->count] = (tms_backup_store_t){0}; /* the heap */
    named = (named_store_t){.fingerprinter = &stores->fingerprinter, .key = key_of(0)};
    tms_backup_stores_add(stores, &named_operations, &named, TMS_BACKUP_BIT(SHARED));
    return 0;
}

static int setup_one_with_names(void **state) { return setup_one_device(state) == 0 ? add_named_store(state) : -1; }
static int setup_two_with_names(void **state) { return setup_two_devices(state) == 0 ? add_named_store(state) : -1; }

static int teardown_names(void **state) {
    for (int i = 0; i < named.count; i++) free(named.names[i].data);
    return teardown(state);
}

static copy_t *copy_of(fixture_t *f, uint64_t address) {
    tms_segment_t *segment = tms_segment_of(tms_registry_find(&f->saver.registry, address));
    return segment->backup.slots[f->saver.stores.count - 1].kept;
}

#endif
