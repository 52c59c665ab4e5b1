/* Backup files as a store of backups (backup/backup.h): DISK. A slot holds files. */
#ifndef TMS_DISK_OPERATIONS_H
#define TMS_DISK_OPERATIONS_H

#include "backup/backup.h"
#include "backup/disk/disk.h"

extern const tms_backup_operations_t tms_disk_operations; /* of a tms_disk_directory_t */

#endif
