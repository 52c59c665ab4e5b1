#include "backup/disk/operations.h"

#include "backup/disk/copy.h"
#include "backup/disk/read.h"

static void drop(void *store, void **file) {
    tms_disk_file_destroy(store, *file);
    *file = NULL;
}

/* ---- a segment ---- */

static tms_status_t plan(void *store, void *batch, tms_backup_t *backup, tms_backup_slot_t *slot,
                         const tms_backup_request_t *request, const tms_backup_content_t *content,
                         const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_file_t *fresh = NULL;
    (void)batch;
    tms_disk_file_t *file = slot->fresh ? slot->fresh : slot->kept;
    if (content->bytes == 0 || (file && tms_disk_file_is_usable(file))) return TMS_OK;
    /* A file that was removed, replaced or truncated since the last pause contains nothing that is still needed. */
    if (backup->held.kind == TMS_BACKUP_DISK) backup->saved = false;
    drop(store, &slot->kept);
    drop(store, &slot->fresh);
    /* Reserves space for the whole segment, regardless of the live bytes, so that the next pause cannot run out of space. */
    tms_status_t status = tms_disk_file_create(store, backup->bytes, &fresh, request->wait, context, error);
    if (status == TMS_OK) slot->fresh = fresh;
    return status;
}

static uint64_t block_bytes(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot) {
    (void)store;
    (void)backup;
    return slot->kept && !slot->fresh ? TMS_DISK_BLOCK_BYTES : 0;
}

static tms_status_t save(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    (void)store;
    if (backup->held.kind == TMS_BACKUP_DISK) backup->saved = false;
    return tms_disk_copy_save(slot->fresh ? slot->fresh : slot->kept, &backup->planned,
                              backup->partial ? &backup->changed : NULL, copier, address, context, error);
}

static tms_status_t load(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_copier_t *copier,
                         CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error) {
    (void)store;
    return tms_disk_copy_load(slot->kept, &backup->held, copier, address, context, error);
}

static tms_status_t read_part(void *store, const tms_backup_t *backup, const tms_backup_slot_t *slot, uint64_t offset,
                              uint64_t bytes, void *destination, bool *found, tms_wait_t *wait,
                              const tms_error_context_t *context, tms_error_t *error) {
    tms_extent_t whole;
    size_t count;
    (void)store;
    if (!slot->kept) return TMS_OK;
    const tms_extent_t *extents = tms_backup_extents(&backup->held, &whole, &count);
    for (size_t i = 0; i < count; i++) {
        const uint64_t into = offset - extents[i].offset; /* huge if the extent begins later */
        if (into > extents[i].bytes || bytes > extents[i].bytes - into) continue;
        *found = true;
        return tms_disk_read(slot->kept, extents[i].packed + into, bytes, destination, wait, context, error);
    }
    return TMS_OK;
}

static void commit(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    if (slot->fresh) slot->kept = slot->fresh; /* plan has dropped the former one */
    slot->fresh = NULL;
    if (backup->planned.kind != TMS_BACKUP_DISK && backup->kind != TMS_BACKUP_DISK) drop(store, &slot->kept);
}

static void cancel(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)backup;
    drop(store, &slot->fresh);
}

/* The file of a region with disk backups stays, so that the next pause cannot run out of space. */
static bool discard(void *store, tms_backup_t *backup, tms_backup_slot_t *slot, tms_host_policy_t policy) {
    if (policy == TMS_HOST_RETAIN && backup->saved && backup->held.kind == TMS_BACKUP_DISK) return true;
    if (backup->kind != TMS_BACKUP_DISK) drop(store, &slot->kept);
    return false;
}

static uint64_t reserved_bytes(const tms_backup_t *backup, const tms_backup_slot_t *slot) {
    return slot->kept ? backup->bytes : 0;
}

static void destroy(void *store, tms_backup_t *backup, tms_backup_slot_t *slot) {
    (void)backup;
    drop(store, &slot->fresh);
    drop(store, &slot->kept);
}

/* ---- the process ---- */

static tms_status_t init(void *store, const tms_backup_setup_t *setup, tms_error_t *error) {
    tms_disk_directory_t *directory = store;
    tms_status_t status = tms_disk_init(directory, setup->config->disk_backup_directory, setup->copying->log, error);
    if (status != TMS_OK) return status;
    directory->quarantine = setup->copying->quarantine;
    directory->host = setup->host;
    directory->staging_bytes = setup->config->disk_backup_chunk_bytes;
    return TMS_OK;
}

static void release(void *store) { tms_disk_release(store); }
static void at_exit(void *store) { tms_disk_remove_all(store); }
static void lock(void *store) { pthread_mutex_lock(&((tms_disk_directory_t *)store)->lock); }
static void unlock(void *store) { pthread_mutex_unlock(&((tms_disk_directory_t *)store)->lock); }
static void after_fork_in_child(void *store) { tms_disk_after_fork_in_child(store); }

static void count(void *store, tms_counters_t *counters) {
    counters->disk_backup_bytes += atomic_load(&((tms_disk_directory_t *)store)->total);
}

const tms_backup_operations_t tms_disk_operations = {.place = "disk",
                                                     .plan = plan,
                                                     .block_bytes = block_bytes,
                                                     .save = save,
                                                     .load = load,
                                                     .read = read_part,
                                                     .commit = commit,
                                                     .cancel = cancel,
                                                     .discard = discard,
                                                     .reserved_bytes = reserved_bytes,
                                                     .destroy = destroy,
                                                     .init = init,
                                                     .release = release,
                                                     .count = count,
                                                     .at_exit = at_exit,
                                                     .lock = lock,
                                                     .unlock = unlock,
                                                     .after_fork_in_child = after_fork_in_child};
