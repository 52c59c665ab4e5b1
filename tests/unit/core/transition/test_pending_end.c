/* Guards a resume in the background: how its wait is cancelled, and how the end of the process ends it. */
#include "support/pending_fixture.h"

static void a_wait_can_be_cancelled_and_the_resume_continues(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 6);
    hold_copies();
    tms_pending_t *pending = begin(f, "a");
    assert_int_equal(tms_pending_wait(pending, at_once, NULL, NULL, &error), TMS_INTERRUPTED);
    release_copies();
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_filled(address, BYTES, 6);
    tms_pending_release(pending);
}

static void events_that_cannot_be_destroyed_are_quarantined(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    paused(f, "a", TMS_BACKUP_PINNED, 7);
    tms_pending_t *pending = begin(f, "a");
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    tms_pending_resumes_close(&f->saver.pending_resumes, INFINITY); /* its thread has released it */
    simulator()->fail_after("cuEventDestroy", 0, 1, CUDA_ERROR_UNKNOWN);
    tms_pending_release(pending);
    assert_int_equal(tms_quarantine_held(&f->saver.quarantine, TMS_QUARANTINE_OTHER), 1);
    tms_reclaim_all(&f->saver);
    assert_true(tms_quarantine_is_empty(&f->saver.quarantine));
}

static void the_end_of_the_process_cancels_it(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 8);
    uint64_t other = paused(f, "b", TMS_BACKUP_NONE, 9);
    (void)other;
    simulator()->take_memory(0, (int64_t)(256 * MIB)); /* it waits for memory that is never freed */
    const tms_selection_t selection = {.timeout_seconds = 3600};
    tms_pending_t *pending = NULL;
    ASSERT_OK(tms_resume_begin(&f->saver, &selection, &pending, &error), error);
    tms_pending_resumes_close(&f->saver.pending_resumes, INFINITY);
    assert_int_equal(tms_pending_wait(pending, NULL, NULL, NULL, &error), TMS_INTERRUPTED);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    simulator()->take_memory(0, -(int64_t)(256 * MIB));
    tms_pending_release(pending);
}

static void the_end_of_the_process_abandons_a_resume_that_does_not_stop(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_pending_resumes_t *pending_resumes = &f->saver.pending_resumes;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 8);
    hold_copies();
    tms_pending_t *pending = begin(f, "a");
    simulator()->wait_until_synchronizing(); /* for its copies */
    tms_pending_resumes_close(pending_resumes, tms_wait_now());
    assert_int_equal(pending_resumes->abandoned, 1);
    assert_true(atomic_load(&pending_resumes->cancelled));
    tms_pending_resumes_close(pending_resumes, INFINITY); /* it has been abandoned for good */
    release_copies();
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_filled(address, BYTES, 8);
    tms_pending_release(pending);
    join_resumes(f);
    tms_pending_resumes_close(pending_resumes, INFINITY);
    assert_int_equal(pending_resumes->abandoned, 0);
    assert_false(atomic_load(&pending_resumes->cancelled));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_wait_can_be_cancelled_and_the_resume_continues),
        ONE(the_end_of_the_process_abandons_a_resume_that_does_not_stop),
        ONE(events_that_cannot_be_destroyed_are_quarantined),
        ONE(the_end_of_the_process_cancels_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
