/* Guards damaged segments, which the driver has failed to release for longer than a call: which calls then fail or log it,
 * and that they still complete the rest. */

#include "support.h"

#include <string.h>

#include "captured_stderr.h"
#include "temporary.h"

static uint64_t allocate_filled(fixture_t *f, const char *tag, uint32_t seed) {
    uint64_t address = allocate(f, tag, TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, seed);
    return address;
}

/* Two allocations with contents 1 and 2 that the driver has failed to unmap. */
static void allocate_damaged(fixture_t *f, const char *const *tags, uint64_t *addresses) {
    tms_error_t error;
    for (uint32_t i = 0; i < 2; i++) addresses[i] = allocate_filled(f, tags[i], i + 1);
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    for (int i = 0; i < 2; i++) assert_int_equal(state_of(f, addresses[i]), TMS_SEGMENT_DAMAGED);
}

/* One, with contents 1. */
static uint64_t allocate_one_damaged(fixture_t *f) {
    tms_error_t error;
    uint64_t address = allocate_filled(f, "a", 1);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_tag(f, "a", &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_DAMAGED);
    return address;
}

static void a_resume_that_skips_damaged_segments_fails(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t before, after;
    uint64_t whole = allocate_filled(f, "a", 3), damaged[2];
    ASSERT_OK(pause_all(f, &error), error);
    allocate_damaged(f, (const char *[]){"a", "a"}, damaged);
    tms_inspect_counters(&f->saver, &before);
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_tag(f, "a", &error), TMS_DRIVER);
    assert_string_equal(error.operation, "resume");
    assert_string_equal(error.call, "cuMemUnmap");
    assert_int_equal(error.driver_result, CUDA_ERROR_UNKNOWN);
    assert_string_equal(error.result_name, "CUDA_ERROR_UNKNOWN");
    assert_string_equal(error.tag, "a");
    assert_non_null(strstr(error.message, "2 allocations (4.0 MiB) with the tag 'a' are still damaged"));
    assert_non_null(strstr(error.message, "Call resume() again"));
    assert_int_equal(state_of(f, whole), TMS_SEGMENT_ACTIVE);
    assert_filled(whole, 2 * MIB, 3);
    for (int i = 0; i < 2; i++) assert_int_equal(state_of(f, damaged[i]), TMS_SEGMENT_DAMAGED);
    tms_inspect_counters(&f->saver, &after);
    assert_int_equal(after.failures_total, before.failures_total + 1);
    assert_int_equal(after.resumes_total, before.resumes_total);
    assert_int_equal(after.damaged, 2);

    ASSERT_OK(resume_tag(f, "a", &error), error);
    for (uint32_t i = 0; i < 2; i++) assert_filled(damaged[i], 2 * MIB, i + 1);
}

