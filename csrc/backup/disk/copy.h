/* Between backup files and the device, as a relay of a copier (device/copier.h).
 *
 * A copier's first copy gives it a ring of staging buffers (backup/disk/staging.h), which all its files share. Each piece of
 * a file takes one, goes through two stages (from the device, to the disk; or from the disk, to the device), and several
 * pieces are in each stage at once, also of different files: the device copies, the disk transfers and the checksums are
 * computed at the same time. Pieces pass from one stage to the next, and out, in their order. What is read goes to the
 * device only once it is known to be what was written.
 *
 * A file holds what is kept of a segment without gaps: a piece of it may be of several parts of the segment. Where
 * that is less than the file the end of the last piece is whatever the buffer held. */
#ifndef TMS_BACKUP_DISK_COPY_H
#define TMS_BACKUP_DISK_COPY_H

#include "backup/content.h"
#include "backup/disk/disk.h"
#include "device/copier.h"

/* Begin to copy the content, which is not nothing and stays as it is until the copier is closed, to or from the segment at
 * `address`. The rest may happen in later calls, until the copier has waited, and fail there, with the context of its own
 * backup. After any failure the copier can only be closed. TMS_INTERRUPTED within a second, as far as the disk takes 12 MiB
 * in that. A file is a backup only once the copier has waited. */
tms_status_t tms_disk_copy_save(tms_disk_file_t *file, const tms_backup_content_t *content, tms_copier_t *copier,
                                CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_disk_copy_load(tms_disk_file_t *file, const tms_backup_content_t *content, tms_copier_t *copier,
                                CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);

#endif
