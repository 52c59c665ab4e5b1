/* Guards the bookkeeping of runs (model/run.c, model/kinds.c, allocation/free.c): what a free leaves, who gets slack, when
 * memory goes, and who releases it where a call owns the run. */

#include "neighbours.h"

#include <string.h>

#include "core/model/export.h"

static uint64_t calls_of_memory(void) {
    static const char *const calls[] = {"cuMemCreate",     "cuMemMap",     "cuMemSetAccess",
                                        "cuMemUnmap",      "cuMemRelease", "cuMemAddressReserve",
                                        "cuMemAddressFree"};
    uint64_t count = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) count += simulator()->calls(calls[i]);
    return count;
}

static void a_free_in_a_run_leaves_slack(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    tms_counters_t counters;
    tms_usage_info_t rows[2];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    simulator()->clear_counts();
    free_at(f, at[1]);
    assert_int_equal(calls_of_memory(), 0);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 1); /* no allocation gets the memory before that */
    assert_int_equal(physical_bytes(0), NEIGHBOURS * NEIGHBOUR_BYTES);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.slack_bytes, NEIGHBOUR_BYTES);
    assert_int_equal(counters.resident_bytes, (NEIGHBOURS - 1) * NEIGHBOUR_BYTES);
    assert_int_equal(tms_inspect_usage(&f->saver, NULL, TMS_NO_DEVICE, rows, 2), 2);
    assert_int_equal(rows[0].slack_bytes, NEIGHBOUR_BYTES);
    assert_int_equal(rows[1].slack_bytes, NEIGHBOUR_BYTES);
    assert_int_equal(rows[0].resident_bytes, (NEIGHBOURS - 1) * NEIGHBOUR_BYTES);
    assert_filled(at[0], NEIGHBOUR_BYTES, 0);
    assert_filled(at[2], NEIGHBOUR_BYTES, 2);
}

static void slack_is_handed_out_without_a_driver_call(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    free_at(f, at[2]);
    assert_int_equal(slack_bytes(f), 2 * NEIGHBOUR_BYTES);
    simulator()->clear_counts();
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES / 2), at[1]);
    assert_int_equal(calls_of_memory(), 0);
    assert_int_equal(slack_bytes(f), NEIGHBOUR_BYTES);
    fill(at[1], NEIGHBOUR_BYTES, 11);
    /* Not for another kind: tag, backup, size. */
    assert_true(allocate(f, "b", TMS_BACKUP_NONE, NEIGHBOUR_BYTES) != at[2]);
    assert_true(allocate(f, "a", TMS_BACKUP_PINNED, NEIGHBOUR_BYTES) != at[2]);
    assert_true(allocate(f, "a", TMS_BACKUP_NONE, 2 * NEIGHBOUR_BYTES) != at[2]);
    assert_int_equal(simulator()->calls("cuMemCreate"), 3);
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[2]);
    assert_int_equal(slack_bytes(f), 0);
    assert_filled(at[1], NEIGHBOUR_BYTES, 11);
    assert_filled(at[0], NEIGHBOUR_BYTES, 0);
}

static void an_allocation_with_a_handle_of_its_own_gets_no_slack(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS], address = 0;
    tms_error_t error;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    tms_region_t region = {.tag = tms_tag_find(&f->regions.tags, "a"), .managed = true, .own_handles = true};
    ASSERT_OK(tms_allocation_create(&f->saver, &region, NEIGHBOUR_BYTES, 0, &address, &error), error);
    assert_true(address != at[1]);
    assert_int_equal(slack_bytes(f), NEIGHBOUR_BYTES);
}

static void slack_needs_no_free_memory(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[3]);
    atomic_store(&f->saver.memory_margin_bytes, GIB); /* more than the device has */
    simulator()->clear_counts();
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[3]);
    assert_int_equal(simulator()->calls("cuMemGetInfo"), 0);
}

static void a_run_goes_with_its_last_segment(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    for (int i = 0; i + 1 < NEIGHBOURS; i++) free_at(f, at[i]);
    assert_int_equal(physical_bytes(0), NEIGHBOURS * NEIGHBOUR_BYTES);
    simulator()->clear_counts();
    free_at(f, at[NEIGHBOURS - 1]);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    assert_int_equal(simulator()->calls("cuMemRelease"), 1);
    assert_int_equal(simulator()->calls("cuMemAddressFree"), 1);
    assert_int_equal(physical_bytes(0), 0);
    assert_int_equal(slack_bytes(f), 0);
}

