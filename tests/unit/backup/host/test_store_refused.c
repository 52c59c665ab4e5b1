/* Guards the host store: memory that the driver or the system fails to release is quarantined. */
#include "support/host_store_fixture.h"

/* ---- failures ---- */

static void memory_that_the_driver_fails_to_unpin_is_released_later(void **state) {
    host_fixture_t *f = *state;
    const char *calls[] = {"cuMemHostUnregister", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent",
                           "cuDevicePrimaryCtxGetState"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        char text[TEXT_BYTES];
        tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
        char *memory = buffer->memory;
        captured_stderr_t captured = capture_begin();
        CALL(fail_after, calls[i], 0, 3, CUDA_ERROR_UNKNOWN);
        tms_host_buffer_drop(buffer);
        tms_host_store_settle(&f->store);
        assert_int_equal(atomic_load(&f->store.buffer_bytes), 0); /* it is no longer a backup */
        assert_int_equal(quarantined(f), 2);
        assert_int_equal(resident(f), 2 * CHUNK);
        assert_int_equal(pinned_bytes(), 2 * CHUNK);
        assert_true(is_mapped(memory)); /* the device may still write there */
        tms_quarantine_retry(&f->quarantine);
        assert_int_equal(quarantined(f), 1);
        assert_int_equal(resident(f), CHUNK);
        tms_quarantine_retry(&f->quarantine);
        capture_end(captured, text, sizeof text);
        assert_int_equal(count_lines(text), 1); /* the other two are counted */
        assert_int_equal(atomic_load(&f->log.recurrences[TMS_LOG_QUARANTINED][1].count), 2 * (i + 1));
        assert_int_equal(quarantined(f), 0);
        assert_false(is_mapped(memory));
        assert_empty(f);
    }
}

static void memory_of_a_lost_device_stays(void **state) {
    host_fixture_t *f = *state;
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    char *memory = buffer->memory;
    CALL(lose_device, 0, CUDA_ERROR_ILLEGAL_ADDRESS);
    tms_host_buffer_drop(buffer);
    tms_host_store_settle(&f->store);
    tms_quarantine_retry(&f->quarantine);
    assert_int_equal(quarantined(f), 2);
    assert_true(is_mapped(memory));
    /* The registrations end with the context, and the memory can be released then. */
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    CALL(reset, 2, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cuInit, 0));
    tms_quarantine_retry(&f->quarantine);
    assert_int_equal(quarantined(f), 0);
    assert_false(is_mapped(memory));
    assert_empty(f);
}

static void registrations_ended_by_a_reset_are_accepted(void **state) {
    host_fixture_t *f = *state;
    tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    char *memory = buffer->memory;
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
    tms_host_buffer_drop(buffer);
    tms_host_store_settle(&f->store);
    assert_int_equal(quarantined(f), 0);
    assert_false(is_mapped(memory));
    assert_empty(f);
}

static void memory_that_the_system_fails_to_unmap_is_emptied_and_released_later(void **state) {
    host_fixture_t *f = *state;
    unsigned char resident_now = 1;
    tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    char *memory = buffer->memory;
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    memset(memory, 1, 2 * CHUNK);
    fail_call(CALL_MUNMAP, 0, 3);
    tms_host_buffer_drop(buffer);
    tms_host_store_settle(&f->store);
    assert_int_equal(quarantined(f), 2);
    assert_int_equal(pinned_bytes(), 0);
    assert_int_equal(REAL(mincore)(memory, 1, &resident_now), 0);
    assert_int_equal(resident_now & 1, 0); /* the pages are released, the addresses are not */
    tms_quarantine_retry(&f->quarantine);
    tms_quarantine_retry(&f->quarantine);
    assert_int_equal(quarantined(f), 0);
    assert_int_equal(registrations().unregistered, 2); /* once each */
    assert_empty(f);
}

static void a_deinitialized_driver_keeps_nothing(void **state) {
    host_fixture_t *f = *state;
    tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    char *memory = buffer->memory;
    CALL(fail_after, "cuMemHostUnregister", 0, 2, CUDA_ERROR_DEINITIALIZED);
    tms_host_buffer_drop(buffer);
    tms_host_store_settle(&f->store);
    assert_int_equal(quarantined(f), 0);
    assert_int_equal(resident(f), 0);
    assert_null(f->store.blocks);
    assert_true(is_mapped(memory)); /* the state of the device is unknown now */
    /* The error was injected for the test only. */
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
    ASSERT_CUDA(CALL(cuMemHostUnregister, memory));
    ASSERT_CUDA(CALL(cuMemHostUnregister, memory + CHUNK));
    tms_devices_leave(&f->devices, 0);
    assert_int_equal(munmap(memory, 2 * CHUNK), 0);
}

static void a_failed_search_for_limits_is_reported(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_t store;
    tms_error_t error;
    char text[TEXT_BYTES];
    captured_stderr_t captured = capture_begin();
    taken_descriptors_t taken = take_descriptors();
    tms_status_t status = tms_host_store_init(&store, &f->devices, &f->log, &f->quarantine, UINT64_MAX, 0, &error);
    give_descriptors_back(taken);
    capture_end(captured, text, sizeof text);
    ASSERT_OK(status, error);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, strerror(EMFILE)));
    tms_host_store_release(&store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(memory_that_the_driver_fails_to_unpin_is_released_later),
        TEST(memory_of_a_lost_device_stays),
        TEST(registrations_ended_by_a_reset_are_accepted),
        TEST(memory_that_the_system_fails_to_unmap_is_emptied_and_released_later),
        TEST(a_deinitialized_driver_keeps_nothing),
        TEST(a_failed_search_for_limits_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
