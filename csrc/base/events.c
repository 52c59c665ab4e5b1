#include "base/events.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"

/* The kernel's number of this thread, asked for once. */
static _Thread_local int32_t own_thread;

static int32_t thread_number(void) {
    if (own_thread == 0) own_thread = (int32_t)syscall(SYS_gettid);
    return own_thread;
}

tms_status_t tms_events_init(tms_events_t *events, size_t capacity, tms_error_t *error) {
    const tms_error_context_t context = {.operation = "start", .device = TMS_NO_DEVICE};
    *events = (tms_events_t){.clock = tms_clock_nanoseconds};
    /* calloc does not touch the pages: pages of records that are never written take no memory. */
    events->records = calloc(capacity, sizeof *events->records);
    if (!events->records) return tms_error_set_os(error, &context, "calloc", ENOMEM, NULL);
    events->capacity = capacity;
    pthread_mutex_init(&events->lock, NULL);
    return TMS_OK;
}

void tms_events_release(tms_events_t *events) {
    pthread_mutex_destroy(&events->lock);
    free(events->records);
    *events = (tms_events_t){.capacity = 0};
}

void tms_events_before_fork(tms_events_t *events) { pthread_mutex_lock(&events->lock); }

void tms_events_after_fork_in_parent(tms_events_t *events) { pthread_mutex_unlock(&events->lock); }

void tms_events_after_fork_in_child(tms_events_t *events) {
    own_thread = 0;
    pthread_mutex_init(&events->lock, NULL);
    events->recorded = events->calls = 0;
}

uint64_t tms_events_begin_call(tms_events_t *events) {
    pthread_mutex_lock(&events->lock);
    uint64_t number = ++events->calls;
    pthread_mutex_unlock(&events->lock);
    return number;
}

void tms_events_record(tms_events_t *events, tms_event_t event) {
    if (event.ended == 0) event.ended = events->clock();
    if (event.began == 0) event.began = event.ended;
    event.thread = thread_number();
    pthread_mutex_lock(&events->lock);
    events->records[events->recorded++ % events->capacity] = event;
    pthread_mutex_unlock(&events->lock);
}

size_t tms_events_copy(tms_events_t *events, tms_event_t *records, size_t room, uint64_t *recorded) {
    pthread_mutex_lock(&events->lock);
    uint64_t held = events->recorded < events->capacity ? events->recorded : events->capacity;
    size_t count = held < room ? (size_t)held : room;
    size_t first = (size_t)((events->recorded - count) % events->capacity);
    size_t before_the_end = events->capacity - first < count ? events->capacity - first : count;
    if (count > 0) {
        memcpy(records, events->records + first, before_the_end * sizeof *records);
        memcpy(records + before_the_end, events->records, (count - before_the_end) * sizeof *records);
    }
    *recorded = events->recorded;
    pthread_mutex_unlock(&events->lock);
    return count;
}
