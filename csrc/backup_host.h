/* Host buffers: page-locked (cuMemHostAlloc) or ordinary (mmap) memory with a reference count.
 *
 * The count is atomic; the memory goes with the last reference, on whatever thread drops it. What cannot be given back goes
 * to the quarantine. In a forked child the memory is the parent's, and dropping a reference touches nothing but the count.
 * No lock. */
#ifndef TMS_BACKUP_HOST_H
#define TMS_BACKUP_HOST_H

#include <stdatomic.h>
#include <sys/types.h>

#include "device.h"
#include "quarantine.h"

struct tms_backup_stores;

struct tms_host_buffer {
    tms_quarantined_t quarantined; /* first; used once nobody has a reference any more */
    _Atomic uint32_t references;
    tms_backup_kind_t kind; /* PINNED or MMAP */
    void *memory;
    uint64_t bytes; /* mapped: whole pages */
    int device;     /* in whose context it was pinned */
    pid_t process;  /* that made it */
    struct tms_backup_stores *stores;
};

/* One reference, the caller's. PINNED is pinned in the primary context of context->device. TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_host_buffer_create(tms_host_buffer_t **buffer, tms_backup_kind_t kind, uint64_t bytes,
                                    struct tms_backup_stores *stores, const tms_error_context_t *context,
                                    tms_error_t *error);
void tms_host_buffer_acquire(tms_host_buffer_t *buffer);
void tms_host_buffer_drop(tms_host_buffer_t *buffer); /* NULL is fine */

#endif