static void a_resume_of_other_segments_does_not_fail(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    allocate(f, "other", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    uint64_t damaged = allocate_one_damaged(f);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(resume_with_report(f, "other", &report, &error), error);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(state_of(f, damaged), TMS_SEGMENT_DAMAGED);
}

/* With a timeout too: memory of others is not what is missing, whatever error the driver returns. */
static void a_resume_with_a_timeout_does_not_wait_for_damaged_segments(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t damaged = allocate_one_damaged(f);
    const int results[] = {CUDA_ERROR_UNKNOWN, CUDA_ERROR_OUT_OF_MEMORY};
    for (size_t i = 0; i < 2; i++) {
        tms_selection_t selection = {.timeout_seconds = 600};
        simulator()->fail_after("cuMemUnmap", 0, 1, results[i]);
        assert_int_equal(resume_selected(f, &selection, &error), i == 0 ? TMS_DRIVER : TMS_OUT_OF_DEVICE_MEMORY);
        assert_int_equal(error.driver_result, results[i]);
        assert_int_equal(state_of(f, damaged), TMS_SEGMENT_DAMAGED);
    }
}

/* Also if the repair fails in its wait for the device. */
static void the_last_failed_driver_call_is_named(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t damaged = allocate_one_damaged(f);
    simulator()->fail_after("cuCtxSynchronize", 0, 1, CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuCtxSynchronize");
    assert_int_equal(error.driver_result, CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(state_of(f, damaged), TMS_SEGMENT_DAMAGED);
}

static void an_exclusive_resume_that_skips_damaged_segments_keeps_no_lock(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char directory[TEMPORARY_BYTES];
    assert_non_null(make_temporary_directory(directory, "damaged"));
    f->saver.device_locks.directory = directory;
    uint64_t damaged = allocate_one_damaged(f);
    tms_selection_t selection = {.exclusive = 1};
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_selected(f, &selection, &error), TMS_DRIVER);
    assert_int_equal(f->saver.device_locks.device[0].count, 0);
    /* This call tries the repair twice, and the second try succeeds: the segment is resumed under the lock. */
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_filled(damaged, 2 * MIB, 1);
    assert_int_equal(f->saver.device_locks.device[0].count, 1);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(remove_temporary_directory(directory), 0);
}

static void a_pause_of_damaged_segments_logs_once(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t damaged[2];
    allocate_damaged(f, (const char *[]){"a", "b"}, damaged);
    uint64_t whole = allocate_filled(f, "c", 3);
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    char text[8192];
    captured_stderr_t captured = capture_begin();
    tms_status_t status = pause_with_report(f, ALL_TAGS, &report, &error);
    capture_end(captured, text, sizeof text);
    ASSERT_OK(status, error);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(state_of(f, whole), TMS_SEGMENT_PAUSED);
    for (int i = 0; i < 2; i++) assert_int_equal(state_of(f, damaged[i]), TMS_SEGMENT_DAMAGED);
    const char *logged = strstr(text, "error: pause: ");
    assert_non_null(logged);
    assert_non_null(strstr(logged, "cuMemUnmap"));
    assert_non_null(strstr(logged, "2 allocations (4.0 MiB) with the tag 'a' and other tags are still damaged"));
    assert_null(strstr(logged + 1, "error: pause: "));
    ASSERT_OK(resume_all(f, &error), error);
    for (uint32_t i = 0; i < 2; i++) assert_filled(damaged[i], 2 * MIB, i + 1);
}

/* ---- what a repair leaves ---- */

static tms_event_t last_repair(fixture_t *f) {
    static tms_event_t events[1024];
    uint64_t recorded = 0;
    size_t count = tms_events_copy(&f->saver.events, events, sizeof events / sizeof *events, &recorded);
    while (count > 0 && events[count - 1].kind != TMS_EVENT_REPAIR) count--;
    assert_true(count > 0);
    return events[count - 1];
}

static tms_segment_info_t row_of(fixture_t *f, uint64_t address) {
    tms_segment_info_t row;
    assert_int_equal(tms_inspect_find(&f->saver, address, 1, &row), TMS_OK);
    return row;
}

static void a_repair_is_recorded_and_counted(void **state) {
    fixture_t *f = *state;
    tms_counters_t counters;
    uint64_t damaged = allocate_one_damaged(f);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.resident_bytes, 2 * MIB); /* it is still mapped */
    double changed_at = row_of(f, damaged).changed_at;
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_INVALID_VALUE);
    tms_reclaim_all(&f->saver);
    assert_int_equal(last_repair(f).status, TMS_DRIVER);
    assert_int_equal(last_repair(f).driver_result, CUDA_ERROR_INVALID_VALUE);
    assert_true(row_of(f, damaged).changed_at > changed_at);
    changed_at = row_of(f, damaged).changed_at;
    tms_reclaim_all(&f->saver);
    assert_int_equal(state_of(f, damaged), TMS_SEGMENT_PAUSED);
    assert_int_equal(last_repair(f).status, TMS_OK);
    assert_int_equal(last_repair(f).driver_result, 0);
    assert_true(row_of(f, damaged).changed_at > changed_at);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.resident_bytes, 0);
}

