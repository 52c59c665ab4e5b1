/* What a resume does for the segments on its list (resume.h): the order, and one device's part. */
#ifndef TMS_RESTORE_H
#define TMS_RESTORE_H

#include "core/transition/call.h"

/* Puts those with most to copy first, and leaves others in their order: while the bus is busy with them, the rest gets its
 * memory, which costs time for every segment, however small. */
void tms_restore_sort(tms_transition_t *t);
/* One device's part of a resume: memory, access and contents for its segments. */
tms_status_t tms_restore_device(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error);

#endif
