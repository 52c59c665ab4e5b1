/* Guards the driver calls of one segment, each with its undo. */

#include "support.h"

static const tms_error_context_t CONTEXT = {.operation = "test", .device = 0};

/* Addresses of the driver's, which a range of the saver would have. */
static void reserve(fixture_t *f, tms_segment_t *segment, uint64_t bytes) {
    CUdeviceptr address = 0;
    assert_int_equal(f->cuda->cuMemAddressReserve(&address, bytes, 0, 0, 0), CUDA_SUCCESS);
    segment->node.begin = address;
    segment->node.end = address + bytes;
}
static void unreserve(fixture_t *f, const tms_segment_t *segment) {
    assert_int_equal(f->cuda->cuMemAddressFree(tms_segment_address(segment), tms_segment_reserved(segment)), CUDA_SUCCESS);
}

static void sizes_are_rounded_up_without_overflow(void **state) {
    (void)state;
    const uint64_t granularity = 2 * MIB;
    assert_int_equal(tms_segment_round(1, granularity), granularity);
    assert_int_equal(tms_segment_round(granularity, granularity), granularity);
    assert_int_equal(tms_segment_round(granularity + 1, granularity), 2 * granularity);
    assert_true(tms_segment_round(UINT64_MAX, granularity) == 0);
    assert_true(tms_segment_round(UINT64_MAX - granularity + 1, granularity) == UINT64_MAX - granularity + 1);
}

static void a_segment_goes_through_its_life_cycle(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_segment_t segment = {.device = 0};
    reserve(f, &segment, 4 * MIB);
    assert_int_equal(tms_segment_reserved(&segment), 4 * MIB);
    uint64_t address = tms_segment_address(&segment);
    for (uint32_t cycle = 0; cycle < 3; cycle++) {
        ASSERT_OK(tms_segment_populate(&segment, f->cuda, f->topology, 0, &CONTEXT, &error), error);
        assert_true(segment.mapped && segment.has_handle);
        assert_int_equal(segment.accessible, 1);
        assert_int_equal(tms_segment_address(&segment), address);
        fill(address, 4 * MIB, cycle);
        assert_filled(address, 4 * MIB, cycle);
        ASSERT_OK(tms_segment_depopulate(&segment, tms_quiesced_never_handed_out(), f->cuda, &CONTEXT, &error), error);
        assert_false(segment.mapped || segment.has_handle);
        assert_int_equal(physical_bytes(0), 0);
    }
    unreserve(f, &segment);
}

static void a_failed_populate_is_undone(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    tms_error_t error;
    tms_segment_t segment = {.device = 0};
    reserve(f, &segment, 2 * MIB);
    for (size_t i = 0; i < 3; i++) {
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(tms_segment_populate(&segment, f->cuda, f->topology, 0, &CONTEXT, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_false(segment.mapped || segment.has_handle);
        assert_int_equal(physical_bytes(0), 0);
    }
    unreserve(f, &segment);
}

static void flags_report_what_undo_could_not_do(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_segment_t segment = {.device = 0};
    reserve(f, &segment, 2 * MIB);
    simulator()->fail_after("cuMemSetAccess", 0, 1, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(tms_segment_populate(&segment, f->cuda, f->topology, 0, &CONTEXT, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemSetAccess"); /* the first failure is the one to report */
    assert_true(segment.mapped && segment.has_handle);
    simulator()->fail_after("cuMemRelease", 0, 1, CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(tms_segment_depopulate(&segment, tms_quiesced_never_handed_out(), f->cuda, &CONTEXT, &error),
                     TMS_DRIVER);
    assert_true(!segment.mapped && segment.has_handle);
    ASSERT_OK(tms_segment_depopulate(&segment, tms_quiesced_never_handed_out(), f->cuda, &CONTEXT, &error), error);
    assert_false(segment.has_handle);
    unreserve(f, &segment);
}

static void sharing_requests_only_missing_access(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_segment_t segment = {.device = 0};
    reserve(f, &segment, 2 * MIB);
    ASSERT_OK(tms_segment_populate(&segment, f->cuda, f->topology, 0, &CONTEXT, &error), error);
    simulator()->clear_counts();
    ASSERT_OK(tms_segment_share(&segment, f->cuda, 2, &CONTEXT, &error), error);
    ASSERT_OK(tms_segment_share(&segment, f->cuda, 2, &CONTEXT, &error), error);
    assert_int_equal(simulator()->calls("cuMemSetAccess"), 1);
    assert_int_equal(segment.accessible, 3);
    ASSERT_OK(tms_segment_depopulate(&segment, tms_quiesced_never_handed_out(), f->cuda, &CONTEXT, &error), error);
    assert_int_equal(segment.accessible, 0);
    unreserve(f, &segment);
}

static void a_segment_that_is_not_quiesced_stays_mapped(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_segment_t segment = {.device = 0};
    reserve(f, &segment, 2 * MIB);
    ASSERT_OK(tms_segment_populate(&segment, f->cuda, f->topology, 2, &CONTEXT, &error), error);
    simulator()->clear_counts();
    assert_int_equal(tms_segment_depopulate(&segment, tms_quiesced_devices_lost(1), f->cuda, &CONTEXT, &error),
                     TMS_INVALID_STATE); /* device 1 has access */
    assert_true(segment.mapped && segment.has_handle);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    ASSERT_OK(tms_segment_depopulate(&segment, tms_quiesced_devices_lost(3), f->cuda, &CONTEXT, &error), error);
    unreserve(f, &segment);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_rounded_up_without_overflow),
        cmocka_unit_test_setup_teardown(a_segment_goes_through_its_life_cycle, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_failed_populate_is_undone, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(flags_report_what_undo_could_not_do, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_segment_that_is_not_quiesced_stays_mapped, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(sharing_requests_only_missing_access, setup_two_devices, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
