/* The host store as a store of backups (backup/backup.h): PINNED and MMAP. A slot holds references to buffers. */
#ifndef TMS_HOST_OPERATIONS_H
#define TMS_HOST_OPERATIONS_H

#include "backup/backup.h"
#include "backup/host/store.h"

extern const tms_backup_operations_t tms_host_operations; /* of a tms_host_store_t */

/* The operations of one pause of a store whose batch is one of host memory (batch.h). */
#define TMS_HOST_BATCH_OPERATIONS                                                                                           \
    .start = tms_host_operation_start, .check_room = tms_host_operation_check_room, .help = tms_host_operation_help,        \
    .end = tms_host_operation_end
tms_status_t tms_host_operation_start(void *batch, const tms_error_context_t *context, tms_error_t *error);
tms_status_t tms_host_operation_check_room(void *batch, const tms_error_context_t *context, tms_error_t *error);
bool tms_host_operation_help(void *batch, int device);
void tms_host_operation_end(void *batch);

#endif
