/* The event ring: a record of fixed size for each of the library's last actions. The oldest records are overwritten.
 *
 * Owns the records, in one array made at the start, which never grows. An event costs a reading of CLOCK_MONOTONIC, an
 * uncontended lock and a copy of the record.
 *
 * Any thread, with any lock held except the ring's own. `lock` is a leaf: it is held for the copy of one record, and by a
 * reader for the copy of all of them. A forked child begins with an empty ring.
 *
 * The ring keeps no totals. Events that change what an allocation holds (tms_footprint_t) are recorded under the saver's
 * lock, and a reader that holds it gets the records together with the footprints after the last of them. The amounts before
 * the first record follow by subtraction, so they are right even if the ring has wrapped (core/model/account.h).
 */
#ifndef TMS_EVENTS_H
#define TMS_EVENTS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/status.h"

enum { TMS_EVENTS_KEPT = 1 << 14 }; /* records of 136 bytes; pages of the array that were never written take no memory */

typedef struct tms_events {
    size_t capacity;         /* constant, at least 1 */
    tms_event_t *records;    /* record number n is at n % capacity */
    uint64_t (*clock)(void); /* nanoseconds of CLOCK_MONOTONIC; tests count its calls */
    pthread_mutex_t lock;
    uint64_t recorded;    /* number of events so far, including overwritten ones */
    uint64_t calls;       /* number of pauses and resumes so far */
    _Atomic bool samples; /* calls sample the free memory of their devices */
} tms_events_t;

/* TMS_OUT_OF_HOST_MEMORY. */
tms_status_t tms_events_init(tms_events_t *events, size_t capacity, tms_error_t *error);
void tms_events_release(tms_events_t *events);
/* Called around a fork, so that no other thread is inside the ring. The child's ring is emptied. */
void tms_events_before_fork(tms_events_t *events);
void tms_events_after_fork_in_parent(tms_events_t *events);
void tms_events_after_fork_in_child(tms_events_t *events);

static inline void tms_events_set_samples(tms_events_t *events, bool on) {
    atomic_store_explicit(&events->samples, on, memory_order_relaxed);
}
static inline bool tms_events_sample(const tms_events_t *events) {
    return atomic_load_explicit(&events->samples, memory_order_relaxed);
}

static inline uint64_t tms_events_now(const tms_events_t *events) { return events->clock(); }
/* Returns the number of a call that begins. The first number is 1. */
uint64_t tms_events_begin_call(tms_events_t *events);
/* Records a copy of the event, and fills its thread. `ended` 0 means now, and `began` 0 means the time of `ended`. */
void tms_events_record(tms_events_t *events, tms_event_t event);

/* Copies the latest records, up to `room`, from the oldest on, and returns their number. *recorded is the number of all
 * events so far. */
size_t tms_events_copy(tms_events_t *events, tms_event_t *records, size_t room, uint64_t *recorded);

#endif
