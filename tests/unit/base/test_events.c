/* Guards events.c: order, wrap, writers and readers at once, a forked child, and that a ring that is off touches nothing. */
#include "base/events.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "own_process.h"

static _Atomic uint64_t readings;

static uint64_t counting_clock(void) { return 1000 + atomic_fetch_add(&readings, 1); }

/* A ring of so many records on a clock that counts its readings: 1000, 1001, ... */
static tms_events_t make_ring(size_t capacity) {
    tms_events_t events;
    tms_error_t error;
    assert_int_equal(tms_events_init(&events, capacity, &error), TMS_OK);
    events.clock = counting_clock;
    atomic_store(&readings, 0);
    return events;
}

static void record_number(tms_events_t *events, uint64_t number) {
    tms_events_record(events, (tms_event_t){.kind = TMS_EVENT_ALLOCATE, .bytes = number, .address = ~number});
}

static void events_come_back_in_order(void **state) {
    (void)state;
    tms_event_t copy[4];
    uint64_t recorded = 7;
    tms_events_t events = make_ring(4);
    assert_int_equal(tms_events_copy(&events, copy, 4, &recorded), 0);
    assert_int_equal(recorded, 0);
    tms_events_record(&events, (tms_event_t){.kind = TMS_EVENT_PHASE, .began = 5, .ended = 9, .device = 3});
    tms_events_record(&events, (tms_event_t){.kind = TMS_EVENT_END, .began = 6});
    tms_events_record(&events, (tms_event_t){.kind = TMS_EVENT_FREE});
    assert_int_equal(tms_events_copy(&events, copy, 4, &recorded), 3);
    assert_int_equal(recorded, 3);
    assert_int_equal(copy[0].began, 5);
    assert_int_equal(copy[0].ended, 9);
    assert_int_equal(copy[0].device, 3);
    assert_int_equal(copy[1].began, 6);
    assert_int_equal(copy[1].ended, 1000); /* now */
    assert_int_equal(copy[2].began, 1001); /* no duration */
    assert_int_equal(copy[2].ended, 1001);
    for (int i = 0; i < 3; i++) assert_int_equal(copy[i].thread, syscall(SYS_gettid));
    tms_events_release(&events);
}

static void the_oldest_are_overwritten(void **state) {
    (void)state;
    enum { CAPACITY = 5 };
    tms_event_t copy[CAPACITY];
    uint64_t recorded = 0;
    tms_events_t events = make_ring(CAPACITY);
    for (uint64_t number = 0; number < 23; number++) {
        uint64_t held = number < CAPACITY ? number : CAPACITY;
        assert_int_equal(tms_events_copy(&events, copy, CAPACITY, &recorded), held);
        assert_int_equal(recorded, number);
        for (uint64_t i = 0; i < held; i++) assert_int_equal(copy[i].bytes, number - held + i);
        record_number(&events, number);
    }
    tms_events_release(&events);
}

static void too_little_room_gets_the_latest(void **state) {
    (void)state;
    tms_event_t copy[4] = {{.bytes = 0}};
    uint64_t recorded = 0;
    tms_events_t events = make_ring(4);
    for (uint64_t number = 0; number < 6; number++) record_number(&events, number);
    assert_int_equal(tms_events_copy(&events, NULL, 0, &recorded), 0);
    assert_int_equal(recorded, 6);
    copy[3].bytes = 77;
    assert_int_equal(tms_events_copy(&events, copy, 3, &recorded), 3);
    for (uint64_t i = 0; i < 3; i++) assert_int_equal(copy[i].bytes, 3 + i);
    assert_int_equal(copy[3].bytes, 77);
    tms_events_release(&events);
}

static void calls_are_numbered(void **state) {
    (void)state;
    tms_events_t events = make_ring(2);
    assert_int_equal(tms_events_begin_call(&events), 1);
    assert_int_equal(tms_events_begin_call(&events), 2);
    assert_false(tms_events_sample(&events));
    tms_events_set_samples(&events, true);
    assert_true(tms_events_sample(&events));
    tms_events_release(&events);
}

/* ---- threads ---- */

