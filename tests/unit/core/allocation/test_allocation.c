/* Guards allocate and free: sizes, states, waiting for the device, captures, peers, and driver failures. */

#include "support.h"

#include <string.h>

static tms_status_t try_allocate(fixture_t *f, uint64_t bytes, int device, uint64_t *address, tms_error_t *error) {
    tms_region_t region = tms_saver_settings(&f->saver);
    return tms_allocation_create(&f->saver, &region, bytes, device, address, error);
}

static void an_allocation_is_fresh_writable_memory(void **state) {
    fixture_t *f = *state;
    tms_segment_info_t row;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_NONE, 3 * MIB);
    assert_int_equal(physical_bytes(0), 4 * MIB); /* rounded up to the granularity */
    assert_poisoned(address, 3 * MIB);
    fill(address, 4 * MIB, 1);
    assert_filled(address, 4 * MIB, 1);
    assert_int_equal(tms_inspect_find(&f->saver, address + 4 * MIB - 1, 1, &row), TMS_OK);
    assert_int_equal(row.address, address);
    assert_int_equal(row.bytes, 3 * MIB);
    assert_int_equal(row.reserved_bytes, 4 * MIB);
    assert_int_equal(row.state, TMS_SEGMENT_ACTIVE);
    assert_string_equal(row.tag, "weights");
    assert_int_equal(tms_inspect_find(&f->saver, address + 4 * MIB, UINT64_MAX, &row), TMS_NOT_MANAGED);
    assert_int_equal(tms_inspect_find(&f->saver, address - MIB, MIB, &row), TMS_NOT_MANAGED);
    assert_int_equal(tms_inspect_find(&f->saver, address - MIB, MIB + 1, &row), TMS_OK);
    assert_int_equal(tms_free_address(&f->saver, address, NULL), TMS_OK);
    assert_int_equal(physical_bytes(0), 0);
    assert_false(is_managed(f, address));
}

