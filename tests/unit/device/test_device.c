/* Guards devices: which are in use, which reach each other, and what entering one leaves behind. */

#include "device/synchronize.h"
#include "support.h"

static const tms_error_context_t CONTEXT = {.operation = "test", .device = TMS_NO_DEVICE};
static const tms_current_context_t NOWHERE = {.context = NULL, .device = TMS_NO_DEVICE};

static int is_active(fixture_t *f, int device) {
    unsigned int flags = 0;
    int active = -1;
    assert_int_equal(f->cuda->cuDevicePrimaryCtxGetState(device, &flags, &active), CUDA_SUCCESS);
    return active;
}

static void loading_reads_every_device_and_creates_no_context(void **state) {
    fixture_t *f = *state;
    assert_int_equal(f->topology->count, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(f->topology->device[i].granularity, TMS_SIM_GRANULARITY);
        assert_int_equal(f->topology->device[i].total_bytes, 256 * MIB);
    }
    assert_int_equal(is_active(f, 1), 0);
}

static void synchronizing_an_unused_device_does_not_wake_it(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    ASSERT_OK(tms_devices_synchronize(&f->devices, 3, &NOWHERE, NULL, &CONTEXT, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 1);
    assert_int_equal(is_active(f, 1), 0);
}

static void entering_restores_the_current_device(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    int current = -1;
    CUcontext context = (CUcontext)1;
    assert_int_equal(f->cuda->cuCtxGetCurrent(&context), CUDA_SUCCESS);
    assert_null(context);
    ASSERT_OK(tms_devices_current(&f->devices, &current, &CONTEXT, &error), error);
    assert_int_equal(current, 0); /* no context: the runtime's default device */
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), error);
    ASSERT_OK(tms_devices_current(&f->devices, &current, &CONTEXT, &error), error);
    assert_int_equal(current, 1);
    tms_devices_leave(&f->devices, 1);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&context), CUDA_SUCCESS);
    assert_null(context);
    assert_int_equal(is_active(f, 1), 1); /* kept: memory pinned in it would otherwise be lost with it */
}

static void peers_are_the_devices_in_use(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_device_mask_t mask = 99;
    ASSERT_OK(tms_devices_active(&f->devices, &mask, &CONTEXT, &error), error);
    assert_int_equal(mask, 1);
    ASSERT_OK(tms_devices_peers(&f->devices, 0, &mask, &CONTEXT, &error), error);
    assert_int_equal(mask, 0);
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), error);
    tms_devices_leave(&f->devices, 1);
    ASSERT_OK(tms_devices_peers(&f->devices, 0, &mask, &CONTEXT, &error), error);
    assert_int_equal(mask, 2);
    ASSERT_OK(tms_devices_peers(&f->devices, 1, &mask, &CONTEXT, &error), error);
    assert_int_equal(mask, 1);
    simulator()->clear_counts();
    ASSERT_OK(tms_devices_peers(&f->devices, 0, &mask, &CONTEXT, &error), error);
    assert_int_equal(simulator()->calls("cuDeviceCanAccessPeer"), 0); /* queried once a pair */
}

