/* The operations of the shared store (backup/backup.h), which docs/architecture-shared-store.md describes. */
#ifndef TMS_SHARED_OPERATIONS_H
#define TMS_SHARED_OPERATIONS_H

#include "backup/backup.h"
#include "backup/shared/types.h"

extern const tms_backup_operations_t tms_shared_operations;

#endif