/* The attempts that end before the driver answers: of a call that was cancelled, and while a capture is under way. */
static int32_t cancel(void *context) {
    (void)context;
    return 1;
}

static void an_attempt_without_an_answer_of_the_driver_keeps_the_last(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_wait_t cancelled;
    const uint64_t damaged = allocate_one_damaged(f);
    tms_wait_begin(&cancelled, cancel, NULL, 0);
    assert_int_equal(tms_wait_poll_now(&cancelled, &(tms_error_context_t){.operation = "test"}, &error), TMS_INTERRUPTED);
    tms_reclaim_within(&f->saver, &cancelled);
    assert_int_equal(state_of(f, damaged), TMS_SEGMENT_DAMAGED);
    assert_int_equal(last_repair(f).status, TMS_INTERRUPTED);
    assert_int_equal(last_repair(f).driver_result, 0);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_INVALID_VALUE);
    tms_reclaim_all(&f->saver);
    tms_reclaim_within(&f->saver, &cancelled);
    assert_int_equal(state_of(f, damaged), TMS_SEGMENT_DAMAGED);
    assert_int_equal(last_repair(f).status, TMS_DRIVER);
    assert_int_equal(last_repair(f).driver_result, CUDA_ERROR_INVALID_VALUE);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(damaged, 2 * MIB, 1);
}

static fixture_t *capturing;
static CUresult (*unmaps)(CUdeviceptr, size_t);

/* A capture begins during the first repair of a reclaim. The turn's owner cannot begin one through the saver. */
static CUresult refuse_and_capture(CUdeviceptr address, size_t bytes) {
    const tms_error_context_t context = {.operation = "test"};
    uint64_t identity;
    (void)address, (void)bytes;
    writable(capturing)->cuMemUnmap = unmaps;
    pthread_mutex_lock(&capturing->saver.lock);
    assert_int_equal(tms_capture_begin(&capturing->saver.capture, NULL, &identity, &context, NULL), TMS_OK);
    pthread_mutex_unlock(&capturing->saver.lock);
    return CUDA_ERROR_INVALID_VALUE;
}

static void an_attempt_that_a_capture_prevents_is_no_attempt_of_another_thread(void **state) {
    fixture_t *f = capturing = *state;
    tms_error_t error;
    char text[8192];
    uint64_t damaged[2];
    allocate_damaged(f, (const char *[]){"a", "b"}, damaged);
    unmaps = f->cuda->cuMemUnmap;
    writable(f)->cuMemUnmap = refuse_and_capture;
    captured_stderr_t captured = capture_begin();
    tms_status_t status = pause_all(f, &error);
    capture_end(captured, text, sizeof text);
    ASSERT_OK(status, error);
    for (int i = 0; i < 2; i++) assert_int_equal(state_of(f, damaged[i]), TMS_SEGMENT_DAMAGED);
    assert_int_equal(last_repair(f).status, TMS_CAPTURE_IN_PROGRESS);
    const char *logged = strstr(text, "error: pause: ");
    assert_non_null(logged);
    assert_non_null(strstr(logged, "its memory could not be released yet"));
    assert_null(strstr(logged, "another thread"));
    (void)tms_capture_end_of(&f->saver, 0);
    ASSERT_OK(resume_all(f, &error), error);
    for (uint32_t i = 0; i < 2; i++) assert_filled(damaged[i], 2 * MIB, i + 1);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_resume_that_skips_damaged_segments_fails),
        TEST(a_resume_of_other_segments_does_not_fail),
        TEST(a_resume_with_a_timeout_does_not_wait_for_damaged_segments),
        TEST(the_last_failed_driver_call_is_named),
        TEST(an_exclusive_resume_that_skips_damaged_segments_keeps_no_lock),
        TEST(a_pause_of_damaged_segments_logs_once),
        TEST(a_repair_is_recorded_and_counted),
        TEST(an_attempt_without_an_answer_of_the_driver_keeps_the_last),
        TEST(an_attempt_that_a_capture_prevents_is_no_attempt_of_another_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
