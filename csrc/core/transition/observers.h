/* Reports a pause or resume. Its begin and end, its phases, and the free memory of its devices become events. The call and
 * its phases become NVTX ranges.
 *
 * On the thread of the call or of a device's part, with no lock held. Without a tool a range costs the test of a pointer. */
#ifndef TMS_PHASES_H
#define TMS_PHASES_H

#include "core/transition/call.h"

void tms_phases_begin_call(tms_transition_t *t);
/* Records the end of the call, with its report. `error` may be NULL. */
void tms_phases_end_call(tms_transition_t *t, tms_status_t status, const tms_error_t *error);

static inline uint64_t tms_phases_now(const tms_transition_t *t) { return tms_events_now(&t->saver->events); }
/* Begins a phase of the whole call, and a range with the bytes on the call's list. Returns the time, for tms_phases_end on
 * the same thread, which records the phase. */
uint64_t tms_phases_begin(tms_transition_t *t, tms_event_phase_t phase);
void tms_phases_end(tms_transition_t *t, tms_event_phase_t phase, uint64_t began, tms_status_t status);

/* Begins the range of a device's phase or of one of its steps. It lasts until tms_phases_pop on the same thread. */
static inline void tms_phases_push(tms_transition_t *t, tms_event_phase_t phase, uint64_t bytes) {
    if (t->nvtx) tms_nvtx_push(t->nvtx, phase, bytes);
}
static inline void tms_phases_pop(tms_transition_t *t) {
    if (t->nvtx) tms_nvtx_pop(t->nvtx);
}

/* A phase of one device. `ended` 0: now; `busy` 0: all the time. */
typedef struct tms_phase {
    uint64_t began, ended, busy, allocations, bytes;
    tms_status_t status; /* status of its last step */
} tms_phase_t;

/* Adds a step for one physical handle, from `since` to `until`, to a phase that alternates with others. */
void tms_phases_add(tms_phase_t *phase, uint64_t since, uint64_t until, uint64_t bytes, tms_status_t status);
/* Records the phase of a device, if the phase has begun. */
void tms_phases_record_device(tms_transition_t *t, tms_event_phase_t which, int device, const tms_phase_t *phase);

/* Records the free memory of the devices that own a segment of the call, if samples are on. A failure is recorded. */
void tms_phases_sample(tms_transition_t *t);

#endif
