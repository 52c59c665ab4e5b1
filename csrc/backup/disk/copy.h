/* Copies between backup files and the device, as a relay of a copier (device/copier.h). The copier owns the relay; its
 * thread calls. No lock.
 *
 * A copier's first copy creates a ring of staging buffers (backup/disk/staging.h), which all its files share. Each piece of
 * a file takes a buffer and goes through two stages (from the device, to the disk; or from the disk, to the device). Each
 * stage holds several pieces at once, also of different files, so the device, the disk and the checksums work in parallel.
 * Pieces leave each stage in order. Data that was read goes to the device only after its checksum has been verified.
 *
 * A file holds the kept parts of a segment without gaps, so a piece may consist of several parts. If they are smaller than
 * the file, the end of the last piece is undefined. */
#ifndef TMS_BACKUP_DISK_COPY_H
#define TMS_BACKUP_DISK_COPY_H

#include "backup/content.h"
#include "backup/disk/disk.h"
#include "device/copier.h"

/* Begin to copy the content, which is not empty and stays unchanged until the copier is closed, from or to the segment at
 * `address`. `changed` is NULL, or the part of the content that differs from what the file holds: whole blocks of
 * TMS_DISK_BLOCK_BYTES, and only these are written. Parts of the copy may run, and fail, in later calls until the copier has
 * waited; errors name the right backup. After a failure the copier can only be closed. TMS_INTERRUPTED within a second if
 * the disk transfers at least 12 MiB/s. A file is a valid backup only once the copier has waited. */
tms_status_t tms_disk_copy_save(tms_disk_file_t *file, const tms_backup_content_t *content,
                                const tms_backup_content_t *changed, tms_copier_t *copier, CUdeviceptr address,
                                const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_disk_copy_load(tms_disk_file_t *file, const tms_backup_content_t *content, tms_copier_t *copier,
                                CUdeviceptr address, const tms_error_context_t *context, tms_error_t *error);

#endif
