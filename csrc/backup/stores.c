#include "backup/stores.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- the list ---- */

void tms_backup_stores_add(tms_backup_stores_t *stores, const tms_backup_operations_t *operations, void *store,
                           unsigned kinds) {
    stores->list[stores->count++] = (tms_backup_store_t){operations, store, kinds};
}

tms_status_t tms_backup_stores_init(tms_backup_stores_t *stores, const tms_config_t *config, const tms_copying_t *copying,
                                    tms_error_t *error) {
    *stores = (tms_backup_stores_t){.copying = *copying};
    const tms_backup_store_t rows[] = {
#define ROW(member, type, operations, kinds) {&(operations), &stores->member, (kinds)},
        TMS_BACKUP_STORE_ROWS(ROW)
#undef ROW
    };
    enum { ROWS = sizeof rows / sizeof *rows };
    _Static_assert((int)ROWS < (int)TMS_MAX_BACKUP_STORES, "there is room for one that is added");
    const tms_backup_setup_t setup = {
        .config = config, .copying = &stores->copying, .host = &stores->host, .fingerprinter = &stores->fingerprinter};
    tms_status_t status = TMS_OK;
    for (int i = 0; i < ROWS && status == TMS_OK; i++) {
        status = rows[i].operations->init(rows[i].store, &setup, error);
        if (status == TMS_OK) tms_backup_stores_add(stores, rows[i].operations, rows[i].store, rows[i].kinds);
    }
    if (status == TMS_OK) return TMS_OK;
    tms_backup_stores_drain(stores);
    tms_backup_stores_release(stores);
    return status;
}

const tms_backup_store_t *tms_backup_stores_find(const tms_backup_stores_t *stores, tms_backup_kind_t kind) {
    if ((unsigned)kind >= 8 * sizeof stores->list->kinds) return NULL;
    for (int i = 0; i < stores->count; i++) {
        if (stores->list[i].kinds & (uint64_t)1 << kind) return &stores->list[i];
    }
    return NULL;
}

/* ---- all of them ---- */

/* Calls an optional operation. */
#define CALL(entry, operation, ...)                                                                                         \
    do {                                                                                                                    \
        if ((entry)->operations->operation) (entry)->operations->operation(__VA_ARGS__);                                    \
    } while (0)
#define FOR_EACH(entry, stores)                                                                                             \
    for (const tms_backup_store_t *entry = (stores)->list; entry < (stores)->list + (stores)->count; entry++)

void tms_backup_stores_drain(tms_backup_stores_t *stores) {
    FOR_EACH(entry, stores) CALL(entry, drain, entry->store);
    tms_fingerprinter_release(&stores->fingerprinter, stores->copying.devices);
}

void tms_backup_stores_release(tms_backup_stores_t *stores) { FOR_EACH(entry, stores) CALL(entry, release, entry->store); }

void tms_backup_stores_enter_call(tms_backup_stores_t *stores) {
    FOR_EACH(entry, stores) CALL(entry, enter_call, entry->store);
}

void tms_backup_stores_leave_call(tms_backup_stores_t *stores) {
    FOR_EACH(entry, stores) CALL(entry, leave_call, entry->store);
}

void tms_backup_stores_after_pause(tms_backup_stores_t *stores) {
    FOR_EACH(entry, stores) CALL(entry, after_pause, entry->store);
}

void tms_backup_stores_after_resume(tms_backup_stores_t *stores) {
    FOR_EACH(entry, stores) CALL(entry, after_resume, entry->store);
}

void tms_backup_stores_retry(tms_backup_stores_t *stores) { FOR_EACH(entry, stores) CALL(entry, retry, entry->store); }

void tms_backup_stores_count(const tms_backup_stores_t *stores, tms_counters_t *counters) {
    FOR_EACH(entry, stores) CALL(entry, count, entry->store, counters);
}

void tms_backup_stores_close(tms_backup_stores_t *stores, double deadline) {
    FOR_EACH(entry, stores) CALL(entry, close, entry->store, deadline);
}

void tms_backup_stores_at_exit(tms_backup_stores_t *stores) { FOR_EACH(entry, stores) CALL(entry, at_exit, entry->store); }

