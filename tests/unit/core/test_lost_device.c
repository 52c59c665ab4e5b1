/* Guards devices that a sticky error has lost, next to others that keep working. */

#include "support.h"

#include <stdio.h>
#include <string.h>

#include "captured_stderr.h"
#include "device/synchronize.h"

enum { FREES = 50, TEXT_BYTES = 1 << 15, LAST = true };
enum { LOST = CUDA_ERROR_ILLEGAL_ADDRESS, GATE = 7, BOTH = 3 };

static const tms_error_context_t CONTEXT = {.operation = "test", .device = TMS_NO_DEVICE};
static const tms_current_context_t NOWHERE = {.context = NULL, .device = TMS_NO_DEVICE};

static void assert_context_whole(fixture_t *f, int device) {
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, device, &CONTEXT, &error), error);
    assert_int_equal(f->cuda->cuCtxSynchronize(), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, device);
}

/* Memory of device 1, to which both devices have access. */
static uint64_t allocate_shared(fixture_t *f, tms_backup_kind_t backup) {
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), error);
    tms_devices_leave(&f->devices, 1);
    uint64_t address = allocate_on(f, 1, "a", backup, 2 * MIB);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address))), BOTH);
    return address;
}

/* A kernel on `device` that adds 1 to the memory once the gate is open. */
static void launch_on(fixture_t *f, int device, uint64_t address) {
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, device, &CONTEXT, &error), error);
    assert_int_equal(simulator()->launch_add(NULL, address, 2 * MIB, 1, GATE), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, device);
}

typedef struct free_call {
    tms_saver_t *saver;
    uint64_t address;
} free_call_t;

static void *run_free(void *argument) {
    free_call_t *call = argument;
    tms_error_t error;
    return (void *)(uintptr_t)tms_free_address(call->saver, call->address, &error);
}

/* ---- waiting ---- */

static void every_device_is_waited_for_although_one_fails(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_device_mask_t idle = 0;
    (void)allocate_shared(f, TMS_BACKUP_NONE);
    for (int failing = 0; failing < 2; failing++) {
        simulator()->clear_counts();
        simulator()->fail_after("cuCtxSynchronize", (uint64_t)failing, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(tms_devices_synchronize(&f->devices, BOTH, &NOWHERE, &idle, &CONTEXT, &error), TMS_DRIVER);
        assert_int_equal(error.device, failing);
        assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
        assert_int_equal(idle, failing ? 1 : 2);
    }
}

static void a_lost_device_is_idle_and_any_other_failure_is_reported_first(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_device_mask_t idle = 0;
    (void)allocate_shared(f, TMS_BACKUP_NONE);
    simulator()->lose_device(0, LOST);
    assert_int_equal(tms_devices_synchronize(&f->devices, BOTH, &NOWHERE, &idle, &CONTEXT, &error), TMS_DEVICE_LOST);
    assert_int_equal(error.device, 0);
    assert_int_equal(idle, BOTH);
    simulator()->fail_after("cuCtxSynchronize", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_devices_synchronize(&f->devices, BOTH, &NOWHERE, &idle, &CONTEXT, &error), TMS_DRIVER);
    assert_int_equal(error.device, 1);
    assert_int_equal(idle, 1);
}

static void a_failure_that_is_not_returned_is_logged_once(void **state) {
    fixture_t *f = *state;
    char text[TEXT_BYTES];
    tms_error_t error;
    (void)allocate_shared(f, TMS_BACKUP_NONE);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < 2; i++) {
        simulator()->fail_after("cuCtxSynchronize", 0, 2, CUDA_ERROR_UNKNOWN);
        assert_int_equal(tms_devices_synchronize(&f->devices, BOTH, &NOWHERE, NULL, &CONTEXT, &error), TMS_DRIVER);
        assert_int_equal(error.device, 0);
    }
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "cuCtxSynchronize"));
    assert_non_null(strstr(text, "device 1"));
}

static int32_t never_stop(void *context) {
    (void)context;
    return 0;
}

static void a_helper_reports_which_devices_are_idle(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_wait_t wait;
    tms_device_mask_t idle = 0;
    (void)allocate_shared(f, TMS_BACKUP_NONE);
    simulator()->lose_device(0, LOST);
    tms_wait_begin(&wait, never_stop, NULL, 0);
    simulator()->fail_after("cuCtxSynchronize", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_wait_for_devices(&wait, &f->devices, BOTH, &idle, &f->log, &CONTEXT, &error), TMS_DRIVER);
    assert_int_equal(idle, 1);
}

/* ---- frees ---- */

static void a_free_waits_for_a_device_although_another_is_lost(void **state) {
    fixture_t *f = *state;
    pthread_t thread;
    void *status = NULL;
    tms_error_t error;
    uint64_t idle = allocate_shared(f, TMS_BACKUP_NONE);
    free_call_t call = {.saver = &f->saver, .address = allocate_shared(f, TMS_BACKUP_NONE)};
    simulator()->lose_device(0, LOST);
    simulator()->clear_counts();
    assert_int_equal(tms_free_address(&f->saver, idle, &error), TMS_OK);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    launch_on(f, 1, call.address);
    assert_int_equal(pthread_create(&thread, NULL, run_free, &call), 0);
    simulator()->wait_until_synchronizing();
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    simulator()->open_gate(GATE);
    assert_int_equal(pthread_join(thread, &status), 0);
    assert_int_equal((uintptr_t)status, TMS_OK);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 2);
    assert_int_equal(physical_bytes(1), 0);
    assert_context_whole(f, 1); /* the kernel found its memory */
}

