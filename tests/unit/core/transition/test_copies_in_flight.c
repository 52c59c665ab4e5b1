/* Guards copies that a failed call has left in flight and whose wait failed: the memory that they use is kept. */

#include "support.h"

#include "copies.h"
#include "temporary.h"

enum { STREAM_WAITS = 2, DEVICE_WAITS = 1 }; /* that a copier tries at its end */

#define BYTES (4 * MIB)

/* The first copy of the next call lasts until release_copies(); the second fails, and so do all waits for the first.
 */
static void leave_a_copy_in_flight(const char *copy, int result) {
    hold_copies();
    simulator()->fail_after(copy, 1, 1, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuStreamSynchronize", 0, STREAM_WAITS, result);
}

static uint64_t allocate_filled(fixture_t *f, tms_backup_kind_t kind, uint32_t seed) {
    uint64_t address = allocate(f, "a", kind, BYTES);
    fill(address, BYTES, seed);
    return address;
}

static void a_resume_keeps_the_targets_of_copies_in_flight_mapped(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t first = allocate_filled(f, TMS_BACKUP_PINNED, 1), second = allocate_filled(f, TMS_BACKUP_PINNED, 2);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuCtxSynchronize", 0, DEVICE_WAITS, CUDA_ERROR_UNKNOWN);
    leave_a_copy_in_flight("cuMemcpyHtoDAsync", CUDA_ERROR_UNKNOWN);
    simulator()->clear_counts();
    f->log.level = TMS_LOG_SILENT;
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemcpyHtoDAsync");
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    assert_int_equal(simulator()->calls("cuStreamDestroy"), 0);
    assert_int_equal(state_of(f, first), TMS_SEGMENT_DAMAGED);
    assert_int_equal(state_of(f, second), TMS_SEGMENT_DAMAGED);
    assert_int_equal(physical_bytes(0), 2 * BYTES);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.damaged, 2);
    assert_int_equal(counters.host_backup_bytes, 2 * BYTES); /* nothing is lost */
    assert_int_equal(counters.quarantined_other, 1);         /* the stream */
    release_copies();
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(first, BYTES, 1);
    assert_filled(second, BYTES, 2);
    assert_nothing_waits(&f->saver);
}

/* Only the device whose wait for copies failed. */
static void other_devices_are_undone(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t addresses[2];
    for (int device = 0; device < 2; device++) {
        addresses[device] = allocate_on(f, device, "a", TMS_BACKUP_PINNED, BYTES);
        fill(addresses[device], BYTES, (uint32_t)device);
    }
    uint64_t rest = allocate_on(f, 1, "a", TMS_BACKUP_NONE, BYTES);
    ASSERT_OK(pause_all(f, &error), error);
    f->log.level = TMS_LOG_SILENT;
    hold_copies();
    /* One device gets a copy, the other does not, and both would wait for their streams. Only one of these has work. */
    simulator()->fail_after("cuMemcpyHtoDAsync", 1, 1, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuStreamSynchronize", 0, 2 * STREAM_WAITS + 1, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuCtxSynchronize", 0, 2 * DEVICE_WAITS, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    /* The first device's failed wait may have ended the call before the second device copied: that failure is left. */
    simulator()->fail_after("cuMemcpyHtoDAsync", 0, 0, 0);
    simulator()->fail_after("cuStreamSynchronize", 0, 0, 0);
    simulator()->fail_after("cuCtxSynchronize", 0, 0, 0);
    int damaged = 0;
    for (int device = 0; device < 2; device++) {
        tms_segment_state_t found = state_of(f, addresses[device]);
        assert_true(found == TMS_SEGMENT_DAMAGED || found == TMS_SEGMENT_PAUSED);
        damaged += found == TMS_SEGMENT_DAMAGED;
        assert_int_equal(physical_bytes(device) > 0, found == TMS_SEGMENT_DAMAGED);
    }
    assert_true(damaged > 0);
    release_copies();
    ASSERT_OK(resume_all(f, &error), error);
    for (int device = 0; device < 2; device++) assert_filled(addresses[device], BYTES, (uint32_t)device);
    assert_int_equal(state_of(f, rest), TMS_SEGMENT_ACTIVE);
    assert_nothing_waits(&f->saver);
}

/* Waiting for the whole device would only break another thread's capture. */
static void waiting_for_copies_does_not_break_a_capture(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t first = allocate_filled(f, TMS_BACKUP_PINNED, 1), second = allocate_filled(f, TMS_BACKUP_PINNED, 2);
    ASSERT_OK(pause_all(f, &error), error);
    leave_a_copy_in_flight("cuMemcpyHtoDAsync", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    simulator()->clear_counts();
    f->log.level = TMS_LOG_SILENT;
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    release_copies();
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(first, BYTES, 1);
    assert_filled(second, BYTES, 2);
}

/* A lost device copies nothing any more. */
static void a_lost_device_is_undone(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t first = allocate_filled(f, TMS_BACKUP_PINNED, 1);
    allocate_filled(f, TMS_BACKUP_PINNED, 2);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemcpyHtoDAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuStreamSynchronize", 0, STREAM_WAITS, CUDA_ERROR_ILLEGAL_ADDRESS);
    simulator()->clear_counts();
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    assert_int_equal(simulator()->calls("cuStreamSynchronize"), 1);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    assert_int_equal(state_of(f, first), TMS_SEGMENT_PAUSED);
    simulator()->fail_after("cuStreamSynchronize", 0, 0, 0);
}

/* Memory that the device still writes to is neither released nor reused, under every policy. */
static void a_pause_keeps_host_memory_with_copies_in_flight(void **state) {
    static const tms_host_policy_t policies[] = {TMS_HOST_RELEASE, TMS_HOST_POOL};
    fixture_t *f = *state;
    f->log.level = TMS_LOG_SILENT;
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        tms_error_t error;
        tms_counters_t counters;
        atomic_store(&f->saver.host_policy, policies[i]);
        tms_host_store_set_pool_limit(&f->saver.stores.host, 8 * BYTES);
        uint64_t first = allocate_filled(f, TMS_BACKUP_PINNED, 1), second = allocate_filled(f, TMS_BACKUP_PINNED, 2);
        simulator()->fail_after("cuCtxSynchronize", 1, DEVICE_WAITS, CUDA_ERROR_UNKNOWN); /* after that of the pause */
        leave_a_copy_in_flight("cuMemcpyDtoHAsync", CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        assert_int_equal(state_of(f, first), TMS_SEGMENT_ACTIVE);
        assert_filled(second, BYTES, 2);
        tms_inspect_counters(&f->saver, &counters);
        assert_true(counters.host_backup_bytes >= BYTES);
        assert_int_equal(counters.host_pooled_bytes, 0);
        assert_int_equal(counters.quarantined_host, 1);
        assert_int_equal(counters.quarantined_other, 1);
        release_copies();
        tms_reclaim_all(&f->saver);
        assert_nothing_waits(&f->saver);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.host_backup_bytes, 0);
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_all(f, &error), error);
        assert_filled(first, BYTES, 1);
        assert_filled(second, BYTES, 2);
        assert_int_equal(tms_free_address(&f->saver, first, &error), TMS_OK);
        assert_int_equal(tms_free_address(&f->saver, second, &error), TMS_OK);
        tms_host_store_set_pool_limit(&f->saver.stores.host, 0);
        tms_host_store_settle(&f->saver.stores.host);
    }
}

