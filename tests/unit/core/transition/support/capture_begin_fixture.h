/* Shared by the tests of captures that begin during a call. */
#ifndef TMS_TESTS_CAPTURE_BEGIN_FIXTURE_H
#define TMS_TESTS_CAPTURE_BEGIN_FIXTURE_H

#include "support.h"

#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <unistd.h>

enum { GATE = 1, LONG_SECONDS = 600, GIVE_UP_SECONDS = 120 };

/* Another thread, and its results. */
typedef struct other {
    fixture_t *fixture;
    pthread_t thread;
    uint64_t address;
    tms_segment_state_t state; /* of `address`, when its call had ended */
    bool must_not_begin;
    tms_status_t status;
    tms_error_t error;
} other_t;

static void *begin_capture(void *argument) {
    other_t *other = argument;
    other->status = tms_capture_table_begin(&other->fixture->saver, NULL, NULL, &other->error);
    other->state = state_of(other->fixture, other->address);
    return NULL;
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

#endif