static void a_failed_entry_leaves_no_reference(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    simulator()->fail_after("cuCtxPushCurrent", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuCtxPushCurrent");
    assert_int_equal(simulator()->calls("cuDevicePrimaryCtxRetain"), simulator()->calls("cuDevicePrimaryCtxRelease"));
}

static uint64_t references(void) {
    return simulator()->calls("cuDevicePrimaryCtxRetain") - simulator()->calls("cuDevicePrimaryCtxRelease");
}

static void a_failed_entry_to_an_unused_device_does_not_wake_it(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    simulator()->fail_after("cuCtxPushCurrent", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), TMS_DRIVER);
    assert_int_equal(references(), 0);
    assert_int_equal(is_active(f, 1), 0);
    simulator()->fail_after("cuDevicePrimaryCtxRetain", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuDevicePrimaryCtxRetain");
    assert_int_equal(is_active(f, 1), 0);
}

static void a_reference_that_cannot_be_released_is_released_later(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    simulator()->fail_after("cuDevicePrimaryCtxRelease", 0, 3, CUDA_ERROR_UNKNOWN);
    for (int i = 0; i < 2; i++) {
        ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
        tms_devices_leave(&f->devices, 0);
    }
    assert_int_equal(tms_devices_unreleased(&f->devices), 2);
    tms_devices_reclaim(&f->devices); /* refused once more */
    assert_int_equal(tms_devices_unreleased(&f->devices), 2);
    tms_devices_reclaim(&f->devices);
    assert_int_equal(tms_devices_unreleased(&f->devices), 0);
    simulator()->clear_counts();
    tms_devices_reclaim(&f->devices);
    assert_int_equal(simulator()->calls("cuDevicePrimaryCtxRelease"), 0);
}

static void a_destroyed_context_owes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
    simulator()->fail_after("cuDevicePrimaryCtxRelease", 0, 1, CUDA_ERROR_INVALID_CONTEXT);
    tms_devices_leave(&f->devices, 0);
    assert_int_equal(tms_devices_unreleased(&f->devices), 0);
}

static void leaving_pops_in_spite_of_errors(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    CUcontext before = NULL, now = NULL;
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&before), CUDA_SUCCESS);
    /* Twice in a row is nothing. */
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), error);
    simulator()->fail_after("cuCtxPopCurrent", 0, 2, CUDA_ERROR_UNKNOWN);
    tms_devices_leave(&f->devices, 1);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
    assert_ptr_equal(now, before);
    /* Further failures leave the other device current, until this thread enters one again. */
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), error);
    simulator()->fail_after("cuCtxPopCurrent", 0, 4, CUDA_ERROR_UNKNOWN);
    tms_devices_leave(&f->devices, 1);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
    assert_ptr_not_equal(now, before);
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), error);
    tms_devices_leave(&f->devices, 1);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
    assert_ptr_equal(now, before);
    /* Settling also fails as long as the driver does. */
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &CONTEXT, &error), error);
    simulator()->fail_after("cuCtxPopCurrent", 0, 5, CUDA_ERROR_UNKNOWN); /* three tries, and one when this leaves */
    tms_devices_leave(&f->devices, 1);
    tms_devices_settle(&f->devices);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
    assert_ptr_not_equal(now, before);
    for (int i = 0; i < 2; i++) {
        tms_devices_settle(&f->devices);
        assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
        assert_ptr_equal(now, before);
    }
    tms_devices_leave(&f->devices, 0);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
    assert_null(now); /* and no context of the caller was popped */
}

static void a_machine_without_a_device_is_an_error(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_driver_t driver;
    tms_devices_t devices;
    simulator()->reset(0, 0);
    tms_driver_init(&driver, f->config.driver_path, &f->log);
    tms_devices_init(&devices, &driver);
    assert_int_equal(tms_devices_load(&devices, NULL, NULL, &CONTEXT, &error), TMS_DRIVER_UNAVAILABLE);
    tms_devices_release(&devices);
    tms_driver_release(&driver);
    simulator()->reset(2, 256 * MIB);
}

/* test_api.c guards which devices have one. */
static void the_text_of_a_uuid_is_that_of_nvml(void **state) {
    (void)state;
    CUuuid uuid;
    char text[TMS_UUID_BYTES];
    for (size_t i = 0; i < sizeof uuid.bytes; i++) uuid.bytes[i] = (char)(0xF0 + i);
    tms_device_write_uuid(&uuid, text);
    assert_string_equal(text, "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(loading_reads_every_device_and_creates_no_context, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(synchronizing_an_unused_device_does_not_wake_it, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(entering_restores_the_current_device, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(peers_are_the_devices_in_use, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(a_failed_entry_leaves_no_reference, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_failed_entry_to_an_unused_device_does_not_wake_it, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(a_reference_that_cannot_be_released_is_released_later, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_destroyed_context_owes_nothing, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(leaving_pops_in_spite_of_errors, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(a_machine_without_a_device_is_an_error, setup_two_devices, teardown),
        cmocka_unit_test(the_text_of_a_uuid_is_that_of_nvml),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
