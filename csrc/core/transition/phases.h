/* The events of a pause or resume: its begin and end, its phases, and the free memory of its devices.
 *
 * On the thread of the call or of a device's part, with no lock held. With the ring off nothing is recorded and no clock is
 * read. */
#ifndef TMS_PHASES_H
#define TMS_PHASES_H

#include "core/transition/call.h"

void tms_phases_begin_call(tms_transition_t *t);
/* With the report of the call. `error` may be NULL. */
void tms_phases_end_call(tms_transition_t *t, tms_status_t status, const tms_error_t *error);

/* The time at which a phase begins. */
static inline uint64_t tms_phases_now(const tms_transition_t *t) { return tms_events_now(&t->saver->events); }
/* Records a phase of the whole call, which began then and ends now. */
void tms_phases_record(tms_transition_t *t, tms_event_phase_t phase, uint64_t began, tms_status_t status);

/* A phase of one device. `ended` 0: now; `busy` 0: all the time. */
typedef struct tms_phase {
    uint64_t began, ended, busy, allocations, bytes;
    tms_status_t status; /* of its last step */
} tms_phase_t;

/* Adds a step for one allocation, from `since` to `until`, to a phase that alternates with others. */
void tms_phases_add(tms_phase_t *phase, uint64_t since, uint64_t until, uint64_t bytes, tms_status_t status);
/* Records it, unless it has not begun. */
void tms_phases_record_device(tms_transition_t *t, tms_event_phase_t which, int device, const tms_phase_t *phase);

/* Records the free memory of the devices that own a segment of the call, if samples are on. A failure is recorded. */
void tms_phases_sample(tms_transition_t *t);

#endif
