/* Guards the arithmetic of segments; their guard pages are in transition/test_guard.c. */

#include "support.h"

static void sizes_are_rounded_up_without_overflow(void **state) {
    (void)state;
    const uint64_t granularity = 2 * MIB;
    assert_int_equal(tms_segment_round(1, granularity), granularity);
    assert_int_equal(tms_segment_round(granularity, granularity), granularity);
    assert_int_equal(tms_segment_round(granularity + 1, granularity), 2 * granularity);
    assert_true(tms_segment_round(UINT64_MAX, granularity) == 0);
    assert_true(tms_segment_round(UINT64_MAX - granularity + 1, granularity) == UINT64_MAX - granularity + 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(sizes_are_rounded_up_without_overflow)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