static void a_malformed_limit_stops_the_first_use(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = 77;
    tms_error_set(&f->config.malformed, TMS_INVALID_ARGUMENT, NULL, "TMS_HOST_MEMORY_LIMIT_MB='abc' is not a limit");
    assert_int_equal(try_allocate(f, MIB, 0, &address, &error), TMS_INVALID_ARGUMENT);
    assert_non_null(strstr(error.message, "TMS_HOST_MEMORY_LIMIT_MB='abc'"));
    assert_int_equal(address, 77);
    assert_int_equal(pause_all(f, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(resume_all(f, &error), TMS_INVALID_ARGUMENT);
    assert_non_null(strstr(error.message, "TMS_HOST_MEMORY_LIMIT_MB='abc'"));
    assert_int_equal(resume_all(f, NULL), TMS_INVALID_ARGUMENT);
    assert_int_equal(simulator()->calls("cuMemCreate"), 0);
    ASSERT_OK(tms_peers_refresh(&f->saver, &error), error); /* what needs no host memory continues */
    tms_error_clear(&f->config.malformed);
}

static void an_allocation_makes_only_the_calls_it_needs(void **state) {
    fixture_t *f = *state;
    char trace[512];
    /* The first one makes the shared page, which names the devices. */
    assert_int_equal(tms_free_address(&f->saver, allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), NULL), TMS_OK);
    simulator()->trace(ON);
    simulator()->clear_counts();
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->read_trace(trace, sizeof trace);
    simulator()->trace(OFF);
    assert_string_equal(trace, "cuMemAddressReserve\ncuMemCreate\ncuMemMap\ncuMemSetAccess");
    assert_int_equal(tms_free_address(&f->saver, address, NULL), TMS_OK);
}

static void sizes_behave_as_with_cudamalloc(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = 77;
    assert_int_equal(try_allocate(f, 0, 0, &address, &error), TMS_OK);
    assert_int_equal(address, 0);
    const uint64_t absurd[] = {257 * MIB, (uint64_t)1 << 50, UINT64_MAX - 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++) {
        address = 77;
        assert_int_equal(try_allocate(f, absurd[i], 0, &address, &error), TMS_OUT_OF_DEVICE_MEMORY);
        assert_int_equal(address, 77); /* out-parameters are written on success only */
        assert_int_equal(error.bytes, absurd[i]);
        assert_int_equal(error.device, 0);
    }
    assert_int_equal(simulator()->calls("cuMemCreate"), 0);
    assert_int_equal(try_allocate(f, MIB, 5, &address, &error), TMS_INVALID_ARGUMENT);
}

static void out_of_memory_leaves_nothing_behind(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = 0;
    uint64_t held = allocate(f, "a", TMS_BACKUP_NONE, 200 * MIB);
    assert_int_equal(try_allocate(f, 100 * MIB, 0, &address, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(error.call, "cuMemCreate");
    assert_string_equal(error.result_name, "CUDA_ERROR_OUT_OF_MEMORY");
    tms_sim_usage_t usage;
    simulator()->usage(0, &usage);
    assert_int_equal(usage.reservations, 1);
    assert_int_equal(usage.handles, 1);
    assert_int_equal(tms_free_address(&f->saver, held, NULL), TMS_OK);
    ASSERT_OK(try_allocate(f, 100 * MIB, 0, &address, &error), error);
}

static void every_call_of_an_allocation_may_fail(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        tms_sim_usage_t usage;
        uint64_t address = 0, fired = simulator()->failures_fired();
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(try_allocate(f, 2 * MIB, 0, &address, &error), TMS_DRIVER);
        assert_int_equal(simulator()->failures_fired(), fired + 1);
        assert_string_equal(error.call, calls[i]);
        assert_non_null(strstr(error.message, "CUDA_ERROR_UNKNOWN"));
        simulator()->usage(0, &usage);
        assert_int_equal(usage.handles, 0);
        assert_int_equal(usage.mappings, 0);
        assert_int_equal(usage.reservations, 0);
    }
}

static void the_margin_stays_free(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = 0;
    atomic_store(&f->saver.memory_margin_bytes, 100 * MIB);
    assert_int_equal(try_allocate(f, 158 * MIB, 0, &address, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_non_null(strstr(error.message, "memory_margin_bytes"));
    ASSERT_OK(try_allocate(f, 156 * MIB, 0, &address, &error), error);
}

static void foreign_interior_and_freed_addresses_are_distinguished(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    int local = 0;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_free_address(&f->saver, (uint64_t)&local, &error), TMS_NOT_MANAGED);
    assert_int_equal(tms_free_address(&f->saver, address + 256, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_NOT_MANAGED);
}

static void a_free_waits_for_work_in_flight(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_error_context_t context = {.operation = "test", .device = 0};
    CUstream stream = NULL;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    assert_int_equal(f->cuda->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    assert_int_equal(simulator()->launch_add(stream, address, 2 * MIB, 1, 0), CUDA_SUCCESS);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 1);
    /* If the memory had been released under the work, the context would have a sticky error now. */
    assert_int_equal(f->cuda->cuStreamSynchronize(stream), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuStreamDestroy(stream), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
}

static void a_free_during_a_capture_is_deferred(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->clear_counts();
    ASSERT_OK(tms_capture_table_begin(&f->saver, NULL, NULL, &error), error);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    assert_int_equal(physical_bytes(0), 2 * MIB);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.deferred_frees, 1);
    assert_int_equal(counters.allocations, 0);
    (void)tms_capture_end_of(&f->saver, 0);
    assert_int_equal(physical_bytes(0), 0);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.deferred_frees, 0);
}

static void a_capture_lends_its_settings_to_threads_outside_regions(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_region_settings_t settings = {.managed = 1, .backup = TMS_BACKUP_MMAP, .tag = "cuda_graph"};
    tms_region_t region;
    uint64_t level = 0;
    ASSERT_OK(tms_region_from_settings(&f->regions, &settings, &region, &error), error);
    ASSERT_OK(tms_capture_table_begin(&f->saver, &region, NULL, &error), error);
    assert_string_equal(tms_saver_settings(&f->saver).tag->name, "cuda_graph");
    settings.tag = "inner";
    ASSERT_OK(tms_region_enter(&f->regions, &settings, false, &level, &error), error);
    assert_string_equal(tms_saver_settings(&f->saver).tag->name, "inner");
    assert_int_equal(tms_region_leave(&f->regions, level), 0);
    (void)tms_capture_end_of(&f->saver, 0);
    assert_string_equal(tms_saver_settings(&f->saver).tag->name, TMS_DEFAULT_TAG);
}

static void a_lost_device_does_not_stop_a_free(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->lose_device(0, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_false(is_managed(f, address));
}

static void one_device_of_two_costs_nothing_for_the_other(void **state) {
    fixture_t *f = *state;
    tms_segment_info_t row;
    uint64_t address = allocate_on(f, 0, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_inspect_find(&f->saver, address, 1, &row), TMS_OK);
    assert_int_equal(simulator()->calls("cuMemSetAccess"), 1);
    assert_int_equal(simulator()->calls("cuDeviceCanAccessPeer"), 0);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address))), 1);
}