/* Locks the last store first, because a store may take the locks of stores before it in the list. */
void tms_backup_stores_lock(tms_backup_stores_t *stores) {
    for (int i = stores->count; i-- > 0;) CALL(&stores->list[i], lock, stores->list[i].store);
}

void tms_backup_stores_unlock(tms_backup_stores_t *stores) { FOR_EACH(entry, stores) CALL(entry, unlock, entry->store); }

void tms_backup_stores_after_fork_in_child(tms_backup_stores_t *stores) {
    for (int i = stores->count; i-- > 0;) CALL(&stores->list[i], after_fork_in_child, stores->list[i].store);
}

/* ---- one pause ---- */

static tms_status_t begin(const tms_backup_store_t *entry, void **batch, const tms_error_context_t *context,
                          tms_error_t *error) {
    const tms_error_context_t here = {.operation = context->operation, .device = TMS_NO_DEVICE};
    return *batch || !entry->operations->begin ? TMS_OK : entry->operations->begin(entry->store, batch, &here, error);
}

tms_status_t tms_backup_batch_start(tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                                    const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    for (int i = 0; i < stores->count && status == TMS_OK; i++) {
        if (batch->by_store[i] && stores->list[i].operations->start)
            status = stores->list[i].operations->start(batch->by_store[i], context, error);
    }
    return status;
}

tms_status_t tms_backup_batch_check_room(tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                                         const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    for (int i = 0; i < stores->count && status == TMS_OK; i++) {
        if (batch->by_store[i] && stores->list[i].operations->check_room)
            status = stores->list[i].operations->check_room(batch->by_store[i], context, error);
    }
    return status;
}

bool tms_backup_batch_can_help(const tms_backup_stores_t *stores, const tms_backup_batch_t *batch) {
    for (int i = 0; i < stores->count; i++) {
        if (batch->by_store[i] && stores->list[i].operations->help) return true;
    }
    return false;
}

bool tms_backup_batch_help(const tms_backup_stores_t *stores, const tms_backup_batch_t *batch, int device) {
    for (int i = 0; i < stores->count; i++) {
        const tms_backup_operations_t *operations = stores->list[i].operations;
        if (batch->by_store[i] && operations->help && operations->help(batch->by_store[i], device)) return true;
    }
    return false;
}

void tms_backup_batch_end(tms_backup_stores_t *stores, tms_backup_batch_t *batch) {
    for (int i = 0; i < stores->count; i++) {
        if (batch->by_store[i]) CALL(&stores->list[i], end, batch->by_store[i]);
        batch->by_store[i] = NULL;
    }
}

/* ---- one segment ---- */

static bool is_empty(const tms_backup_slot_t *slot) { return !slot->kept && !slot->fresh; }

bool tms_backup_can_compare(const tms_backup_stores_t *stores, tms_backup_kind_t kind) {
    const tms_backup_store_t *entry = tms_backup_stores_find(stores, kind);
    return entry && entry->operations->block_bytes;
}

static bool plans_by_fingerprint(const tms_backup_stores_t *stores, tms_backup_kind_t kind) {
    const tms_backup_store_t *entry = tms_backup_stores_find(stores, kind);
    return entry && entry->operations->by_fingerprint;
}

tms_status_t tms_backup_choose(tms_backup_t *backup, tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                               tms_backup_kind_t kind, const tms_live_t *live, uint64_t address,
                               const tms_error_context_t *context, tms_error_t *error) {
    const tms_backup_store_t *entry = tms_backup_stores_find(stores, kind);
    tms_status_t status = tms_backup_content_choose(&backup->planned, kind, live, address, backup->bytes, context, error);
    if (status == TMS_OK && entry) status = begin(entry, &batch->by_store[entry - stores->list], context, error);
    if (status == TMS_OK && !tms_backup_contents_match(&backup->held, &backup->planned))
        tms_fingerprints_cancel(&backup->fingerprints);
    return status;
}

bool tms_backup_needs_fingerprints(tms_backup_t *backup, const tms_backup_stores_t *stores) {
    if (backup->fingerprints.fresh_key != stores->fingerprinter.keys) tms_fingerprints_cancel(&backup->fingerprints);
    return !backup->fingerprints.fresh && backup->planned.bytes > 0 && plans_by_fingerprint(stores, backup->planned.kind);
}

