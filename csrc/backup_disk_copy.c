#include "backup_disk_copy.h"

/* How much is read or written between two looks at whether the call is to stop: a slow disk takes its time. */
#define STEP_BYTES (32 * TMS_DISK_BLOCK_BYTES)

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
    tms_error_t reason;
    tms_error_context_t here = *context;
    here.bytes = bytes;
    tms_status_t status =
        TMS_DRIVER_CALL(copier->driver, &here, &reason, cuMemHostAlloc, &staging, bytes, CU_MEMHOSTALLOC_PORTABLE);
    if (status == TMS_OUT_OF_DEVICE_MEMORY) {
        return tms_driver_explain(error, &reason, TMS_OUT_OF_HOST_MEMORY, &here,
                                  "no pinned memory for a staging buffer of that size; lower TMS_DISK_BACKUP_CHUNK_MB");
    }
    if (status != TMS_OK && error) *error = reason;
    if (status != TMS_OK) return status;
    copier->staging = staging;
    copier->staging_bytes = bytes;
    return TMS_OK;
}

/* One chunk between the staging buffer and the file. */
static tms_status_t transfer(tms_backup_t *backup, tms_copier_t *copier, bool write, uint64_t bytes, uint64_t offset,
                             const tms_error_context_t *context, tms_error_t *error) {
    tms_status_t status = TMS_OK;
    for (uint64_t done = 0; status == TMS_OK && done < bytes; done += STEP_BYTES) {
        char *data = (char *)copier->staging + done;
        uint64_t part = bytes - done < STEP_BYTES ? bytes - done : STEP_BYTES;
        status = write ? tms_disk_file_write(backup->file, data, part, offset + done, context, error)
                       : tms_disk_file_read(backup->file, data, part, offset + done, context, error);
        if (status == TMS_OK) status = tms_wait_check(copier->wait, context, error);
    }
    return status;
}

tms_status_t tms_disk_copy_save(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                                const tms_error_context_t *context, tms_error_t *error) {
    uint64_t chunk = copier->stores->chunk_bytes < backup->bytes ? copier->stores->chunk_bytes : backup->bytes;
    tms_status_t status = need_staging(copier, chunk, context, error);
    for (uint64_t offset = 0; status == TMS_OK && offset < backup->bytes; offset += chunk) {
        uint64_t part = backup->bytes - offset < chunk ? backup->bytes - offset : chunk;
        status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyDtoHAsync, copier->staging, address + offset, part,
                                 copier->stream);
        if (status == TMS_OK) status = tms_copier_wait(copier, context, error);
        if (status == TMS_OK) status = transfer(backup, copier, true, part, offset, context, error);
    }
    return status;
}

tms_status_t tms_disk_copy_load(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                                const tms_error_context_t *context, tms_error_t *error) {
    uint64_t chunk = copier->stores->chunk_bytes < backup->bytes ? copier->stores->chunk_bytes : backup->bytes;
    tms_status_t status = need_staging(copier, chunk, context, error);
    for (uint64_t offset = 0; status == TMS_OK && offset < backup->bytes; offset += chunk) {
        uint64_t part = backup->bytes - offset < chunk ? backup->bytes - offset : chunk;
        status = transfer(backup, copier, false, part, offset, context, error);
        if (status == TMS_OK) {
            status = TMS_DRIVER_CALL(copier->driver, context, error, cuMemcpyHtoDAsync, address + offset, copier->staging,
                                     part, copier->stream);
        }
        if (status == TMS_OK) status = tms_copier_wait(copier, context, error);
    }
    return status;
}
