/* The staging buffers of disk copies: pinned memory for one device, an event for each buffer that marks the end of the
 * device's copy, and the io_uring that reads and writes them. Buffers are on huge pages, which makes direct I/O faster. If
 * pinning fails they are pageable memory, and the device's copies are slower.
 *
 * Allocated on the heap, because resources that cannot be released are quarantined with the struct. Used in the device's
 * context by the thread of its copier. No lock. */
#ifndef TMS_DISK_STAGING_H
#define TMS_DISK_STAGING_H

#include "backup/disk/disk.h"
#include "backup/disk/uring.h"
#include "device/device.h"

/* The size of one buffer, which is also the size of one request. It is small, because a virtual disk gets slower the more
 * memory its host copies through (docs/performance.md), and because requests in flight end soon when a call is cancelled. */
#define TMS_DISK_BUFFER_BYTES TMS_DISK_BLOCK_BYTES
/* The minimum is a huge page. */
enum { TMS_MAX_DISK_BUFFERS = 24, TMS_MIN_DISK_BUFFERS = 4 };

/* One mapping with several buffers. */
typedef struct tms_disk_staging_block {
    char *memory;
    uint64_t bytes;
    bool pinned; /* registered with the driver */
} tms_disk_staging_block_t;

typedef struct tms_disk_staging {
    tms_quarantined_t node; /* first */
    tms_devices_t *devices;
    int device;
    int most, count; /* maximum and number of buffers */
    char *buffers[TMS_MAX_DISK_BUFFERS];
    CUevent events[TMS_MAX_DISK_BUFFERS];
    tms_disk_staging_block_t blocks[TMS_MAX_DISK_BUFFERS];
    int block_count;
    tms_disk_uring_t uring; /* closed; opened by the queue */
} tms_disk_staging_t;

/* Creates a struct without buffers, for buffers of `staging_bytes` in total, from TMS_MIN_DISK_BUFFERS to
 * TMS_MAX_DISK_BUFFERS. */
tms_status_t tms_disk_staging_create(tms_disk_staging_t **staging, tms_devices_t *devices, int device,
                                     uint64_t staging_bytes, const tms_error_context_t *context, tms_error_t *error);
/* Adds up to `more` buffers, within the maximum. TMS_OUT_OF_HOST_MEMORY. `host` logs a failure to pin; it may be NULL. */
tms_status_t tms_disk_staging_grow(tms_disk_staging_t *staging, struct tms_host_store *host,
                                   const tms_driver_table_t *driver, int more, const tms_error_context_t *context,
                                   tms_error_t *error);
/* Releases everything; nothing may be in flight. Resources that cannot be released are quarantined. Pinned memory is
 * quarantined as well if the whole call was cancelled (`wait`, or NULL), because unpinning waits for all work on the device.
 * It is unpinned if only this part was cancelled, because another device's part has failed. */
void tms_disk_staging_destroy(tms_disk_staging_t *staging, const tms_driver_table_t *driver, const tms_wait_t *wait,
                              const tms_log_t *log, tms_quarantine_t *quarantine);

#endif