/* Finds out what has changed since the held contents were saved, once the plan is made. */
static tms_status_t find_changes(tms_backup_t *backup, const tms_backup_store_t *entry, const tms_backup_slot_t *slot,
                                 const tms_error_context_t *context, tms_error_t *error) {
    const uint64_t block = entry->operations->block_bytes(entry->store, backup, slot);
    backup->partial = tms_fingerprints_are_comparable(&backup->fingerprints) && block > 0;
    if (!backup->partial) return TMS_OK;
    return tms_fingerprints_compare(&backup->fingerprints, &backup->planned, block, &backup->changed, context, error);
}

tms_status_t tms_backup_plan(tms_backup_t *backup, tms_backup_stores_t *stores, tms_backup_batch_t *batch,
                             const tms_backup_request_t *request, const tms_error_context_t *context, tms_error_t *error) {
    const tms_backup_store_t *entry = tms_backup_stores_find(stores, backup->planned.kind);
    if (!entry) return TMS_OK;
    size_t index = (size_t)(entry - stores->list);
    tms_status_t status = entry->operations->plan(entry->store, batch->by_store[index], backup, &backup->slots[index],
                                                  request, &backup->planned, context, error);
    if (status != TMS_OK || !entry->operations->block_bytes) return status;
    return find_changes(backup, entry, &backup->slots[index], context, error);
}

tms_status_t tms_backup_save(tms_backup_t *backup, tms_backup_stores_t *stores, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error) {
    const tms_backup_store_t *entry = tms_backup_stores_find(stores, backup->planned.kind);
    if (!entry || tms_backup_copied(backup)->bytes == 0) return TMS_OK;
    return entry->operations->save(entry->store, backup, &backup->slots[entry - stores->list], copier, address, context,
                                   error);
}

tms_status_t tms_backup_load(tms_backup_t *backup, tms_backup_stores_t *stores, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error) {
    if (tms_backup_held_bytes(backup) == 0) return TMS_OK;
    const tms_backup_store_t *entry = tms_backup_stores_find(stores, backup->held.kind);
    if (!entry)
        return tms_error_set(error, TMS_INVALID_STATE, context,
                             "the backup has the unknown kind %d, so its contents cannot be restored",
                             (int)backup->held.kind);
    return entry->operations->load(entry->store, backup, &backup->slots[entry - stores->list], copier, address, context,
                                   error);
}

bool tms_backup_can_verify(const tms_backup_t *backup, const tms_backup_stores_t *stores) {
    const uint64_t keys = stores->fingerprinter.keys;
    return tms_backup_held_bytes(backup) > 0 && plans_by_fingerprint(stores, backup->held.kind) &&
           backup->fingerprints.kept && keys > 0 && backup->fingerprints.kept_key == keys;
}

/* Whether a fingerprint of an object differs. *place becomes the offset in the segment of the first chunk that does. */
static bool finds_damage(const tms_backup_t *backup, uint64_t *place) {
    const tms_fingerprints_t *fingerprints = &backup->fingerprints;
    tms_extent_t whole, chunk;
    size_t count;
    uint64_t index = 0;
    const tms_extent_t *extents = tms_backup_extents(&backup->held, &whole, &count);
    for (size_t i = 0; i < count; i++) {
        for (uint64_t done = 0; done < extents[i].bytes; done += chunk.bytes, index++) {
            chunk = tms_fingerprints_chunk(&extents[i], done);
            *place = chunk.offset;
            if (tms_extent_is_object(&extents[i]) &&
                memcmp(&fingerprints->kept[index], &fingerprints->fresh[index], sizeof *fingerprints->kept) != 0)
                return true;
        }
    }
    return false;
}