static void a_pause_takes_slack_and_its_addresses_are_used_again(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_PINNED, at);
    free_at(f, at[1]);
    ASSERT_OK(pause_with_report(f, "a", &report, &error), error);
    assert_int_equal(report.bytes, (NEIGHBOURS - 1) * NEIGHBOUR_BYTES);
    assert_int_equal(physical_bytes(0), 0);
    assert_int_equal(slack_bytes(f), 0);
    simulator()->clear_counts();
    assert_int_equal(allocate(f, "a", TMS_BACKUP_PINNED, NEIGHBOUR_BYTES), at[1]);
    assert_int_equal(simulator()->calls("cuMemAddressReserve"), 0);
    assert_int_equal(simulator()->calls("cuMemCreate"), 1);
    ASSERT_OK(resume_tag(f, "a", &error), error);
    assert_filled(at[0], NEIGHBOUR_BYTES, 0);
    assert_filled(at[2], NEIGHBOUR_BYTES, 2);
    assert_filled(at[3], NEIGHBOUR_BYTES, 3);
}

/* The kernel runs until the gate opens; the free waits for it, so the next allocation finds the memory at rest. */
static void *open_when_synchronizing(void *gate) {
    simulator()->wait_until_synchronizing();
    simulator()->open_gate(*(int *)gate);
    return NULL;
}

static void slack_is_at_rest(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    int gate = 1;
    pthread_t opener;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    CUstream stream = launch_behind_gate(f, gate, at[1]); /* adds 1 to what is there */
    assert_int_equal(pthread_create(&opener, NULL, open_when_synchronizing, &gate), 0);
    free_at(f, at[1]);
    pthread_join(opener, NULL);
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[1]);
    fill(at[1], NEIGHBOUR_BYTES, 5);
    destroy_stream(f, stream);
    assert_filled(at[1], NEIGHBOUR_BYTES, 5);
}

static void memory_freed_during_a_capture_is_no_slack_before_its_end(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS], identity = 0;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    ASSERT_OK(tms_capture_table_begin(&f->saver, NULL, &identity, &error), error);
    free_at(f, at[1]);
    assert_int_equal(slack_bytes(f), 0);
    assert_true(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES) != at[1]);
    assert_true(tms_capture_end_of(&f->saver, identity));
    assert_int_equal(slack_bytes(f), NEIGHBOUR_BYTES);
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[1]);
}

/* ---- runs that a call owns ---- */

typedef struct meanwhile {
    fixture_t *fixture;
    uint64_t freed, asked, got;
    bool done;
} meanwhile_t;

/* As find_live, which a pause calls while it owns the segments. */
static int32_t free_meanwhile(void *context, tms_live_t *live) {
    meanwhile_t *meanwhile = context;
    (void)live;
    meanwhile->done = true;
    free_at(meanwhile->fixture, meanwhile->freed);
    meanwhile->got = allocate(meanwhile->fixture, "a", TMS_BACKUP_PINNED, NEIGHBOUR_BYTES);
    return 1; /* what is live is not known */
}

static void slack_of_an_owned_run_is_not_handed_out(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_PINNED, at);
    free_at(f, at[0]); /* slack before the pause begins */
    meanwhile_t meanwhile = {.fixture = f, .freed = at[1]};
    const tms_selection_t selection = {.find_live = free_meanwhile, .live_context = &meanwhile};
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_true(meanwhile.done);
    assert_true(meanwhile.got < at[0] || meanwhile.got > at[3]);
    fill(meanwhile.got, NEIGHBOUR_BYTES, 9);
    assert_int_equal(slack_bytes(f), 0);
    assert_int_equal(physical_bytes(0), NEIGHBOUR_BYTES);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(meanwhile.got, NEIGHBOUR_BYTES, 9);
    assert_filled(at[2], NEIGHBOUR_BYTES, 2);
    assert_filled(at[3], NEIGHBOUR_BYTES, 3);
}

static int32_t reclaim_meanwhile(void *context, tms_live_t *live) {
    meanwhile_t *meanwhile = context;
    (void)live;
    meanwhile->done = true;
    const uint64_t waits = simulator()->calls("cuCtxSynchronize");
    tms_reclaim_all(&meanwhile->fixture->saver);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), waits); /* the owner has waited */
    return 1;
}

