/* The count of captures, and the settings that they lend. */

#include "support.h"

static const tms_error_context_t CONTEXT = {.operation = "test", .device = TMS_NO_DEVICE};

static void captures_nest_and_end_in_pairs(void **state) {
    (void)state;
    tms_capture_t capture;
    tms_error_t error;
    tms_region_t region, outer = {.managed = true, .backup = TMS_BACKUP_PINNED};
    tms_capture_init(&capture);
    assert_false(tms_capture_end(&capture));
    assert_false(tms_capture_settings(&capture, &region));
    ASSERT_OK(tms_capture_begin(&capture, &outer, &CONTEXT, &error), error);
    ASSERT_OK(tms_capture_begin(&capture, NULL, &CONTEXT, &error), error);
    assert_int_equal(tms_capture_visible(&capture), 2);
    assert_true(tms_capture_settings(&capture, &region)); /* the inner one has none: the outer one's count */
    assert_int_equal(region.backup, TMS_BACKUP_PINNED);
    assert_true(tms_capture_end(&capture));
    assert_true(tms_capture_end(&capture));
    assert_false(tms_capture_end(&capture));
    assert_int_equal(tms_capture_visible(&capture), 0);
}

static void too_many_is_an_error_and_changes_nothing(void **state) {
    (void)state;
    tms_capture_t capture;
    tms_error_t error;
    tms_capture_init(&capture);
    for (int i = 0; i < TMS_CAPTURE_MAX_NESTED; i++) ASSERT_OK(tms_capture_begin(&capture, NULL, &CONTEXT, &error), error);
    assert_int_equal(tms_capture_begin(&capture, NULL, &CONTEXT, &error), TMS_INVALID_STATE);
    assert_int_equal(tms_capture_visible(&capture), TMS_CAPTURE_MAX_NESTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(captures_nest_and_end_in_pairs),
        cmocka_unit_test(too_many_is_an_error_and_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
