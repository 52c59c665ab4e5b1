/* A resume that nobody waits for: its end, streams that wait for its copies, what cannot be undone, and the end of the
 * process. */

#include "support.h"

#include <string.h>

#include "pending.h"

enum { GATE = 5 };
static const uint64_t BYTES = 4 * MIB;

static uint64_t paused(fixture_t *f, const char *tag, tms_backup_kind_t backup, uint32_t seed) {
    tms_error_t error;
    uint64_t address = allocate(f, tag, backup, BYTES);
    fill(address, BYTES, seed);
    ASSERT_OK(pause_tag(f, tag, NULL, &error), error);
    return address;
}

static tms_pending_t *begin(fixture_t *f, const char *tag) {
    tms_error_t error;
    tms_pending_t *pending = NULL;
    const tms_selection_t selection = {.tags = &tag, .tag_count = 1};
    ASSERT_OK(tms_pending_begin(&f->saver, &selection, &pending, &error), error);
    return pending;
}

/* As a program has it, whose thread has a context. */
static CUstream enter_and_make_stream(fixture_t *f) {
    const tms_error_context_t context = {.operation = "test", .device = 0};
    CUstream stream = NULL;
    assert_int_equal(tms_devices_enter(&f->devices, 0, &context, NULL), TMS_OK);
    assert_int_equal(f->cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return stream;
}

static void destroy_and_leave(fixture_t *f, CUstream stream) {
    assert_int_equal(f->cuda->cuStreamDestroy(stream), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
}

static int32_t at_once(void *context) {
    (void)context;
    return 1;
}

static void it_ends_like_any_other(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    char tag[] = "weights";
    uint64_t address = paused(f, tag, TMS_BACKUP_PINNED, 1);
    tms_pending_t *pending = begin(f, tag);
    memset(tag, 'x', strlen(tag)); /* the selection was copied */
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, &report, &error), error);
    assert_int_equal(tms_pending_done(pending), 1);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(report.copied_bytes, BYTES);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, BYTES, 1);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, &report, &error), error); /* as often as one likes */
    tms_pending_release(pending);
}

static void a_handle_may_be_given_back_before_the_end(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_MMAP, 2);
    simulator()->set_bandwidth(64 * MIB);
    tms_pending_release(begin(f, "a"));
    tms_pending_release(NULL);
    /* Another call waits for its turn, and finds it done. */
    ASSERT_OK(resume_tag(f, "a", NULL, &error), error);
    simulator()->set_bandwidth(0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, BYTES, 2);
}

/* The stream's work adds 1 to what the copies bring: it must come after them. */
static void a_stream_waits_for_the_copies_and_the_caller_does_not(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 3);
    CUstream stream = enter_and_make_stream(f);
    simulator()->set_bandwidth(16 * MIB); /* a quarter of a second */
    tms_pending_t *pending = begin(f, "a");
    simulator()->clear_counts();
    ASSERT_OK(tms_pending_wait_stream(pending, stream, NULL, NULL, &error), error);
    assert_int_equal(simulator()->calls("cuStreamWaitEvent"), 1);
    simulator()->open_gate(GATE);
    assert_int_equal(simulator()->launch_add(stream, address, MIB, 1, GATE), 0);
    assert_int_equal(f->cuda->cuStreamSynchronize(stream), CUDA_SUCCESS);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    simulator()->set_bandwidth(0);
    uint8_t *bytes = (uint8_t *)address;
    for (uint64_t i = 0; i < MIB; i++) bytes[i]--;
    assert_filled(address, BYTES, 3);
    ASSERT_OK(tms_pending_wait_stream(pending, stream, NULL, NULL, &error), error); /* ended: nothing to wait for */
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