/* A free whose end comes while a call owns the run: the call carries it out, whether it succeeds or not. */
static void the_owner_of_a_run_ends_frees(void **state) {
    fixture_t *f = *state;
    for (uint64_t fails = 0; fails < 2; fails++) {
        tms_error_t error;
        tms_counters_t counters;
        uint64_t at[NEIGHBOURS];
        make_run(f, "a", TMS_BACKUP_PINNED, at);
        /* Two frees, and their retries at the begin of the pause. */
        simulator()->fail_after("cuCtxSynchronize", 0, 4, CUDA_ERROR_UNKNOWN);
        free_at(f, at[1]);
        free_at(f, at[3]);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.deferred_frees, 2);
        meanwhile_t meanwhile = {.fixture = f};
        const tms_selection_t selection = {.find_live = reclaim_meanwhile, .live_context = &meanwhile};
        if (fails) simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_selected(f, &selection, &error), fails ? TMS_DRIVER : TMS_OK);
        assert_true(meanwhile.done);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.deferred_frees, 0);
        assert_int_equal(slack_bytes(f), fails ? 2 * NEIGHBOUR_BYTES : 0);
        assert_int_equal(physical_bytes(0), fails ? NEIGHBOURS * NEIGHBOUR_BYTES : 0);
        ASSERT_OK(resume_all(f, &error), error);
        assert_filled(at[2], NEIGHBOUR_BYTES, 2);
        free_at(f, at[0]);
        free_at(f, at[2]);
        assert_int_equal(physical_bytes(0), 0);
    }
}

/* ---- failures ---- */

static void a_run_that_is_not_released_is_quarantined_once(void **state) {
    fixture_t *f = *state;
    static const char *const calls[] = {"cuMemUnmap", "cuMemRelease"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_counters_t counters;
        uint64_t at[NEIGHBOURS];
        make_run(f, "a", TMS_BACKUP_NONE, at);
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        for (int k = 0; k < NEIGHBOURS; k++) free_at(f, at[k]);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.quarantined_handles, 1);
        assert_int_equal(counters.slack_bytes, 0);
        assert_int_equal(physical_bytes(0), NEIGHBOURS * NEIGHBOUR_BYTES);
        uint64_t next = allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
        if (i == 0) assert_true(next < at[0] || next > at[NEIGHBOURS - 1]); /* something is mapped there */
        tms_reclaim_all(&f->saver);
        assert_nothing_waits(&f->saver);
        assert_int_equal(physical_bytes(0), NEIGHBOUR_BYTES);
        free_at(f, next);
    }
}

/* What it has released by itself is not released again. */
static void a_driver_that_has_shut_down_leaves_no_run_to_release(void **state) {
    fixture_t *f = *state;
    tms_counters_t counters;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    const CUmemGenericAllocationHandle handle = run_at(f, address)->handle;
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_DEINITIALIZED);
    simulator()->fail_after("cuMemAddressFree", 0, 1, CUDA_ERROR_DEINITIALIZED);
    free_at(f, address);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.quarantined_handles, 0);
    assert_int_equal(counters.quarantined_ranges, 0);
    /* The simulated driver goes on, and has released nothing. */
    assert_int_equal(f->cuda->cuMemUnmap(address, NEIGHBOUR_BYTES), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemRelease(handle), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemAddressFree(address, NEIGHBOUR_BYTES), CUDA_SUCCESS);
}

static void damage_is_of_a_run_and_so_is_its_repair(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_PINNED, at);
    free_at(f, at[0]);
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    simulator()->clear_counts();
    assert_int_equal(pause_tag(f, "a", &error), TMS_DRIVER);
    assert_non_null(strstr(error.message, "3 allocations (6.0 MiB) could not be released"));
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    for (int i = 1; i < NEIGHBOURS; i++) assert_int_equal(state_of(f, at[i]), TMS_SEGMENT_DAMAGED);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.damaged, 3);
    assert_int_equal(counters.quarantined_handles, 1);
    assert_int_equal(counters.slack_bytes, NEIGHBOUR_BYTES); /* it is still mapped */
    assert_true(allocate(f, "a", TMS_BACKUP_PINNED, NEIGHBOUR_BYTES) != at[0]);
    free_at(f, at[1]); /* of a damaged run */
    assert_int_equal(slack_bytes(f), 2 * NEIGHBOUR_BYTES);
    assert_true(allocate(f, "a", TMS_BACKUP_PINNED, NEIGHBOUR_BYTES) != at[1]);
    tms_reclaim_all(&f->saver); /* refused again */
    assert_int_equal(simulator()->calls("cuMemUnmap"), 2);
    assert_int_equal(state_of(f, at[2]), TMS_SEGMENT_DAMAGED);
    tms_reclaim_all(&f->saver);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 3);
    assert_int_equal(state_of(f, at[2]), TMS_SEGMENT_PAUSED);
    assert_int_equal(state_of(f, at[3]), TMS_SEGMENT_PAUSED);
    assert_int_equal(slack_bytes(f), 0);
    assert_nothing_waits(&f->saver);
    ASSERT_OK(resume_tag(f, "a", &error), error);
    assert_filled(at[2], NEIGHBOUR_BYTES, 2);
    assert_filled(at[3], NEIGHBOUR_BYTES, 3);
}

/* ---- devices and processes ---- */

static void use_device_1(fixture_t *f) {
    tms_error_t error;
    const tms_error_context_t context = {.operation = "test", .device = 1};
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &context, &error), error);
    tms_devices_leave(&f->devices, 1);
}