/* The copier keeps the memory of any store; here it is on the heap. */
static void memory_of_any_store_stays_while_copies_are_in_flight(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    f->log.level = TMS_LOG_SILENT;
    f->heap.pins = true;
    uint64_t first = allocate_filled(f, HEAP_BACKUP, 1), second = allocate_filled(f, HEAP_BACKUP, 2);
    simulator()->fail_after("cuCtxSynchronize", 1, DEVICE_WAITS, CUDA_ERROR_UNKNOWN);
    leave_a_copy_in_flight("cuMemcpyDtoHAsync", CUDA_ERROR_UNKNOWN);
    simulator()->set_bandwidth(8 * BYTES); /* premature release would cost an eighth of a second, not a hang */
    simulator()->clear_counts();
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemcpyDtoHAsync");
    assert_int_equal(state_of(f, first), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, second), TMS_SEGMENT_ACTIVE);
    for (int tries = 0; tries < 2; tries++) {
        assert_int_equal(atomic_load(&f->heap.blocks), 2);
        assert_int_equal(atomic_load(&f->heap.relays), 1);
        assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.quarantined_other, 1); /* the stream, and what the copier holds */
        assert_int_equal(counters.quarantined_host, 1);
        if (tries > 0) break;
        simulator()->fail_after("cuStreamSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
        tms_reclaim_all(&f->saver);
        settle_host_memory(&f->saver);
    }
    release_copies();
    tms_reclaim_all(&f->saver);
    assert_nothing_waits(&f->saver);
    assert_int_equal(atomic_load(&f->heap.blocks), 0);
    assert_int_equal(atomic_load(&f->heap.relays), 0);
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 2);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(first, BYTES, 1);
    assert_filled(second, BYTES, 2);
}

static void the_disks_staging_buffers_stay_while_they_are_in_use(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    tms_sim_usage_t usage;
    char directory[TEMPORARY_BYTES];
    assert_non_null(make_temporary_directory(directory, "flight"));
    ASSERT_OK(tms_disk_set_directory(&f->saver.stores.disk, directory, &error), error);
    uint64_t address = allocate_filled(f, TMS_BACKUP_DISK, 1);
    f->log.level = TMS_LOG_SILENT;
    simulator()->fail_after("cuCtxSynchronize", 1, DEVICE_WAITS, CUDA_ERROR_UNKNOWN);
    leave_a_copy_in_flight("cuMemcpyDtoHAsync", CUDA_ERROR_UNKNOWN);
    simulator()->clear_counts();
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.quarantined_host, 1);
    simulator()->usage(0, &usage);
    assert_true(usage.host_bytes > 0);
    release_copies();
    tms_reclaim_all(&f->saver);
    assert_nothing_waits(&f->saver);
    simulator()->usage(0, &usage);
    assert_int_equal(usage.host_bytes, 0);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, BYTES, 1);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(remove_temporary_directory(directory), 0);
}

/* After a complete wait nothing is left to wait for. */
static void a_call_that_succeeds_waits_once(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    allocate_filled(f, TMS_BACKUP_PINNED, 1);
    simulator()->clear_counts();
    simulator()->fail_after("cuStreamSynchronize", 1, STREAM_WAITS, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuStreamSynchronize"), 1);
    simulator()->fail_after("cuStreamSynchronize", 0, 0, 0);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_resume_keeps_the_targets_of_copies_in_flight_mapped),
        TWO(other_devices_are_undone),
        ONE(waiting_for_copies_does_not_break_a_capture),
        ONE(a_lost_device_is_undone),
        ONE(a_pause_keeps_host_memory_with_copies_in_flight),
        ONE(memory_of_any_store_stays_while_copies_are_in_flight),
        ONE(the_disks_staging_buffers_stay_while_they_are_in_use),
        ONE(a_call_that_succeeds_waits_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