tms_status_t tms_backup_verify(tms_backup_t *backup, const tms_backup_stores_t *stores, const tms_error_context_t *context,
                               tms_error_t *error) {
    const tms_backup_store_t *entry = tms_backup_stores_find(stores, backup->held.kind);
    uint64_t place = 0;
    const bool damaged = entry && tms_fingerprints_are_comparable(&backup->fingerprints) && finds_damage(backup, &place);
    tms_fingerprints_cancel(&backup->fingerprints);
    if (!damaged) return TMS_OK;
    tms_status_t status = tms_error_set(error, TMS_BACKUP_IO, context,
                                        "what was restored from byte %llu of the allocation on is not what was paused",
                                        (unsigned long long)place);
    CALL(entry, reject, entry->store, backup, &backup->slots[entry - stores->list], place, error);
    return status;
}

void tms_backup_copy_all(tms_backup_t *backup) {
    backup->partial = false;
    tms_backup_content_forget(&backup->changed);
}

void tms_backup_cancel(tms_backup_t *backup, tms_backup_stores_t *stores) {
    for (int i = 0; i < stores->count; i++) {
        if (!is_empty(&backup->slots[i])) CALL(&stores->list[i], cancel, stores->list[i].store, backup, &backup->slots[i]);
    }
    tms_backup_content_forget(&backup->planned);
    tms_backup_copy_all(backup);
    tms_fingerprints_cancel(&backup->fingerprints);
    if (!backup->saved) tms_backup_content_forget(&backup->held);
}

void tms_backup_commit(tms_backup_t *backup, tms_backup_stores_t *stores) {
    for (int i = 0; i < stores->count; i++) {
        if (!is_empty(&backup->slots[i])) CALL(&stores->list[i], commit, stores->list[i].store, backup, &backup->slots[i]);
    }
    tms_backup_copy_all(backup);
    tms_fingerprints_commit(&backup->fingerprints);
    tms_backup_content_forget(&backup->held);
    backup->held = backup->planned;
    backup->planned = (tms_backup_content_t){.kind = TMS_BACKUP_NONE};
    backup->saved = backup->held.kind != TMS_BACKUP_NONE;
}

void tms_backup_discard(tms_backup_t *backup, tms_backup_stores_t *stores, tms_host_policy_t policy) {
    const tms_backup_store_t *holder = tms_backup_stores_find(stores, backup->held.kind);
    bool retained = false;
    for (int i = 0; i < stores->count; i++) {
        const tms_backup_store_t *entry = &stores->list[i];
        /* The store of empty held contents is called as well, because it may retain them. */
        if (entry == holder || !is_empty(&backup->slots[i]))
            retained |= entry->operations->discard(entry->store, backup, &backup->slots[i], policy);
    }
    if (retained) return;
    tms_backup_content_forget(&backup->held);
    tms_fingerprints_forget(&backup->fingerprints);
    backup->saved = false;
}

tms_backup_t tms_backup_take(tms_backup_t *backup) {
    const tms_backup_t taken = *backup;
    *backup = (tms_backup_t){.kind = taken.kind, .policy = taken.policy, .bytes = taken.bytes};
    return taken;
}

void tms_backup_destroy(tms_backup_t *backup, tms_backup_stores_t *stores) {
    for (int i = 0; i < stores->count; i++) {
        if (!is_empty(&backup->slots[i])) CALL(&stores->list[i], destroy, stores->list[i].store, backup, &backup->slots[i]);
    }
    tms_backup_content_forget(&backup->planned);
    tms_backup_content_forget(&backup->held);
    tms_backup_copy_all(backup);
    tms_fingerprints_forget(&backup->fingerprints);
    backup->saved = false;
}

void *tms_backup_find(const tms_backup_t *backup, const tms_backup_stores_t *stores, uint64_t offset, uint64_t bytes,
                      tms_host_buffer_t **buffer) {
    const tms_backup_store_t *entry = backup->saved ? tms_backup_stores_find(stores, backup->held.kind) : NULL;
    if (!entry || !entry->operations->find) return NULL;
    return entry->operations->find(entry->store, backup, &backup->slots[entry - stores->list], offset, bytes, buffer);
}

tms_status_t tms_backup_read(const tms_backup_t *backup, const tms_backup_stores_t *stores, uint64_t offset, uint64_t bytes,
                             void *destination, bool *found, tms_wait_t *wait, const tms_error_context_t *context,
                             tms_error_t *error) {
    const tms_backup_store_t *entry = backup->saved ? tms_backup_stores_find(stores, backup->held.kind) : NULL;
    *found = false;
    if (!entry || !entry->operations->read) return TMS_OK;
    return entry->operations->read(entry->store, backup, &backup->slots[entry - stores->list], offset, bytes, destination,
                                   found, wait, context, error);
}