static void slack_gets_the_access_of_an_allocation_of_its_own(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    use_device_1(f);
    simulator()->clear_counts();
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[1]);
    assert_int_equal(simulator()->calls("cuMemSetAccess"), 1);
    assert_int_equal(run_at(f, at[1])->accessible, 3);
}

/* Frees every segment of a run, and leaves the first one's memory as slack while the others still wait for their device. */
static void free_all_but_leave_slack(fixture_t *f, const uint64_t *at) {
    tms_error_t error;
    simulator()->fail_after("cuCtxSynchronize", 0, NEIGHBOURS, CUDA_ERROR_UNKNOWN);
    for (int i = 0; i < NEIGHBOURS; i++) free_at(f, at[i]);
    ASSERT_OK(tms_peers_refresh(&f->saver, &error), error); /* a scan of no segment */
    simulator()->fail_after("cuCtxSynchronize", 1, NEIGHBOURS - 1, CUDA_ERROR_UNKNOWN);
    tms_reclaim_all(&f->saver);
    assert_int_equal(slack_bytes(f), NEIGHBOUR_BYTES);
}

static void slack_of_a_run_that_a_look_did_not_find_gets_access(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    use_device_1(f);
    free_all_but_leave_slack(f, at);
    uint64_t reused = allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    assert_true(reused >= at[0] && reused <= at[NEIGHBOURS - 1]);
    assert_int_equal(run_at(f, reused)->accessible, 3);
}

static CUresult reach_nothing(int *can, CUdevice device, CUdevice peer) {
    (void)device;
    (void)peer;
    *can = 0;
    return CUDA_SUCCESS;
}

static void slack_needs_no_scan_for_a_device_that_cannot_reach_it(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    writable(f)->cuDeviceCanAccessPeer = reach_nothing;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    use_device_1(f);
    uint64_t other = allocate(f, "b", TMS_BACKUP_NONE, NEIGHBOUR_BYTES); /* the scan */
    free_at(f, at[1]);
    const uint64_t scans = f->saver.marks;
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[1]);
    assert_int_equal(f->saver.marks, scans);
    assert_int_equal(run_at(f, at[1])->accessible, 1);
    free_at(f, other);
}

static void a_look_gives_access_to_a_run_once(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    CUcontext context;
    assert_int_equal(f->cuda->cuDevicePrimaryCtxRetain(&context, 1), CUDA_SUCCESS);
    simulator()->clear_counts();
    ASSERT_OK(tms_peers_refresh(&f->saver, &error), error);
    assert_int_equal(simulator()->calls("cuMemSetAccess"), 1);
    assert_int_equal(run_at(f, at[0])->accessible, 3);
    /* Slack comes with the access of its run. */
    free_at(f, at[1]);
    simulator()->clear_counts();
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[1]);
    assert_int_equal(simulator()->calls("cuMemSetAccess"), 0);
    assert_int_equal(f->cuda->cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

static void a_description_is_of_a_run(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_export_t one, other;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    simulator()->clear_counts();
    ASSERT_OK(tms_export_memory(&f->saver, at[1], &one, &error), error);
    ASSERT_OK(tms_export_memory(&f->saver, at[2] + MIB, &other, &error), error);
    assert_int_equal(simulator()->calls("cuMemExportToShareableHandle"), 1);
    assert_int_equal(one.address, at[0]);
    assert_int_equal(one.bytes, NEIGHBOURS * NEIGHBOUR_BYTES);
    assert_int_equal(one.generation, other.generation);
    assert_int_equal(one.descriptor, other.descriptor);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_free_in_a_run_leaves_slack, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(slack_is_handed_out_without_a_driver_call, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(an_allocation_with_a_handle_of_its_own_gets_no_slack, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(slack_needs_no_free_memory, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_run_goes_with_its_last_segment, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_pause_takes_slack_and_its_addresses_are_used_again, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(slack_is_at_rest, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(memory_freed_during_a_capture_is_no_slack_before_its_end, setup_one_device,
                                        teardown),
        cmocka_unit_test_setup_teardown(slack_of_an_owned_run_is_not_handed_out, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(the_owner_of_a_run_ends_frees, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_run_that_is_not_released_is_quarantined_once, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_driver_that_has_shut_down_leaves_no_run_to_release, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(damage_is_of_a_run_and_so_is_its_repair, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_look_gives_access_to_a_run_once, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(a_description_is_of_a_run, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(slack_gets_the_access_of_an_allocation_of_its_own, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(slack_of_a_run_that_a_look_did_not_find_gets_access, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(slack_needs_no_scan_for_a_device_that_cannot_reach_it, setup_two_devices, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
