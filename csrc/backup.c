#include "backup.h"

#include "backup_disk_copy.h"

static bool on_host(tms_backup_kind_t kind) { return kind == TMS_BACKUP_PINNED || kind == TMS_BACKUP_MMAP; }

tms_status_t tms_backup_prepare(tms_backup_t *backup, tms_backup_stores_t *stores, tms_wait_t *wait,
                                const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    if (on_host(backup->kind) && !backup->host) {
        status = tms_host_buffer_create(&backup->host, backup->kind, backup->bytes, stores, context, error);
        backup->fresh = status == TMS_OK;
    } else if (backup->kind == TMS_BACKUP_DISK && !(backup->file && tms_disk_file_is_usable(backup->file))) {
        /* A file that was removed, replaced or truncated since the last pause holds nothing that is still needed. */
        tms_disk_file_destroy(&stores->disk, backup->file);
        backup->file = NULL;
        status = tms_disk_file_create(&stores->disk, backup->bytes, &backup->file, wait, context, error);
        backup->fresh = status == TMS_OK;
    }
    return status;
}

tms_status_t tms_backup_save(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error) {
    if (backup->kind == TMS_BACKUP_NONE) return TMS_OK;
    /* What a retained buffer or a kept file held is being overwritten. */
    backup->saved = false;
    if (backup->kind == TMS_BACKUP_DISK) return tms_disk_copy_save(backup, copier, address, context, error);
    return tms_copier_to_host(copier, backup->host->memory, address, backup->bytes, context, error);
}

tms_status_t tms_backup_load(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error) {
    if (!backup->saved) return TMS_OK;
    if (backup->kind == TMS_BACKUP_DISK) return tms_disk_copy_load(backup, copier, address, context, error);
    return tms_copier_to_device(copier, address, backup->host->memory, backup->bytes, context, error);
}

static void drop_space(tms_backup_t *backup, tms_backup_stores_t *stores) {
    tms_host_buffer_drop(backup->host);
    backup->host = NULL;
    tms_disk_file_destroy(&stores->disk, backup->file);
    backup->file = NULL;
    backup->saved = backup->fresh = false;
}

void tms_backup_cancel(tms_backup_t *backup, tms_backup_stores_t *stores) {
    if (backup->fresh) drop_space(backup, stores);
}

void tms_backup_commit(tms_backup_t *backup) {
    backup->saved = backup->kind != TMS_BACKUP_NONE;
    backup->fresh = false;
}

void tms_backup_discard(tms_backup_t *backup, bool retain) {
    if (backup->kind == TMS_BACKUP_DISK) {
        backup->saved = false; /* the file keeps its size, so that the next pause cannot run out of space */
    } else if (!retain) {
        tms_host_buffer_drop(backup->host);
        backup->host = NULL;
        backup->saved = false;
    }
}

void tms_backup_destroy(tms_backup_t *backup, tms_backup_stores_t *stores) { drop_space(backup, stores); }
