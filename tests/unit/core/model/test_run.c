/* Guards the driver calls of one run, each with its undo. */

#include <string.h>

#include "support.h"

static const tms_error_context_t CONTEXT = {.operation = "test", .device = 0};

/* Addresses of the driver's, which a range of the saver would have. */
static void reserve(fixture_t *f, tms_run_t *run, uint64_t bytes) {
    CUdeviceptr address = 0;
    assert_int_equal(f->cuda->cuMemAddressReserve(&address, bytes, 0, 0, 0), CUDA_SUCCESS);
    run->begin = address;
    run->end = address + bytes;
}
static void unreserve(fixture_t *f, const tms_run_t *run) {
    assert_int_equal(f->cuda->cuMemAddressFree(run->begin, tms_run_bytes(run)), CUDA_SUCCESS);
}

static void a_run_goes_through_its_life_cycle(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_run_t run = {.device = 0};
    reserve(f, &run, 4 * MIB);
    const uint64_t address = run.begin;
    for (uint32_t cycle = 0; cycle < 3; cycle++) {
        ASSERT_OK(tms_run_populate(&run, f->cuda, f->topology, 0, &CONTEXT, &error), error);
        assert_true(run.mapped && run.has_handle);
        assert_int_equal(run.accessible, 1);
        fill(address, 4 * MIB, cycle);
        assert_filled(address, 4 * MIB, cycle);
        ASSERT_OK(tms_run_depopulate(&run, tms_quiesced_without_users(), f->cuda, &CONTEXT, &error), error);
        assert_false(run.mapped || run.has_handle);
        assert_int_equal(physical_bytes(0), 0);
    }
    unreserve(f, &run);
}

static void a_failed_populate_is_undone(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    tms_error_t error;
    tms_run_t run = {.device = 0};
    reserve(f, &run, 2 * MIB);
    for (size_t i = 0; i < 3; i++) {
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(tms_run_populate(&run, f->cuda, f->topology, 0, &CONTEXT, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_false(run.mapped || run.has_handle);
        assert_int_equal(physical_bytes(0), 0);
    }
    unreserve(f, &run);
}

static void flags_report_what_undo_could_not_do(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_run_t run = {.device = 0};
    reserve(f, &run, 2 * MIB);
    simulator()->fail_after("cuMemSetAccess", 0, 1, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(tms_run_populate(&run, f->cuda, f->topology, 0, &CONTEXT, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemSetAccess"); /* the first failure is the one to report */
    assert_non_null(strstr(error.message, " Undoing it failed, too: cuMemUnmap failed with CUDA_ERROR_INVALID_VALUE (1)."));
    assert_true(run.mapped && run.has_handle);
    simulator()->fail_after("cuMemRelease", 0, 1, CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(tms_run_depopulate(&run, tms_quiesced_without_users(), f->cuda, &CONTEXT, &error), TMS_DRIVER);
    assert_true(!run.mapped && run.has_handle);
    ASSERT_OK(tms_run_depopulate(&run, tms_quiesced_without_users(), f->cuda, &CONTEXT, &error), error);
    assert_false(run.has_handle);
    unreserve(f, &run);
}

static void sharing_requests_only_missing_access(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_run_t run = {.device = 0};
    reserve(f, &run, 2 * MIB);
    ASSERT_OK(tms_run_populate(&run, f->cuda, f->topology, 0, &CONTEXT, &error), error);
    simulator()->clear_counts();
    ASSERT_OK(tms_run_share(&run, f->cuda, 2, &CONTEXT, &error), error);
    ASSERT_OK(tms_run_share(&run, f->cuda, 2, &CONTEXT, &error), error);
    assert_int_equal(simulator()->calls("cuMemSetAccess"), 1);
    assert_int_equal(run.accessible, 3);
    ASSERT_OK(tms_run_depopulate(&run, tms_quiesced_without_users(), f->cuda, &CONTEXT, &error), error);
    assert_int_equal(run.accessible, 0);
    unreserve(f, &run);
}

static void a_run_that_is_not_quiesced_stays_mapped(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_run_t run = {.device = 0};
    reserve(f, &run, 2 * MIB);
    ASSERT_OK(tms_run_populate(&run, f->cuda, f->topology, 2, &CONTEXT, &error), error);
    simulator()->clear_counts();
    assert_int_equal(tms_run_depopulate(&run, tms_quiesced_idle_or_lost(1), f->cuda, &CONTEXT, &error),
                     TMS_INVALID_STATE); /* device 1 has access */
    assert_true(run.mapped && run.has_handle);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    ASSERT_OK(tms_run_depopulate(&run, tms_quiesced_idle_or_lost(3), f->cuda, &CONTEXT, &error), error);
    unreserve(f, &run);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_run_goes_through_its_life_cycle, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_failed_populate_is_undone, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(flags_report_what_undo_could_not_do, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_run_that_is_not_quiesced_stays_mapped, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(sharing_requests_only_missing_access, setup_two_devices, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