enum { WRITERS = 4, EACH = 20000, SHARED_CAPACITY = 64 };

static _Atomic int writing;
static pthread_barrier_t start;

typedef struct writer {
    pthread_t thread;
    tms_events_t *events;
    int32_t index;
} writer_t;

static void *write_many(void *argument) {
    const writer_t *writer = argument;
    pthread_barrier_wait(&start);
    for (uint64_t number = 1; number <= EACH; number++)
        tms_events_record(writer->events,
                          (tms_event_t){.bytes = number, .address = ~number, .call = number * 3, .device = writer->index});
    atomic_fetch_sub(&writing, 1);
    return NULL;
}

/* Whether a copy has whole records, and those of each writer in its order without a gap. Asserts nothing: writers are
 * running. */
static bool is_copied_whole(tms_events_t *events, uint64_t *recorded) {
    static tms_event_t copy[SHARED_CAPACITY];
    uint64_t last[WRITERS] = {0};
    size_t count = tms_events_copy(events, copy, SHARED_CAPACITY, recorded);
    bool whole = count == (*recorded < SHARED_CAPACITY ? *recorded : SHARED_CAPACITY);
    for (size_t i = 0; i < count && whole; i++) {
        const tms_event_t *event = &copy[i];
        whole = event->address == ~event->bytes && event->call == event->bytes * 3 && event->device >= 0 &&
                event->device < WRITERS && (last[event->device] == 0 || event->bytes == last[event->device] + 1);
        if (whole) last[event->device] = event->bytes;
    }
    return whole;
}

static void writers_and_a_reader_at_once(void **state) {
    (void)state;
    tms_events_t events = make_ring(SHARED_CAPACITY);
    writer_t writers[WRITERS];
    uint64_t recorded = 0;
    bool whole = true;
    atomic_store(&writing, WRITERS);
    assert_int_equal(pthread_barrier_init(&start, NULL, WRITERS), 0);
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = (writer_t){.events = &events, .index = i};
        assert_int_equal(pthread_create(&writers[i].thread, NULL, write_many, &writers[i]), 0);
    }
    while (atomic_load(&writing) > 0) whole = is_copied_whole(&events, &recorded) && whole;
    for (int i = 0; i < WRITERS; i++) pthread_join(writers[i].thread, NULL);
    pthread_barrier_destroy(&start);
    assert_true(whole);
    assert_true(is_copied_whole(&events, &recorded));
    assert_int_equal(recorded, WRITERS * EACH);
    assert_int_equal(events.capacity, SHARED_CAPACITY);
    tms_events_release(&events);
}

/* ---- processes ---- */

static tms_events_t forked;

static void use_the_ring_in_a_child(void) {
    tms_event_t copy[4];
    uint64_t recorded = 7;
    tms_events_after_fork_in_child(&forked);
    bool empty = tms_events_copy(&forked, copy, 4, &recorded) == 0 && recorded == 0;
    record_number(&forked, 5);
    bool own = tms_events_copy(&forked, copy, 4, &recorded) == 1 && recorded == 1 && copy[0].bytes == 5 &&
               copy[0].thread == getpid() && tms_events_begin_call(&forked) == 1;
    end_child(empty && own ? 0 : 1);
}

static void a_forked_child_begins_again(void **state) {
    (void)state;
    tms_event_t copy[4];
    uint64_t recorded = 0;
    forked = make_ring(4);
    record_number(&forked, 1);
    (void)tms_events_begin_call(&forked);
    tms_events_before_fork(&forked);
    assert_exits(use_the_ring_in_a_child);
    tms_events_after_fork_in_parent(&forked);
    record_number(&forked, 2);
    assert_int_equal(tms_events_copy(&forked, copy, 4, &recorded), 2);
    assert_int_equal(copy[0].bytes, 1);
    tms_events_release(&forked);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_come_back_in_order),       cmocka_unit_test(the_oldest_are_overwritten),
        cmocka_unit_test(too_little_room_gets_the_latest), cmocka_unit_test(calls_are_numbered),
        cmocka_unit_test(writers_and_a_reader_at_once),    cmocka_unit_test(a_forked_child_begins_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
