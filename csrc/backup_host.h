/* Host buffers: page-locked (cuMemHostAlloc) or ordinary (mmap) memory with a reference count.
 *
 * The count is atomic; the memory goes with the last reference, on whatever thread drops it. No lock. */
#ifndef TMS_BACKUP_HOST_H
#define TMS_BACKUP_HOST_H

#include <stdatomic.h>

#include "device.h"

struct tms_host_buffer {
    _Atomic uint32_t references;
    tms_backup_kind_t kind; /* PINNED or MMAP */
    void *memory;
    uint64_t bytes; /* mapped: whole pages */
    tms_devices_t *devices;
    int device; /* in whose context it was pinned */
    const tms_log_t *log;
    _Atomic uint64_t *total; /* bytes held by all buffers */
};

/* One reference, the caller's. PINNED is pinned in the primary context of context->device. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_buffer_create(tms_host_buffer_t **buffer, tms_backup_kind_t kind, uint64_t bytes,
                                    tms_devices_t *devices, const tms_log_t *log, _Atomic uint64_t *total,
                                    const tms_error_context_t *context, tms_error_t *error);
void tms_host_buffer_acquire(tms_host_buffer_t *buffer);
void tms_host_buffer_drop(tms_host_buffer_t *buffer); /* NULL is fine */

#endif
