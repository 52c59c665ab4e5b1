/* Inside of the backups: between backup files and the device. Used by backup.c and copier.c alone.
 *
 * A copier's first copy gives it a ring of staging buffers (disk_staging.h), which all its files share. Each piece of a file
 * takes one, goes through two stages (from the device, to the disk; or from the disk, to the device), and several pieces are
 * in each stage at once, also of different files: the device copies, the disk transfers and the checksums are computed at
 * the same time. Pieces pass from one stage to the next, and out, in their order. What is read goes to the device only once
 * it is known to be what was written.
 *
 * A file holds what is kept of a segment without gaps: a piece of it may be of several parts of the segment. Where
 * that is less than the file the end of the last piece is whatever the buffer held. */
#ifndef TMS_BACKUP_DISK_COPY_H
#define TMS_BACKUP_DISK_COPY_H

#include "backup.h"
#include "disk_staging.h"

/* Begin to copy what is planned, or held, which is not nothing; the rest may happen in later calls, until
 * tms_disk_copy_wait, and fail there, with the context of its own backup. After any failure only tms_disk_copy_close is of
 * use. TMS_INTERRUPTED within a second, as far as the disk takes 12 MiB in that. */
tms_status_t tms_disk_copy_save(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                                const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_disk_copy_load(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                                const tms_error_context_t *context, tms_error_t *error);
/* Waits until everything is copied. Only then is a file a backup. */
tms_status_t tms_disk_copy_wait(tms_copier_t *copier, const tms_error_context_t *context, tms_error_t *error);
/* The disk has nothing in flight afterwards. `idle`: nor has the device. Otherwise the buffers must stay as they are until
 * that is so, and are the caller's; NULL where there are none. */
tms_disk_staging_t *tms_disk_copy_close(tms_copier_t *copier, bool idle);

#endif
