/* The memory that disk copies go through: pinned buffers of one device, each with an event that says when the device is done
 * with it, and the io_uring that reads and writes them. They are on huge pages, which direct I/O is faster with. Where
 * pinning is refused they are ordinary memory, and the device's part is slower.
 *
 * On the heap, because what the driver or the system does not take back goes to the quarantine as it is. Used under the
 * device's context by the thread of its copier. */
#ifndef TMS_DISK_STAGING_H
#define TMS_DISK_STAGING_H

#include "backup/disk/disk.h"
#include "backup/disk/uring.h"
#include "device/device.h"

/* The size of one buffer, and of one request. Small, because a virtual disk is slower the more memory its host copies
 * through (docs/performance.md), and because what is under way then ends soon when a call is cancelled. */
#define TMS_DISK_BUFFER_BYTES TMS_DISK_BLOCK_BYTES
/* The least are a huge page. */
enum { TMS_DISK_BUFFERS_MOST = 24, TMS_DISK_BUFFERS_LEAST = 4 };

/* One mapping, of several buffers. */
typedef struct tms_disk_staging_block {
    char *memory;
    uint64_t bytes;
    bool pinned; /* registered with the driver */
} tms_disk_staging_block_t;

typedef struct tms_disk_staging {
    tms_quarantined_t node; /* first */
    tms_devices_t *devices;
    int device;
    int most, count; /* buffers there may be, and are */
    char *buffers[TMS_DISK_BUFFERS_MOST];
    CUevent events[TMS_DISK_BUFFERS_MOST];
    tms_disk_staging_block_t blocks[TMS_DISK_BUFFERS_MOST];
    int block_count;
    tms_disk_uring_t uring; /* closed, for the user to open */
} tms_disk_staging_t;

/* Empty; for buffers of `staging_bytes` in all, but TMS_DISK_BUFFERS_LEAST to TMS_DISK_BUFFERS_MOST of them. */
tms_status_t tms_disk_staging_create(tms_disk_staging_t **staging, tms_devices_t *devices, int device,
                                     uint64_t staging_bytes, const tms_error_context_t *context, tms_error_t *error);
/* `more` buffers, or as many as may still be. TMS_OUT_OF_HOST_MEMORY where there is no memory for them. `host` logs that
 * pinning was refused; it may be NULL. */
tms_status_t tms_disk_staging_grow(tms_disk_staging_t *staging, struct tms_host_store *host,
                                   const tms_driver_table_t *driver, int more, const tms_error_context_t *context,
                                   tms_error_t *error);
/* Nothing may be in flight. What cannot be given back goes to the quarantine; so does pinned memory where the call was
 * cancelled (`wait`, or NULL), because unpinning waits for everything that runs on the device. */
void tms_disk_staging_destroy(tms_disk_staging_t *staging, const tms_driver_table_t *driver, const tms_wait_t *wait,
                              const tms_log_t *log, tms_quarantine_t *quarantine);

#endif
