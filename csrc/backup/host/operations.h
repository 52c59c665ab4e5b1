/* The host store as a store of backups (backup/backup.h): PINNED and MMAP. A slot holds references to buffers. */
#ifndef TMS_HOST_OPERATIONS_H
#define TMS_HOST_OPERATIONS_H

#include "backup/backup.h"
#include "backup/host/store.h"

extern const tms_backup_operations_t tms_host_operations; /* of a tms_host_store_t */

#endif
