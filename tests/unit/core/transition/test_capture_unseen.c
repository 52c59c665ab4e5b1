/* Guards unannounced captures of other threads: which calls leave them intact, and how a call fails that cannot. */

#include "support.h"

#include "support/capturer.h"
#include "temporary.h"

enum { COPIES = 3 };

static CUstreamCaptureMode own_mode(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    ASSERT_CUDA(CALL(cuThreadExchangeStreamCaptureMode, &mode));
    return mode;
}

static int32_t never(void *context) {
    (void)context;
    return 0;
}

/* Waits, copies and pinning: host memory of both kinds, files, zeros; in chunks, and in one copy. */
static void a_resume_beside_a_capture_spares_it(void **state) {
    static const tms_backup_kind_t kinds[COPIES] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
    fixture_t *f = *state;
    tms_error_t error;
    char directory[TEMPORARY_BYTES];
    uint64_t addresses[COPIES];
    assert_non_null(make_temporary_directory(directory, "unseen"));
    ASSERT_OK(tms_disk_set_directory(&f->saver.stores.disk, directory, &error), error);
    f->saver.stores.copying.chunk_bytes = MIB;
    for (uint32_t i = 0; i < COPIES; i++) {
        addresses[i] = allocate(f, "a", kinds[i], 4 * MIB);
        fill(addresses[i], 4 * MIB, i);
    }
    uint64_t empty = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    for (int chunked = 0; chunked < 2; chunked++) {
        capturer_t capturer;
        tms_selection_t selection = {.zero = 1, .interrupted = chunked ? never : NULL};
        ASSERT_OK(pause_all(f, &error), error);
        begin_unseen(&capturer, CU_STREAM_CAPTURE_MODE_GLOBAL);
        simulator()->clear_counts();
        ASSERT_OK(resume_selected(f, &selection, &error), error);
        assert_int_equal(own_mode(), CU_STREAM_CAPTURE_MODE_GLOBAL); /* as before */
        assert_true(simulator()->calls("cuStreamSynchronize") > 0);
        assert_true(simulator()->calls("cuEventSynchronize") > 0);
        assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
        settle_host_memory(&f->saver); /* the other thread that releases memory also unpins it next to the capture */
        assert_int_equal(end_unseen(&capturer), CUDA_SUCCESS);
        for (uint32_t i = 0; i < COPIES; i++) assert_filled(addresses[i], 4 * MIB, i);
        for (uint64_t at = empty; at < empty + 2 * MIB; at++) assert_int_equal(*(const uint8_t *)at, 0);
    }
    assert_int_equal(remove_temporary_directory(directory), 0);
}

/* Waiting for a whole device breaks a capture: the call fails, and nothing has changed. */
static void a_pause_beside_a_capture_changes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    capturer_t capturer;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 1);
    begin_unseen(&capturer, CU_STREAM_CAPTURE_MODE_RELAXED);
    assert_int_equal(pause_all(f, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_string_equal(error.call, "cuCtxSynchronize");
    assert_int_equal(own_mode(), CU_STREAM_CAPTURE_MODE_GLOBAL);
    assert_int_equal(end_unseen(&capturer), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_filled(address, 2 * MIB, 1);
}

/* For every way in which a device is entered and left, or fails to be. */
static void the_threads_mode_is_restored_on_every_path(void **state) {
    static const char *const refused[] = {"cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"};
    const tms_error_context_t context = {.operation = "test", .device = 0};
    fixture_t *f = *state;
    tms_error_t error;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    ASSERT_CUDA(CALL(cuThreadExchangeStreamCaptureMode, &mode));
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        simulator()->fail_after(refused[i], 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(tms_devices_enter(&f->devices, 0, &context, &error), TMS_DRIVER);
        mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        ASSERT_CUDA(CALL(cuThreadExchangeStreamCaptureMode, &mode));
        assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    }
    for (int i = 0; i < 2; i++) ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    for (int i = 0; i < 2; i++) {
        mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        ASSERT_CUDA(CALL(cuThreadExchangeStreamCaptureMode, &mode));
        assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_RELAXED); /* until the outermost leave */
        tms_devices_leave(&f->devices, 0);
    }
    assert_int_equal(own_mode(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

/* A later call restores a mode that cannot be restored at once, and does not take it for the thread's own. */
static void a_mode_that_stays_relaxed_is_restored_later(void **state) {
    const tms_error_context_t context = {.operation = "test", .device = 0};
    enum { LEAVE_ATTEMPTS = 3 };
    fixture_t *f = *state;
    tms_error_t error;
    f->log.level = TMS_LOG_SILENT;
    for (int later = 0; later < 2; later++) {
        simulator()->fail_after("cuThreadExchangeStreamCaptureMode", 1, LEAVE_ATTEMPTS, CUDA_ERROR_UNKNOWN);
        ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
        tms_devices_leave(&f->devices, 0);
        if (later == 0) {
            tms_devices_settle(&f->devices);
        } else {
            ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
            tms_devices_leave(&f->devices, 0);
        }
        assert_int_equal(own_mode(), CU_STREAM_CAPTURE_MODE_GLOBAL);
    }
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_resume_beside_a_capture_spares_it),
        TEST(a_pause_beside_a_capture_changes_nothing),
        TEST(the_threads_mode_is_restored_on_every_path),
        TEST(a_mode_that_stays_relaxed_is_restored_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