static void a_second_device_gets_access_when_it_comes_into_use(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_error_context_t context = {.operation = "test", .device = 1};
    uint64_t before = allocate_on(f, 0, "a", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &context, &error), error);
    tms_devices_leave(&f->devices, 1);
    uint64_t after = allocate_on(f, 1, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, before))), 3);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, after))), 3);
    simulator()->clear_counts();
    ASSERT_OK(tms_peers_refresh(&f->saver, &error), error);
    assert_int_equal(simulator()->calls("cuMemSetAccess"), 0); /* nothing is new */
}

static void a_segment_that_cannot_be_shared_does_not_stop_the_others(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_error_context_t context = {.operation = "test", .device = 1};
    uint64_t address[3];
    for (int i = 0; i < 3; i++) address[i] = allocate_on(f, 0, "a", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &context, &error), error);
    tms_devices_leave(&f->devices, 1);
    simulator()->fail_after("cuMemSetAccess", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_peers_refresh(&f->saver, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemSetAccess");
    assert_int_equal(error.address, address[1]);
    for (int i = 0; i < 3; i++)
        assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address[i]))),
                         i == 1 ? 1 : 3);
    ASSERT_OK(tms_peers_refresh(&f->saver, &error), error); /* and the next call retries it */
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address[1]))), 3);
}

static void a_forked_child_may_not_allocate_and_may_free(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t other = 0, address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    atomic_store(&f->saver.forked, true); /* what process.c does in the child */
    assert_int_equal(try_allocate(f, MIB, 0, &other, &error), TMS_FORKED);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    atomic_store(&f->saver.forked, false);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE); /* the parent's memory is unchanged */
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(an_allocation_is_fresh_writable_memory),
        ONE(a_malformed_limit_stops_the_first_use),
        ONE(an_allocation_makes_only_the_calls_it_needs),
        ONE(sizes_behave_as_with_cudamalloc),
        ONE(out_of_memory_leaves_nothing_behind),
        ONE(every_call_of_an_allocation_may_fail),
        ONE(the_margin_stays_free),
        ONE(foreign_interior_and_freed_addresses_are_distinguished),
        ONE(a_free_waits_for_work_in_flight),
        ONE(a_free_during_a_capture_is_deferred),
        ONE(a_capture_lends_its_settings_to_threads_outside_regions),
        ONE(a_lost_device_does_not_stop_a_free),
        TWO(one_device_of_two_costs_nothing_for_the_other),
        TWO(a_second_device_gets_access_when_it_comes_into_use),
        TWO(a_segment_that_cannot_be_shared_does_not_stop_the_others),
        ONE(a_forked_child_may_not_allocate_and_may_free),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
