/* Guards uuid.c: the text of a UUID, and the devices that have one. */

#include "device/uuid.h"

#include <string.h>

#include "support.h"

static const tms_error_context_t CONTEXT = {.operation = "test", .device = TMS_NO_DEVICE};

static void the_text_is_that_of_nvml(void **state) {
    (void)state;
    CUuuid uuid;
    char text[TMS_UUID_BYTES];
    for (size_t i = 0; i < sizeof uuid.bytes; i++) uuid.bytes[i] = (char)(0xF0 + i);
    tms_uuid_write(&uuid, text);
    assert_string_equal(text, "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff");
}

static void each_device_has_its_own(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char first[TMS_UUID_BYTES], second[TMS_UUID_BYTES];
    ASSERT_OK(tms_uuid_of_device(&f->devices, 0, first, &CONTEXT, &error), error);
    ASSERT_OK(tms_uuid_of_device(&f->devices, 1, second, &CONTEXT, &error), error);
    assert_string_not_equal(first, second);
    assert_int_equal(strncmp(first, "GPU-", 4), 0);
}

static void other_numbers_are_an_error(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    char text[TMS_UUID_BYTES] = "unchanged";
    assert_int_equal(tms_uuid_of_device(&f->devices, -1, text, &CONTEXT, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_uuid_of_device(&f->devices, 2, text, &CONTEXT, &error), TMS_INVALID_ARGUMENT);
    assert_non_null(strstr(error.message, "devices 0 to 1 exist"));
    simulator()->fail_after("cuDeviceGetUuid_v2", 0, 1, CUDA_ERROR_NOT_SUPPORTED);
    assert_int_equal(tms_uuid_of_device(&f->devices, 0, text, &CONTEXT, &error), TMS_DRIVER);
    assert_string_equal(text, "unchanged");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_text_is_that_of_nvml),
        cmocka_unit_test_setup_teardown(each_device_has_its_own, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(other_numbers_are_an_error, setup_two_devices, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
