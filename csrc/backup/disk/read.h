/* Reads a part of a backup file into memory of the caller, for callers that want the contents on the host and not on the
 * device.
 *
 * It runs on the calling thread, with no lock held. The caller owns the segment, so the contents do not change during the
 * call. */
#ifndef TMS_BACKUP_DISK_READ_H
#define TMS_BACKUP_DISK_READ_H

#include "backup/disk/disk.h"

/* Copies `bytes` at `offset` of the backup to `destination`. `offset` is an offset in the backup, which has no gaps, and not
 * in the segment. Every block that is read must have its checksum. Whether `wait` was cancelled is checked between pieces.
 * TMS_BACKUP_IO, TMS_OUT_OF_HOST_MEMORY, TMS_INTERRUPTED. */
tms_status_t tms_disk_read(tms_disk_file_t *file, uint64_t offset, uint64_t bytes, void *destination, tms_wait_t *wait,
                           const tms_error_context_t *context, tms_error_t *error);

#endif
