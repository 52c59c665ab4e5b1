/* Inside of the backups: between a backup file and the device, through the copier's staging buffer. Used by backup.c alone.
 *
 * Both return when everything is copied; nothing of theirs is in flight afterwards. */
#ifndef TMS_BACKUP_DISK_COPY_H
#define TMS_BACKUP_DISK_COPY_H

#include "backup.h"

tms_status_t tms_disk_copy_save(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                                const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_disk_copy_load(tms_backup_t *backup, tms_copier_t *copier, CUdeviceptr address,
                                const tms_error_context_t *context, tms_error_t *error);

#endif
