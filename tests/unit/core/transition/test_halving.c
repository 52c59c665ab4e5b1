/* Guards the resume of neighbours whose run does not fit whole: which segments get memory, when the first to be restored
 * lies in a later half. */

#include "neighbours.h"
#include "support.h"

enum { SEGMENTS = 4 };

/* Neighbours. The one with the most contents comes first in a resume, and is the last of the run. */
static uint64_t allocate_with_contents_in_the_last(fixture_t *f, uint64_t *addresses) {
    const uint64_t bytes[SEGMENTS] = {2 * MIB, 2 * MIB, 2 * MIB, 6 * MIB};
    uint64_t total = 0, first = allocate(f, "a", TMS_BACKUP_PINNED, 16 * MIB); /* the next range is as large */
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        addresses[i] = allocate(f, "a", TMS_BACKUP_PINNED, bytes[i]);
        fill(addresses[i], bytes[i], i);
        total += bytes[i];
    }
    free_at(f, first);
    return total;
}

static void the_first_to_be_restored_may_be_in_the_last_half(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t addresses[SEGMENTS], total = allocate_with_contents_in_the_last(f, addresses);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(physical_bytes(0), total);
    for (uint32_t i = 0; i < SEGMENTS; i++) assert_filled(addresses[i], i + 1 < SEGMENTS ? 2 * MIB : 6 * MIB, i);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_first_to_be_restored_may_be_in_the_last_half, setup_one_device, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
