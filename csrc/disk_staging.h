/* The memory that disk copies go through: page-locked buffers of one device, each with an event that says when the device is
 * done with it, and the io_uring that reads and writes them. On huge pages: direct I/O to 4 KiB pages, which lie anywhere,
 * was a third slower on a virtual disk. Where page-locking is refused they are ordinary memory, and the device's part is
 * slower.
 *
 * On the heap, because what the driver or the system does not take back goes to the quarantine as it is. Used under the
 * device's context by the thread of its copier. */
#ifndef TMS_DISK_STAGING_H
#define TMS_DISK_STAGING_H

#include "backup.h"
#include "disk_uring.h"

/* Of one buffer, and of one request. All of them together are small, because the disk of an H200 machine is a virtual one,
 * whose host copies what is read, and that is slower the more memory it goes through (4 GiB by eight threads of their own: 8
 * buffers of 1 MiB 1.57 s, 24 of them 1.92 s, 8 of 512 KiB 1.46 s). With 16 of these at once a resume reached 1.00 of direct
 * I/O measured alone, with 8 of 1 MiB 0.97. And what is under way ends soon when a call is to stop. */
#define TMS_DISK_BUFFER_BYTES TMS_DISK_BLOCK_BYTES
/* The least are a huge page. */
enum { TMS_DISK_BUFFERS_MOST = 24, TMS_DISK_BUFFERS_LEAST = 4 };

/* One mapping, of several buffers. */
typedef struct tms_disk_staging_block {
    char *memory;
    uint64_t bytes;
    bool locked; /* registered with the driver */
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
/* `more` buffers, or as many as may still be. TMS_OUT_OF_HOST_MEMORY where there is no memory for them. */
tms_status_t tms_disk_staging_grow(tms_disk_staging_t *staging, tms_backup_stores_t *stores,
                                   const tms_driver_table_t *driver, int more, const tms_error_context_t *context,
                                   tms_error_t *error);
/* Nothing may be in flight. What cannot be given back goes to the quarantine; and so does what is page-locked where the call
 * is to stop (`wait`, or NULL): giving that back waits for everything that runs on the device. */
void tms_disk_staging_destroy(tms_disk_staging_t *staging, const tms_driver_table_t *driver, const tms_wait_t *wait,
                              const tms_log_t *log, tms_quarantine_t *quarantine);

#endif
