/* Reads contents of a paused allocation from a backup that is not in host memory, such as a file.
 *
 * The call is a resume of one allocation that never commits: take the turn; set RESUMING -> read -> set PAUSED. So no other
 * call resumes or pauses the allocation during the read, and a free is carried out at the end. No device is used. A failure
 * changes nothing.
 *
 * Any thread that is not inside a pause or resume. Locks as in transition.h. */
#ifndef TMS_READING_H
#define TMS_READING_H

#include "core/model/saver.h"

/* tms_api_t.read_backup. */
tms_status_t tms_transition_read(tms_saver_t *saver, const tms_selection_t *selection, uint64_t address, uint64_t bytes,
                                 void *destination, int32_t *found, tms_error_t *error);

#endif
