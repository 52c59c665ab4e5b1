/* Shared by the tests of pending resumes. */
#ifndef TMS_TESTS_PENDING_FIXTURE_H
#define TMS_TESTS_PENDING_FIXTURE_H

#include <math.h>
#include <string.h>

#include "copies.h"
#include "core/transition/pending.h"

enum { GATE = 5 };
static const uint64_t BYTES = 4 * MIB;

static uint64_t paused(fixture_t *f, const char *tag, tms_backup_kind_t backup, uint32_t seed) {
    tms_error_t error;
    uint64_t address = allocate(f, tag, backup, BYTES);
    fill(address, BYTES, seed);
    ASSERT_OK(pause_tag(f, tag, &error), error);
    return address;
}

static tms_pending_t *begin(fixture_t *f, const char *tag) {
    tms_error_t error;
    tms_pending_t *pending = NULL;
    const tms_selection_t selection = {.tags = &tag, .tag_count = 1};
    ASSERT_OK(tms_resume_begin(&f->saver, &selection, &pending, &error), error);
    return pending;
}

/* Waits for the threads of all resumes in the background. One may still begin after another call has done its work. */
static void join_resumes(fixture_t *f) {
    tms_pending_resumes_t *pending_resumes = &f->saver.pending_resumes;
    pthread_mutex_lock(&pending_resumes->lock);
    while (pending_resumes->running > 0) pthread_cond_wait(&pending_resumes->ended, &pending_resumes->lock);
    pthread_mutex_unlock(&pending_resumes->lock);
}

static int32_t at_once(void *context) {
    (void)context;
    return 1;
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

#endif
