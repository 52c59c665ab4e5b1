#include "backup/disk/staging.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "backup/host/map.h"
#include "backup/host/store.h"

tms_status_t tms_disk_staging_create(tms_disk_staging_t **staging, tms_devices_t *devices, int device,
                                     uint64_t staging_bytes, const tms_error_context_t *context, tms_error_t *error) {
    tms_disk_staging_t *made = calloc(1, sizeof *made);
    if (!made) return tms_error_set_os(error, context, "calloc", ENOMEM, NULL);
    uint64_t most = staging_bytes / TMS_DISK_BUFFER_BYTES;
    if (most < TMS_MIN_DISK_BUFFERS) most = TMS_MIN_DISK_BUFFERS;
    if (most > TMS_MAX_DISK_BUFFERS) most = TMS_MAX_DISK_BUFFERS;
    made->devices = devices;
    made->device = device;
    made->most = (int)most;
    made->uring.fd = -1;
    *staging = made;
    return TMS_OK;
}

/* ---- buffers ---- */

static tms_status_t pin(tms_disk_staging_block_t *block, tms_host_store_t *host, const tms_driver_table_t *driver,
                        const tms_error_context_t *context, tms_error_t *error) {
    tms_error_t reason;
    tms_status_t status = TMS_DRIVER_CALL(driver, context, &reason, cuMemHostRegister, block->memory, block->bytes,
                                          CU_MEMHOSTREGISTER_PORTABLE);
    block->pinned = status == TMS_OK;
    if (status == TMS_OK) return TMS_OK;
    if (!tms_driver_is_gone(&reason)) {
        if (host) tms_host_warn_not_pinned(host, &reason);
        return TMS_OK;
    }
    if (error) *error = reason;
    return status;
}

static tms_status_t add_block(tms_disk_staging_t *staging, uint64_t bytes, tms_host_store_t *host,
                              const tms_driver_table_t *driver, const tms_error_context_t *context, tms_error_t *error) {
    tms_error_context_t here = *context;
    here.bytes = bytes;
    char *memory = tms_host_map(bytes);
    if (!memory) {
        tms_status_t status = tms_error_set_os(error, &here, "mmap", errno, NULL);
        if (error) tms_error_append(error, " TMS_DISK_BACKUP_CHUNK_MB limits the size of the staging buffers.");
        return status;
    }
    tms_disk_staging_block_t *block = &staging->blocks[staging->block_count++];
    *block = (tms_disk_staging_block_t){.memory = memory, .bytes = bytes};
    return pin(block, host, driver, &here, error);
}

tms_status_t tms_disk_staging_grow(tms_disk_staging_t *staging, tms_host_store_t *host, const tms_driver_table_t *driver,
                                   int more, const tms_error_context_t *context, tms_error_t *error) {
    if (more > staging->most - staging->count) more = staging->most - staging->count;
    tms_status_t status = add_block(staging, (uint64_t)more * TMS_DISK_BUFFER_BYTES, host, driver, context, error);
    if (status != TMS_OK) return status;
    char *memory = staging->blocks[staging->block_count - 1].memory;
    for (int i = 0; i < more; i++) {
        CUevent *event = &staging->events[staging->count];
        status = TMS_DRIVER_CALL(driver, context, error, cuEventCreate, event, CU_EVENT_DISABLE_TIMING);
        if (status != TMS_OK) return status;
        staging->buffers[staging->count++] = memory + (uint64_t)i * TMS_DISK_BUFFER_BYTES;
    }
    return TMS_OK;
}

/* ---- releasing ---- */

static bool release_block(tms_disk_staging_block_t *block, const tms_driver_table_t *driver) {
    if (block->pinned) {
        CUresult result = driver->cuMemHostUnregister ? driver->cuMemHostUnregister(block->memory) : CUDA_ERROR_UNKNOWN;
        /* If the driver has shut down, the device may still be running: the memory stays mapped. */
        if (tms_status_from_driver(result) == TMS_DRIVER_UNAVAILABLE) return true;
        /* The context may have been reset or destroyed together with the registration. */
        if (result != CUDA_SUCCESS && result != CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) return false;
        block->pinned = false;
    }
    return munmap(block->memory, block->bytes) == 0;
}

/* Releases what it can, in the device's context, and returns what is left. `keep_pinned`: keeps pinned memory. */
static tms_quarantine_mask_t release_all(tms_disk_staging_t *staging, const tms_driver_table_t *driver, bool keep_pinned) {
    tms_quarantine_mask_t left = tms_disk_uring_close(&staging->uring) ? 0 : TMS_QUARANTINE_BIT(HOST);
    for (int i = 0; i < TMS_MAX_DISK_BUFFERS; i++) {
        tms_disk_staging_block_t *block = &staging->blocks[i];
        if (block->memory && !(keep_pinned && block->pinned) && release_block(block, driver)) block->memory = NULL;
        if (staging->events[i] && TMS_RELEASED(driver, cuEventDestroy, staging->events[i])) staging->events[i] = NULL;
        if (block->memory) left |= TMS_QUARANTINE_BIT(HOST);
        if (staging->events[i]) left |= TMS_QUARANTINE_BIT(OTHER);
    }
    return left;
}

static tms_quarantine_mask_t retry(tms_quarantined_t *node) {
    tms_disk_staging_t *staging = (tms_disk_staging_t *)node;
    tms_error_context_t context = {.operation = "reclaim", .device = staging->device};
    if (tms_devices_enter(staging->devices, staging->device, &context, NULL) != TMS_OK) return node->holds;
    tms_quarantine_mask_t left = release_all(staging, atomic_load(&staging->devices->driver->table), false);
    tms_devices_leave(staging->devices, staging->device);
    if (!left) free(staging);
    return left;
}

void tms_disk_staging_destroy(tms_disk_staging_t *staging, const tms_driver_table_t *driver, const tms_wait_t *wait,
                              const tms_log_t *log, tms_quarantine_t *quarantine) {
    bool keep_pinned = tms_wait_ends_call(wait);
    staging->node = (tms_quarantined_t){.retry = retry, .holds = release_all(staging, driver, keep_pinned)};
    if (!staging->node.holds) {
        free(staging);
        return;
    }
    tms_log_write(log, keep_pinned ? TMS_LOG_INFO : TMS_LOG_WARNING,
                  "an event or a staging buffer of disk copies on device %d could not be released; later calls retry it",
                  staging->device);
    tms_quarantine_add(quarantine, &staging->node);
}
