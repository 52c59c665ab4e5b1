/* Reads contents of a paused allocation from a backup that is not in host memory, such as a file.
 *
 * The call is a resume that never commits. It takes the turn, so that no other call resumes the allocation until it ends. A
 * free during the call is finished at its end. A failure changes nothing, and no device is used.
 *
 * Any thread that is not inside a pause or resume. Locks as in steps.h. */
#ifndef TMS_READ_BACKUP_H
#define TMS_READ_BACKUP_H

#include "core/model/saver.h"

/* tms_api_t.read_backup: set RESUMING -> read -> set PAUSED. *found: whether the backup holds all of the bytes. Written on
 * success only. */
tms_status_t tms_read_backup_perform(tms_saver_t *saver, const tms_selection_t *selection, uint64_t address, uint64_t bytes,
                                     void *destination, int32_t *found, tms_error_t *error);

#endif
