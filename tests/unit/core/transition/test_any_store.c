/* Guards the core's interface to stores: transitions with the tests' own store (heap_store.h), which fails in each of its
 * operations. The neighbouring tests run their common cases with this store as well. */

#include "support.h"

#include <string.h>

#define BYTES (4 * MIB)

static uint64_t allocate_filled(fixture_t *f, const char *tag, tms_backup_kind_t kind, uint32_t seed) {
    uint64_t address = allocate(f, tag, kind, BYTES);
    fill(address, BYTES, seed);
    return address;
}

/* Asserts that a call left nothing: `blocks` are those of paused segments. */
static void assert_at_rest(fixture_t *f, int blocks) {
    assert_int_equal(atomic_load(&f->heap.batches), 0);
    assert_int_equal(atomic_load(&f->heap.relays), 0);
    assert_int_equal(atomic_load(&f->heap.blocks), blocks);
    assert_int_equal(atomic_load(&f->heap.fail_in[HEAP_WAIT]), 0); /* every injected failure has occurred */
    assert_nothing_waits(&f->saver);
}

static void every_operation_of_a_pause_may_fail(void **state) {
    fixture_t *f = *state;
    const heap_failure_t points[] = {HEAP_BEGIN, HEAP_PLAN, HEAP_START, HEAP_SAVE, HEAP_SAVED, HEAP_WAIT};
    /* The stores before and after it in the list are undone with it. */
    uint64_t others[] = {allocate_filled(f, "a", TMS_BACKUP_PINNED, 1), allocate_filled(f, "a", TMS_BACKUP_DISK, 2)};
    const uint64_t own[] = {allocate_filled(f, "a", HEAP_BACKUP, 3), allocate_filled(f, "a", HEAP_BACKUP, 4)};
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        for (int call = 1; call <= (points[i] == HEAP_PLAN || points[i] == HEAP_SAVE || points[i] == HEAP_SAVED ? 2 : 1);
             call++) {
            tms_error_t error;
            atomic_store(&f->heap.fail_in[points[i]], call);
            simulator()->clear_counts();
            assert_int_equal(pause_all(f, &error), TMS_BACKUP_IO);
            assert_non_null(strstr(error.message, "made to fail"));
            assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
            assert_int_equal(atomic_load(&f->heap.fail_in[points[i]]), 0);
            tms_host_store_settle(&f->saver.stores.host);
            assert_at_rest(f, 0);
            assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes), 0);
            assert_int_equal(atomic_load(&f->saver.stores.disk.total), 0);
            for (uint32_t k = 0; k < 2; k++) {
                assert_int_equal(state_of(f, others[k]), TMS_SEGMENT_ACTIVE);
                assert_int_equal(state_of(f, own[k]), TMS_SEGMENT_ACTIVE);
                assert_filled(others[k], BYTES, 1 + k);
                assert_filled(own[k], BYTES, 3 + k);
            }
        }
        tms_error_t error; /* and the same call can be repeated */
        tms_report_t report;
        ASSERT_OK(pause_with_report(f, ALL_TAGS, &report, &error), error);
        assert_int_equal(report.copied_bytes, 4 * BYTES);
        assert_at_rest(f, 2);
        ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
        assert_int_equal(report.copied_bytes, 4 * BYTES);
        for (uint32_t k = 0; k < 2; k++) assert_filled(others[k], BYTES, 1 + k);
        for (uint32_t k = 0; k < 2; k++) assert_filled(own[k], BYTES, 3 + k);
        assert_int_equal(tms_free_address(&f->saver, others[1], &error), TMS_OK); /* and its file, which would stay */
        others[1] = allocate_filled(f, "a", TMS_BACKUP_DISK, 2);
    }
}

static void every_operation_of_a_resume_may_fail(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const heap_failure_t points[] = {HEAP_LOAD, HEAP_LOADED, HEAP_WAIT};
    const uint64_t addresses[] = {allocate_filled(f, "a", HEAP_BACKUP, 1), allocate_filled(f, "a", TMS_BACKUP_PINNED, 2),
                                  allocate_filled(f, "a", HEAP_BACKUP, 3), allocate_filled(f, "a", TMS_BACKUP_DISK, 4)};
    ASSERT_OK(pause_all(f, &error), error);
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        atomic_store(&f->heap.fail_in[points[i]], 1);
        assert_int_equal(resume_all(f, &error), TMS_BACKUP_IO);
        assert_at_rest(f, 2); /* every backup is as before */
        assert_int_equal(physical_bytes(0), 0);
        for (int k = 0; k < 4; k++) assert_int_equal(state_of(f, addresses[k]), TMS_SEGMENT_PAUSED);
    }
    ASSERT_OK(resume_all(f, &error), error);
    for (uint32_t k = 0; k < 4; k++) assert_filled(addresses[k], BYTES, 1 + k);
    assert_at_rest(f, 0);
}

