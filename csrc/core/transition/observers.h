/* The observers of pauses and resumes: the counters of stats(), the shared page, the caller's report, NVTX, the event ring
 * and the log. Each is a row of the list in observers.c, with a function for each moment of a call at which it does
 * something.
 *
 * Amounts of memory are not observed here: core/model/account.h adds them to all totals at once. A call gathers the other
 * facts in `done` (transition.h), and the observers read them there, so that nothing of the list runs once for each
 * allocation.
 *
 * On the thread of the call or of a device's part, with no lock held, unless a comment says otherwise. */
#ifndef TMS_OBSERVERS_H
#define TMS_OBSERVERS_H

#include "core/transition/transition.h"

typedef enum tms_moment {
    TMS_CALL_BEGINS,
    TMS_MOVES_BEGIN, /* under the saver's lock: the list is complete and not empty */
    TMS_MOVES_END,   /* under the saver's lock: its segments have their final states */
    TMS_CALL_ENDS,
    TMS_MOMENTS
} tms_moment_t;

/* Calls every observer that does something at this moment, in the order of the list. */
void tms_observers_notify(tms_transition_t *t, tms_moment_t moment);
/* Returns the outcome of the call for the shared page. check_fresh() counts as IDLE, because it moves nothing. */
tms_shared_page_outcome_t tms_observers_outcome(const tms_transition_t *t, bool succeeded);

/* ---- phases, which the event ring and NVTX have ---- */

static inline uint64_t tms_observers_now(const tms_transition_t *t) { return tms_events_now(&t->saver->events); }
/* Begins a phase of the whole call, and a range with the bytes on the call's list. Returns the time, for
 * tms_observers_end_phase on the same thread. */
uint64_t tms_observers_begin_phase(tms_transition_t *t, tms_event_phase_t which);
void tms_observers_end_phase(tms_transition_t *t, tms_event_phase_t which, uint64_t began, tms_status_t status);

/* Begins the range of a device's phase or of one of its steps. It lasts until tms_observers_pop on the same thread. Without
 * a tool it costs the test of a pointer. */
static inline void tms_observers_push(tms_transition_t *t, tms_event_phase_t which, uint64_t bytes) {
    if (t->nvtx) tms_nvtx_push(t->nvtx, which, bytes);
}
static inline void tms_observers_pop(tms_transition_t *t) {
    if (t->nvtx) tms_nvtx_pop(t->nvtx);
}

/* A phase, of the call or of one device. `ended` 0: now; `busy` 0: all the time. */
typedef struct tms_phase {
    uint64_t began, ended, busy, allocations, bytes;
    tms_status_t status; /* status of its last step */
} tms_phase_t;

/* Adds a step for one physical handle, from `since` to `until`, to a phase that alternates with others. */
void tms_phase_add(tms_phase_t *phase, uint64_t since, uint64_t until, uint64_t bytes, tms_status_t status);
/* Records the phase of a device, if it has begun. */
void tms_observers_record_phase(tms_transition_t *t, tms_event_phase_t which, int device, const tms_phase_t *phase);

/* Records the free memory of the devices that own a segment of the call, if samples are on. A failure is recorded. */
void tms_observers_sample_memory(tms_transition_t *t);

#endif