/* The comparison of a backup with its copy. */
typedef struct comparison {
    const tms_backup_t *backup, *copy;
    const tms_backup_stores_t *stores;
    const tms_backup_store_t *entry; /* which holds the backup */
    char *buffer;                    /* for one part of a backup that can only be read */
    bool *differs;
    uint64_t *place;
    tms_wait_t *wait;
} comparison_t;

/* Compares `bytes` at `offset` of the segment. */
static tms_status_t compare_part(const comparison_t *all, uint64_t offset, uint64_t bytes,
                                 const tms_error_context_t *context, tms_error_t *error) {
    const tms_backup_operations_t *operations = all->entry->operations;
    const tms_backup_slot_t *slot = &all->backup->slots[all->entry - all->stores->list];
    const char *expected = tms_backup_find(all->copy, all->stores, offset, bytes, NULL), *held = all->buffer;
    tms_status_t status = TMS_OK;
    bool found = true;
    if (operations->find)
        held = operations->find(all->entry->store, all->backup, slot, offset, bytes, NULL);
    else
        status = operations->read(all->entry->store, all->backup, slot, offset, bytes, all->buffer, &found, all->wait,
                                  context, error);
    if (status == TMS_OK && !(held && found && expected))
        return tms_error_set(error, TMS_INVALID_STATE, context, "the backup or its copy has no byte %llu",
                             (unsigned long long)offset);
    if (status != TMS_OK || memcmp(held, expected, bytes) == 0) return status;
    uint64_t first = 0;
    while (held[first] == expected[first]) first++;
    *all->place = offset + first;
    *all->differs = true;
    return TMS_OK;
}

tms_status_t tms_backup_compare(const tms_backup_t *backup, const tms_backup_t *copy, const tms_backup_stores_t *stores,
                                bool *differs, uint64_t *place, tms_wait_t *wait, const tms_error_context_t *context,
                                tms_error_t *error) {
    enum { PART_BYTES = 8 << 20 };
    tms_extent_t whole;
    size_t count;
    const tms_extent_t *extents = tms_backup_extents(&backup->held, &whole, &count);
    comparison_t all = {.backup = backup, .copy = copy, .stores = stores, .differs = differs, .place = place, .wait = wait};
    all.entry = tms_backup_stores_find(stores, backup->held.kind);
    *differs = false;
    if (!all.entry) return TMS_OK; /* it holds nothing */
    all.buffer = malloc(PART_BYTES);
    tms_status_t status = all.buffer ? TMS_OK : tms_error_set_os(error, context, "malloc", ENOMEM, NULL);
    for (size_t i = 0; status == TMS_OK && !*differs && i < count; i++) {
        for (uint64_t part, done = 0; status == TMS_OK && !*differs && done < extents[i].bytes; done += part) {
            part = extents[i].bytes - done < PART_BYTES ? extents[i].bytes - done : PART_BYTES;
            status = compare_part(&all, extents[i].offset + done, part, context, error);
        }
    }
    free(all.buffer);
    return status;
}

void tms_backup_taken_by_store(const tms_backup_t *backup, const tms_backup_stores_t *stores, uint64_t *bytes) {
    for (int i = 0; i < stores->count; i++) {
        const tms_backup_store_t *entry = &stores->list[i];
        if (backup->saved)
            bytes[i] = entry->kinds >> backup->held.kind & 1 ? backup->held.bytes : 0;
        else
            bytes[i] = entry->operations->reserved_bytes ? entry->operations->reserved_bytes(backup, &backup->slots[i]) : 0;
    }
}

uint64_t tms_backup_taken_bytes(const tms_backup_t *backup, const tms_backup_stores_t *stores) {
    uint64_t by_store[TMS_MAX_BACKUP_STORES] = {0}, bytes = 0;
    tms_backup_taken_by_store(backup, stores, by_store);
    for (int i = 0; i < stores->count; i++) bytes += by_store[i];
    return bytes;
}