static void a_free_is_deferred_if_one_device_is_lost_and_another_wait_fails(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t address = allocate_shared(f, TMS_BACKUP_NONE);
    simulator()->lose_device(0, LOST);
    simulator()->clear_counts();
    simulator()->fail_after("cuCtxSynchronize", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.deferred_frees, 1);
    tms_reclaim_all(&f->saver);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    assert_nothing_waits(&f->saver);
}

/* While one device is lost, the driver may return that device's error from calls for another. */
static void only_its_own_context_proves_that_a_device_is_lost(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        tms_counters_t counters;
        uint64_t address = allocate_shared(f, TMS_BACKUP_NONE);
        simulator()->clear_counts();
        simulator()->fail_after(calls[i], 1, 1, LOST); /* for device 1 */
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.deferred_frees, 1);
        tms_reclaim_all(&f->saver);
        assert_nothing_waits(&f->saver);
    }
}

/* ---- the log ---- */

static void many_frees_on_a_lost_device_log_a_line_and_a_summary(void **state) {
    fixture_t *f = *state;
    static char text[TEXT_BYTES];
    char bytes[TEXT_BYTES];
    tms_error_t error;
    uint64_t addresses[FREES];
    for (int i = 0; i < FREES; i++) addresses[i] = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    (void)allocate(f, "kept", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->lose_device(0, LOST);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < FREES; i++) assert_int_equal(tms_free_address(&f->saver, addresses[i], &error), TMS_OK);
    capture_end(captured, text, sizeof text);
    assert_int_equal(physical_bytes(0), 2 * MIB);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "The memory is freed nevertheless."));
    captured = capture_begin();
    assert_int_equal(pause_all(f, &error), TMS_DEVICE_LOST);
    assert_int_equal(pause_all(f, &error), TMS_DEVICE_LOST);
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    snprintf(
        bytes, sizeof bytes,
        "device 0: memory was freed although the device is lost: %d more times since that was logged, %d.0 MiB in total",
        FREES - 1, 2 * (FREES - 1));
    assert_non_null(strstr(text, bytes));
}

/* Every call retries deferred frees. */
static void repeatedly_deferred_frees_do_not_flood_the_log(void **state) {
    fixture_t *f = *state;
    static char text[TEXT_BYTES];
    tms_error_t error;
    tms_counters_t counters;
    uint64_t addresses[FREES];
    for (int i = 0; i < FREES; i++) addresses[i] = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuCtxSynchronize", 0, 3 * FREES, CUDA_ERROR_UNKNOWN);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < FREES; i++) assert_int_equal(tms_free_address(&f->saver, addresses[i], &error), TMS_OK);
    ASSERT_OK(pause_all(f, &error), error); /* the first summary */
    ASSERT_OK(pause_all(f, &error), error); /* and too few more for another one */
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 2);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.deferred_frees, FREES);
    ASSERT_OK(pause_all(f, &error), error);
    assert_nothing_waits(&f->saver);
}

/* ---- pauses ---- */

/* Every entry and exit of a device's context may fail each time: the driver may return the error of earlier work from any
 * call. */
static void failures_of_each_context_entry_do_not_flood_the_log(void **state) {
    static const char *const calls[] = {"cuThreadExchangeStreamCaptureMode", "cuDevicePrimaryCtxRelease"};
    fixture_t *f = *state;
    char text[TEXT_BYTES];
    tms_error_t error;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        simulator()->fail_after(calls[i], 0, UINT64_MAX, LOST);
        captured_stderr_t captured = capture_begin();
        for (int j = 0; j < FREES; j++) {
            ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
            tms_devices_leave(&f->devices, 0);
            tms_devices_reclaim(&f->devices);
        }
        tms_log_summarize(&f->log, LAST);
        capture_end(captured, text, sizeof text);
        assert_int_equal(count_lines(text), 2);
        assert_non_null(strstr(text, calls[i]));
        simulator()->fail_after(calls[i], 0, 0, 0);
        tms_devices_reclaim(&f->devices);
        assert_int_equal(tms_devices_unreleased(&f->devices), 0);
    }
}

static void a_pause_with_a_lost_device_fails_and_unmaps_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t shared = allocate_shared(f, TMS_BACKUP_NONE), kept = allocate_on(f, 1, "b", TMS_BACKUP_PINNED, 2 * MIB);
    simulator()->lose_device(0, LOST);
    simulator()->clear_counts();
    assert_int_equal(pause_all(f, &error), TMS_DEVICE_LOST);
    assert_int_equal(error.device, 0);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    assert_int_equal(state_of(f, shared), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, kept), TMS_SEGMENT_ACTIVE);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(every_device_is_waited_for_although_one_fails),
        TEST(a_lost_device_is_idle_and_any_other_failure_is_reported_first),
        TEST(a_failure_that_is_not_returned_is_logged_once),
        TEST(a_helper_reports_which_devices_are_idle),
        TEST(a_free_waits_for_a_device_although_another_is_lost),
        TEST(a_free_is_deferred_if_one_device_is_lost_and_another_wait_fails),
        TEST(only_its_own_context_proves_that_a_device_is_lost),
        TEST(many_frees_on_a_lost_device_log_a_line_and_a_summary),
        TEST(repeatedly_deferred_frees_do_not_flood_the_log),
        TEST(failures_of_each_context_entry_do_not_flood_the_log),
        TEST(a_pause_with_a_lost_device_fails_and_unmaps_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