static void a_failure_is_told_by_wait_and_undone(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemCreate", "cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord", "cuStreamSynchronize"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 4);
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        tms_pending_t *pending = begin(f, "a");
        assert_int_equal(tms_pending_wait(pending, NULL, NULL, NULL, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_int_equal(tms_pending_wait_stream(pending, NULL, NULL, NULL, &error), TMS_DRIVER);
        tms_pending_release(pending);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
        assert_int_equal(physical_bytes(0), 0);
        ASSERT_OK(resume_tag(f, "a", NULL, &error), error);
        assert_filled(address, BYTES, 4);
        assert_int_equal(tms_saver_free(&f->saver, address, &error), TMS_OK);
    }
}

static void what_a_stream_waits_for_is_not_undone(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 5);
    CUstream stream = enter_and_make_stream(f);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    simulator()->set_bandwidth(16 * MIB);
    tms_pending_t *pending = begin(f, "a");
    ASSERT_OK(tms_pending_wait_stream(pending, stream, NULL, NULL, &error), error);
    simulator()->fail_after("cuStreamSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    /* It may have been under way already; then there was no failure, and nothing to see here. */
    tms_status_t status = tms_pending_wait(pending, NULL, NULL, NULL, &error);
    simulator()->set_bandwidth(0);
    if (simulator()->failures_fired() == 1 && status != TMS_OK) {
        assert_int_equal(status, TMS_DRIVER);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_DAMAGED);
        assert_true(physical_bytes(0) > 0);                 /* kernels may be using it */
        ASSERT_OK(resume_tag(f, "a", NULL, &error), error); /* repairs it, and brings the contents back */
    }
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, BYTES, 5);
    tms_pending_release(pending);
    destroy_and_leave(f, stream);
}

static void a_wait_can_be_stopped_and_the_resume_goes_on(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 6);
    simulator()->set_bandwidth(16 * MIB);
    tms_pending_t *pending = begin(f, "a");
    assert_int_equal(tms_pending_wait(pending, at_once, NULL, NULL, &error), TMS_INTERRUPTED);
    simulator()->set_bandwidth(0);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    assert_filled(address, BYTES, 6);
    tms_pending_release(pending);
}

static void marks_that_the_driver_keeps_wait_in_the_quarantine(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    paused(f, "a", TMS_BACKUP_PINNED, 7);
    tms_pending_t *pending = begin(f, "a");
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    tms_pendings_close(&f->saver.pendings); /* its thread has let go */
    simulator()->fail_after("cuEventDestroy", 0, 1, CUDA_ERROR_UNKNOWN);
    tms_pending_release(pending);
    assert_int_equal(tms_quarantine_held(&f->saver.quarantine, TMS_QUARANTINE_OTHER), 1);
    tms_saver_reclaim(&f->saver);
    assert_true(tms_quarantine_is_empty(&f->saver.quarantine));
}

static void the_end_of_the_process_stops_it(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = paused(f, "a", TMS_BACKUP_PINNED, 8);
    uint64_t other = paused(f, "b", TMS_BACKUP_NONE, 9);
    (void)other;
    simulator()->take_memory(0, (int64_t)(256 * MIB)); /* it waits for memory that never comes */
    const tms_selection_t selection = {.timeout_seconds = 3600};
    tms_pending_t *pending = NULL;
    ASSERT_OK(tms_pending_begin(&f->saver, &selection, &pending, &error), error);
    tms_pendings_close(&f->saver.pendings);
    assert_int_equal(tms_pending_wait(pending, NULL, NULL, NULL, &error), TMS_INTERRUPTED);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    simulator()->take_memory(0, -(int64_t)(256 * MIB));
    tms_pending_release(pending);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(it_ends_like_any_other),
        ONE(a_handle_may_be_given_back_before_the_end),
        ONE(a_stream_waits_for_the_copies_and_the_caller_does_not),
        ONE(a_failure_is_told_by_wait_and_undone),
        ONE(what_a_stream_waits_for_is_not_undone),
        ONE(a_wait_can_be_stopped_and_the_resume_goes_on),
        ONE(marks_that_the_driver_keeps_wait_in_the_quarantine),
        ONE(the_end_of_the_process_stops_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
