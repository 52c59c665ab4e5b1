/* Guards uuid.c: the text of a UUID. test_api.c guards which devices have one. */

#include "device/uuid.h"

#include "support.h"

static void the_text_is_that_of_nvml(void **state) {
    (void)state;
    CUuuid uuid;
    char text[TMS_UUID_BYTES];
    for (size_t i = 0; i < sizeof uuid.bytes; i++) uuid.bytes[i] = (char)(0xF0 + i);
    tms_uuid_write(&uuid, text);
    assert_string_equal(text, "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_text_is_that_of_nvml)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