/* Whatever the store fails to release, at any point, is quarantined and retried. */
static void resources_that_a_store_cannot_release_are_quarantined(void **state) {
    fixture_t *f = *state;
    for (int end = 0; end < 4; end++) {
        tms_error_t error;
        tms_counters_t counters;
        uint64_t address = allocate_filled(f, "a", HEAP_BACKUP, 1);
        tms_selection_t to_host = {.has_backup = 1, .backup = TMS_BACKUP_PINNED};
        atomic_store(&f->heap.fail_in[HEAP_GIVE_BACK], 1);
        if (end == 0) { /* cancel */
            atomic_store(&f->heap.fail_in[HEAP_START], 1);
            assert_int_equal(pause_all(f, &error), TMS_BACKUP_IO);
        } else {
            if (end == 3) atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
            ASSERT_OK(pause_all(f, &error), error);
            if (end != 2) ASSERT_OK(resume_all(f, &error), error); /* discard, unless it is retained */
            if (end == 2) assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK); /* destroy */
            if (end == 3) ASSERT_OK(pause_selected(f, &to_host, &error), error);                  /* commit */
        }
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.quarantined_other, 1);
        assert_int_equal(atomic_load(&f->heap.blocks), 1);
        tms_reclaim_all(&f->saver);
        assert_at_rest(f, 0);
        atomic_store(&f->saver.host_policy, TMS_HOST_RELEASE);
        if (end == 3) ASSERT_OK(resume_all(f, &error), error);
        if (end != 2) assert_filled(address, BYTES, 1);
        if (end != 2) assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

static void a_free_of_paused_memory_releases_its_backup(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t first = allocate_filled(f, "a", HEAP_BACKUP, 1), second = allocate_filled(f, "a", HEAP_BACKUP, 2);
    ASSERT_OK(pause_all(f, &error), error);
    assert_at_rest(f, 2);
    assert_int_equal(tms_free_address(&f->saver, first, &error), TMS_OK);
    assert_at_rest(f, 1);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(second, BYTES, 2);
    assert_at_rest(f, 0);
}

static void a_free_during_a_pause_is_carried_out_at_its_end(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    held_pause_t held;
    uint64_t freed = allocate_filled(f, "a", HEAP_BACKUP, 1), kept = allocate_filled(f, "a", HEAP_BACKUP, 2);
    uint64_t busy = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, 1, busy);
    begin_pause(&held, f, "a");
    assert_int_equal(tms_free_address(&f->saver, freed, &error), TMS_OK);
    simulator()->open_gate(1);
    join_pause(&held);
    assert_at_rest(f, 1);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(kept, BYTES, 2);
    destroy_stream(f, stream);
}

/* A pause that fails before its first copy keeps retained contents; one that has begun to overwrite them does not. */
static void a_failed_pause_with_retained_backups(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate_filled(f, "a", HEAP_BACKUP, 1);
    tms_backup_t *backup = &tms_segment_of(tms_registry_find(&f->saver.registry, address))->backup;
    atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    const char *copy = tms_backup_find(backup, &f->saver.stores, 0, BYTES, NULL);
    assert_filled((uint64_t)copy, BYTES, 1);
    fill(address, BYTES, 2);
    atomic_store(&f->heap.fail_in[HEAP_SAVE], 1);
    assert_int_equal(pause_all(f, &error), TMS_BACKUP_IO);
    assert_ptr_equal(tms_backup_find(backup, &f->saver.stores, 0, BYTES, NULL), copy);
    assert_filled((uint64_t)copy, BYTES, 1);
    atomic_store(&f->heap.fail_in[HEAP_SAVED], 1);
    assert_int_equal(pause_all(f, &error), TMS_BACKUP_IO);
    assert_null(tms_backup_find(backup, &f->saver.stores, 0, BYTES, NULL));
    ASSERT_OK(pause_all(f, &error), error);
    assert_ptr_equal(tms_backup_find(backup, &f->saver.stores, 0, BYTES, NULL), copy); /* at its address */
    atomic_store(&f->heap.fail_in[HEAP_FIND], 1);
    assert_null(tms_backup_find(backup, &f->saver.stores, 0, BYTES, NULL));
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, BYTES, 2);
    atomic_store(&f->saver.host_policy, TMS_HOST_RELEASE);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(every_operation_of_a_pause_may_fail),
        ONE(every_operation_of_a_resume_may_fail),
        ONE(resources_that_a_store_cannot_release_are_quarantined),
        ONE(a_free_of_paused_memory_releases_its_backup),
        ONE(a_free_during_a_pause_is_carried_out_at_its_end),
        ONE(a_failed_pause_with_retained_backups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
