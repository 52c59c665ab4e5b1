/* The restoration of the segments on a resume's list (resume.h): their order, and one device's part. The call owns the
 * segments; no lock. */
#ifndef TMS_RESTORE_H
#define TMS_RESTORE_H

#include "core/transition/transition.h"

/* Sorts the list by bytes to copy, the largest number first; segments with equal numbers keep their order. While the bus is
 * busy with the first segments, memory of the rest is mapped, which has a fixed cost for each segment. */
void tms_restore_sort(tms_transition_t *t);
/* One device's part of a resume: memory, access and contents of its segments. Called on the thread of that part. */
tms_status_t tms_restore_device(tms_transition_t *t, int device, tms_wait_t *wait, tms_error_t *error);

#endif
