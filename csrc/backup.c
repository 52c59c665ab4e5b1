#include "backup.h"

static bool on_host(tms_backup_kind_t kind) { return kind == TMS_BACKUP_PINNED || kind == TMS_BACKUP_MMAP; }

tms_status_t tms_copier_open(tms_copier_t *copier, tms_backup_stores_t *stores, int device,
                             const tms_error_context_t *context, tms_error_t *error) {
    *copier = (tms_copier_t){.stores = stores, .device = device};
    tms_status_t status = tms_devices_load(stores->devices, &copier->driver, NULL, context, error);
    if (status == TMS_OK) status = tms_devices_enter(stores->devices, device, context, error);
    if (status != TMS_OK) return status;
    /* Its own stream, which the legacy stream's implicit waits do not touch: other threads' work goes on. */
    status = TMS_DRIVER_CALL(copier->driver, context, error, cuStreamCreate, &copier->stream, CU_STREAM_NON_BLOCKING);
    if (status != TMS_OK) {
        tms_devices_leave(stores->devices, device);
        return status;
    }
    copier->open = true;
    return TMS_OK;
}

tms_status_t tms_copier_wait(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error) {
    return TMS_DRIVER_CALL(copier->driver, context, error, cuStreamSynchronize, copier->stream);
}

void tms_copier_close(tms_copier_t *copier) {
    if (!copier->open) return;
    const tms_driver_table_t *driver = copier->driver;
    /* After a failure copies may still be in flight, to memory that the caller is about to take away. A device that cannot
     * be waited for any more (a lost one) copies nothing any more either. */
    (void)driver->cuStreamSynchronize(copier->stream);
    if (copier->staging) (void)driver->cuMemFreeHost(copier->staging);
    (void)driver->cuStreamDestroy(copier->stream);
    tms_devices_leave(copier->stores->devices, copier->device);
    copier->open = false;
}

/* The staging buffer for disk copies: as large as the largest chunk that was needed so far. */
static tms_status_t need_staging(tms_copier_t *copier, uint64_t bytes, const tms_error_context_t *context,
                                 tms_error_t *error) {
    if (copier->staging_bytes >= bytes) return TMS_OK;
    if (copier->staging) {
        tms_status_t status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemFreeHost, copier->staging);
        if (status != TMS_OK) return status;
        copier->staging = NULL;
        copier->staging_bytes = 0;
    }
    void *staging = NULL;
    tms_status_t status =
        TMS_DRIVER_CALL(copier->driver, context, error, cuMemHostAlloc, &staging, bytes, CU_MEMHOSTALLOC_PORTABLE);
    if (status == TMS_OUT_OF_DEVICE_MEMORY) {
        return tms_error_set(error, TMS_OUT_OF_HOST_MEMORY, context,
                             "no pinned memory for a staging buffer of %llu bytes; lower TMS_DISK_BACKUP_CHUNK_MB",
                             (unsigned long long)bytes);
    }
    if (status != TMS_OK) return status;
    copier->staging = staging;
    copier->staging_bytes = bytes;
    return TMS_OK;
}

tms_status_t tms_backup_prepare(tms_backup_t *backup, tms_backup_stores_t *stores, const tms_error_context_t *context,
                                tms_error_t *error) {
    tms_status_t status = TMS_OK;
    if (on_host(backup->kind) && !backup->host) {
        status = tms_host_buffer_create(&backup->host, backup->kind, backup->bytes, stores->devices, stores->log,
                                        &stores->host_bytes, context, error);
        backup->fresh = status == TMS_OK;
    } else if (backup->kind == TMS_BACKUP_DISK && !backup->file) {
        status = tms_disk_file_create(&stores->disk, backup->bytes, &backup->file, context, error);
        backup->fresh = status == TMS_OK;
    }
    return status;
}

static tms_status_t save_to_disk(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                                 const tms_error_context_t *context, tms_error_t *error) {
    uint64_t chunk = copier->stores->chunk_bytes < backup->bytes ? copier->stores->chunk_bytes : backup->bytes;
    tms_status_t status = need_staging(copier, chunk, context, error);
    for (uint64_t offset = 0; status == TMS_OK && offset < backup->bytes; offset += chunk) {
        uint64_t part = backup->bytes - offset < chunk ? backup->bytes - offset : chunk;
        status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyDtoHAsync, copier->staging, address + offset, part,
                                 copier->stream);
        if (status == TMS_OK) status = tms_copier_wait(copier, context, error);
        if (status == TMS_OK) status = tms_disk_file_write(backup->file, copier->staging, part, offset, context, error);
    }
    return status;
}

static tms_status_t load_from_disk(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                                   const tms_error_context_t *context, tms_error_t *error) {
    uint64_t chunk = copier->stores->chunk_bytes < backup->bytes ? copier->stores->chunk_bytes : backup->bytes;
    tms_status_t status = need_staging(copier, chunk, context, error);
    for (uint64_t offset = 0; status == TMS_OK && offset < backup->bytes; offset += chunk) {
        uint64_t part = backup->bytes - offset < chunk ? backup->bytes - offset : chunk;
        status = tms_disk_file_read(backup->file, copier->staging, part, offset, context, error);
        if (status == TMS_OK) {
            status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyHtoDAsync, address + offset, copier->staging,
                                     part, copier->stream);
        }
        if (status == TMS_OK) status = tms_copier_wait(copier, context, error);
    }
    return status;
}

tms_status_t tms_backup_save(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error) {
    if (backup->kind == TMS_BACKUP_NONE) return TMS_OK;
    /* What a retained buffer or a kept file held is being overwritten. */
    backup->saved = false;
    if (backup->kind == TMS_BACKUP_DISK) return save_to_disk(backup, copier, address, context, error);
    return TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyDtoHAsync, backup->host->memory, address, backup->bytes,
                           copier->stream);
}

tms_status_t tms_backup_load(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                             const tms_error_context_t *context, tms_error_t *error) {
    if (!backup->saved) return TMS_OK;
    if (backup->kind == TMS_BACKUP_DISK) return load_from_disk(backup, copier, address, context, error);
    return TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyHtoDAsync, address, backup->host->memory, backup->bytes,
                           copier->stream);
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
