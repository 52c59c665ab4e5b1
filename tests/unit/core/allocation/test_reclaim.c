/* Guards memory awaiting release: the quarantine, deferred frees, damaged segments; and a driver that reports wrong results
 * about ranges. */

#include "support.h"

#include <string.h>

#include "temporary.h"

static tms_status_t try_allocate(fixture_t *f, uint64_t bytes, int device, uint64_t *address, tms_error_t *error) {
    tms_region_t region = tms_saver_settings(&f->saver);
    return tms_allocation_create(&f->saver, &region, bytes, device, address, error);
}

static void memory_that_the_driver_fails_to_release_is_quarantined_and_retried(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        tms_counters_t counters;
        uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.quarantined_ranges, i != 1); /* addresses where nothing is mapped go back */
        assert_int_equal(counters.quarantined_handles, i < 2);
        tms_reclaim_all(&f->saver);
        assert_int_equal(physical_bytes(0), 0);
        assert_nothing_waits(&f->saver);
    }
}

static void memory_refused_again_stays_quarantined(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuMemRelease", 0, 2, CUDA_ERROR_UNKNOWN);
    simulator()->fail_after("cuMemAddressFree", 0, 2, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    ASSERT_OK(pause_all(f, &error), error);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.quarantined_handles, 1);
    assert_int_equal(counters.quarantined_ranges, 1);
    ASSERT_OK(pause_all(f, &error), error);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.quarantined_handles, 0);
    assert_int_equal(counters.quarantined_ranges, 0);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_NOT_MANAGED); /* no longer has an owner */
    ASSERT_OK(resume_all(f, &error), error);
    assert_nothing_waits(&f->saver);
}

static void a_free_is_deferred_while_the_device_wait_fails(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuCtxSynchronize", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        tms_counters_t counters;
        uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), fired = simulator()->failures_fired();
        simulator()->clear_counts();
        simulator()->fail_after(calls[i], 0, 2, CUDA_ERROR_UNKNOWN);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
        tms_reclaim_all(&f->saver);
        assert_int_equal(simulator()->failures_fired(), fired + 2);
        assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
        assert_int_equal(physical_bytes(0), 2 * MIB);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.deferred_frees, 1);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_NOT_MANAGED);
        ASSERT_OK(pause_all(f, &error), error);
        assert_int_equal(physical_bytes(0), 0);
        assert_nothing_waits(&f->saver);
    }
}

static void a_capture_prevents_retries(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuMemRelease", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    ASSERT_OK(tms_capture_table_begin(&f->saver, NULL, NULL, &error), error);
    simulator()->clear_counts();
    tms_reclaim_all(&f->saver);
    assert_int_equal(simulator()->calls("cuMemRelease"), 0);
    (void)tms_capture_end_of(&f->saver, 0);
    assert_int_equal(simulator()->calls("cuMemRelease"), 1);
    assert_nothing_waits(&f->saver);
}

static void a_context_left_on_the_stack_is_popped_although_nothing_else_waits(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    CUcontext before = NULL, now = NULL;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&before), CUDA_SUCCESS);
    simulator()->fail_after("cuCtxPopCurrent", 0, 4, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
    assert_ptr_not_equal(now, before);
    assert_nothing_waits(&f->saver);
    tms_reclaim_all(&f->saver);
    assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
    assert_ptr_equal(now, before);
}

static void a_damaged_segment_can_be_freed(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemUnmap", "cuMemRelease"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        tms_counters_t counters;
        uint64_t address = allocate(f, "a", TMS_BACKUP_MMAP, 2 * MIB);
        simulator()->fail_after(calls[i], 0, 2, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_DAMAGED);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.damaged, 0);
        assert_int_equal(counters.quarantined_handles, 1);
        assert_int_equal(counters.resident_bytes, 0);
        assert_int_equal(counters.paused_bytes, 0);
        assert_int_equal(counters.host_backup_bytes, 0);
        tms_reclaim_all(&f->saver);
        assert_int_equal(physical_bytes(0), 0);
        assert_nothing_waits(&f->saver);
    }
}

/* What a driver call of the repair finds, and does. */
static struct {
    fixture_t *fixture;
    CUresult (*unmap)(CUdeviceptr, size_t);
    uint64_t address;
    bool frees;
    int calls;
} watched;

static CUresult unmap_while_watching(CUdeviceptr address, size_t bytes) {
    watched.calls++;
    assert_int_equal(pthread_mutex_trylock(&watched.fixture->saver.lock), 0);
    pthread_mutex_unlock(&watched.fixture->saver.lock);
    assert_int_equal(state_of(watched.fixture, watched.address), TMS_SEGMENT_REPAIRING);
    if (watched.frees) assert_int_equal(tms_free_address(&watched.fixture->saver, watched.address, NULL), TMS_OK);
    return watched.unmap(address, bytes);
}

static void a_damaged_segment_is_repaired_without_the_lock_and_may_be_freed_meanwhile(void **state) {
    fixture_t *f = *state;
    for (int freeing = 0; freeing < 2; freeing++) {
        tms_error_t error;
        uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
        fill(address, 2 * MIB, 7);
        simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        watched.fixture = f;
        watched.unmap = f->cuda->cuMemUnmap;
        watched.address = address;
        watched.frees = freeing;
        watched.calls = 0;
        writable(f)->cuMemUnmap = unmap_while_watching;
        tms_reclaim_all(&f->saver);
        writable(f)->cuMemUnmap = watched.unmap;
        assert_int_equal(watched.calls, 1);
        assert_int_equal(physical_bytes(0), 0);
        assert_int_equal(is_managed(f, address), !freeing);
        assert_nothing_waits(&f->saver);
        if (freeing) continue;
        assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
        ASSERT_OK(resume_all(f, &error), error);
        assert_filled(address, 2 * MIB, 7);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

static void an_allocation_that_cannot_be_undone_is_not_repeated(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuMemAddressFree", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK); /* something to reclaim */
    simulator()->clear_counts();
    simulator()->fail_after("cuMemSetAccess", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN);
    assert_int_equal(try_allocate(f, 4 * MIB, 0, &address, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(error.call, "cuMemSetAccess");
    assert_int_equal(simulator()->calls("cuMemCreate"), 1);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.quarantined_handles, 1);
    assert_int_equal(counters.quarantined_ranges, 2);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(physical_bytes(0), 0);
    assert_nothing_waits(&f->saver);
}

/* A driver whose cuMemAddressFree succeeds but returns an error; the address is then reused. */
static struct {
    CUresult (*free)(CUdeviceptr, size_t);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUdeviceptr again;
    int frees;
} lying;

static CUresult free_and_deny(CUdeviceptr address, size_t bytes) {
    lying.frees++;
    assert_int_equal(lying.free(address, bytes), CUDA_SUCCESS);
    return CUDA_ERROR_UNKNOWN;
}

static CUresult reserve_again(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                              unsigned long long flags) {
    (void)hint;
    return lying.reserve(address, bytes, alignment, lying.again, flags);
}

static CUresult reserve_what_is_in_use(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                                       unsigned long long flags) {
    (void)bytes, (void)alignment, (void)hint, (void)flags;
    *address = lying.again;
    return CUDA_SUCCESS;
}

static void a_range_released_in_spite_of_an_error_is_dropped(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), second = 0;
    lying.free = f->cuda->cuMemAddressFree;
    lying.reserve = f->cuda->cuMemAddressReserve;
    lying.again = address;
    lying.frees = 0;
    writable(f)->cuMemAddressFree = free_and_deny;
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    writable(f)->cuMemAddressFree = lying.free;
    writable(f)->cuMemAddressReserve = reserve_again;
    ASSERT_OK(try_allocate(f, 2 * MIB, 0, &second, &error), error);
    writable(f)->cuMemAddressReserve = lying.reserve;
    assert_int_equal(second, address);
    assert_int_equal(lying.frees, 1);
    fill(second, 2 * MIB, 3);
    simulator()->clear_counts();
    tms_reclaim_all(&f->saver); /* must not take the range from its new owner */
    assert_int_equal(simulator()->calls("cuMemUnmap") + simulator()->calls("cuMemAddressFree"), 0);
    assert_nothing_waits(&f->saver);
    assert_filled(second, 2 * MIB, 3);
    assert_int_equal(tms_free_address(&f->saver, second, &error), TMS_OK);
}

static CUresult free_deny_and_allocate(CUdeviceptr address, size_t bytes) {
    lying.frees++;
    assert_int_equal(lying.free(address, bytes), CUDA_SUCCESS);
    writable(watched.fixture)->cuMemAddressReserve = reserve_again;
    assert_int_equal(try_allocate(watched.fixture, bytes, 0, &watched.address, NULL), TMS_OK);
    writable(watched.fixture)->cuMemAddressReserve = lying.reserve;
    return CUDA_ERROR_UNKNOWN;
}

/* At the first free, and at the retry: no other thread sees meanwhile that the range was claimed. */
static void a_range_reused_by_another_owner_is_dropped(void **state) {
    fixture_t *f = *state;
    for (int retried = 0; retried < 2; retried++) {
        tms_error_t error;
        uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
        watched.fixture = f;
        lying.free = f->cuda->cuMemAddressFree;
        lying.reserve = f->cuda->cuMemAddressReserve;
        lying.again = address;
        lying.frees = 0;
        if (retried) {
            simulator()->fail_after("cuMemAddressFree", 0, 1, CUDA_ERROR_UNKNOWN);
            assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        }
        writable(f)->cuMemAddressFree = free_deny_and_allocate;
        if (retried)
            tms_reclaim_all(&f->saver);
        else
            assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        writable(f)->cuMemAddressFree = lying.free;
        assert_int_equal(lying.frees, 1);
        assert_int_equal(watched.address, address);
        assert_nothing_waits(&f->saver);
        fill(address, 2 * MIB, 3); /* the new owner's */
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        watched.address = 0;
    }
}

/* The margin would not stay free before the quarantined memory is released. */
static void memory_is_reclaimed_for_the_margin(void **state) {
    fixture_t *f = *state;
    const tms_region_t region = tms_saver_settings(&f->saver);
    for (int as_handle = 0; as_handle < 2; as_handle++) {
        tms_error_t error;
        uint64_t made = 0, address = allocate(f, "a", TMS_BACKUP_NONE, 100 * MIB);
        simulator()->fail_after("cuMemRelease", 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        assert_int_equal(physical_bytes(0), 100 * MIB);
        atomic_store(&f->saver.memory_margin_bytes, 100 * MIB);
        if (as_handle) {
            ASSERT_OK(tms_handles_create(&f->saver, &region, 150 * MIB, 0, &made, &error), error);
            ASSERT_OK(tms_handles_release(&f->saver, made, &error), error);
        } else {
            ASSERT_OK(try_allocate(f, 150 * MIB, 0, &made, &error), error);
            assert_int_equal(tms_free_address(&f->saver, made, &error), TMS_OK);
        }
        atomic_store(&f->saver.memory_margin_bytes, 0);
        assert_nothing_waits(&f->saver);
    }
}

static void a_range_that_is_in_use_is_refused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 4 * MIB), second = 0;
    fill(address, 4 * MIB, 5);
    lying.reserve = f->cuda->cuMemAddressReserve;
    lying.again = address + 2 * MIB;
    writable(f)->cuMemAddressReserve = reserve_what_is_in_use;
    simulator()->clear_counts();
    assert_int_equal(try_allocate(f, 8 * MIB, 0, &second, &error), TMS_DRIVER);
    assert_non_null(strstr(error.message, "in use"));
    assert_int_equal(simulator()->calls("cuMemCreate") + simulator()->calls("cuMemAddressFree"), 0);
    writable(f)->cuMemAddressReserve = lying.reserve;
    assert_filled(address, 4 * MIB, 5);
}

static void a_free_releases_the_devices_lock(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_error_context_t context = {.operation = "test", .device = 0};
    char directory[TEMPORARY_BYTES];
    assert_non_null(make_temporary_directory(directory, "reclaim"));
    f->saver.device_locks.directory = directory;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(tms_device_locks_acquire(&f->saver.device_locks, 1, NULL, &context, &error), error);
    tms_segment_of(tms_registry_find(&f->saver.registry, address))->exclusive = true;
    simulator()->fail_after("cuMemRelease", 0, 1, CUDA_ERROR_UNKNOWN); /* also if the driver keeps the memory */
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(f->saver.device_locks.device[0].count, 0);
    tms_reclaim_all(&f->saver);
    assert_nothing_waits(&f->saver);
    assert_int_equal(remove_temporary_directory(directory), 0);
}

static void references_to_contexts_are_released_later(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_error_context_t context = {.operation = "test", .device = 0};
    simulator()->fail_after("cuDevicePrimaryCtxRelease", 0, 1, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    tms_devices_leave(&f->devices, 0);
    assert_int_equal(tms_devices_unreleased(&f->devices), 1);
    assert_true(tms_reclaim_is_needed(&f->saver));
    tms_reclaim_all(&f->saver);
    assert_int_equal(tms_devices_unreleased(&f->devices), 0);
    assert_false(tms_reclaim_is_needed(&f->saver));
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(memory_that_the_driver_fails_to_release_is_quarantined_and_retried),
        TEST(memory_refused_again_stays_quarantined),
        TEST(a_free_is_deferred_while_the_device_wait_fails),
        TEST(a_capture_prevents_retries),
        TEST(a_context_left_on_the_stack_is_popped_although_nothing_else_waits),
        TEST(a_damaged_segment_can_be_freed),
        TEST(a_damaged_segment_is_repaired_without_the_lock_and_may_be_freed_meanwhile),
        TEST(an_allocation_that_cannot_be_undone_is_not_repeated),
        TEST(a_range_released_in_spite_of_an_error_is_dropped),
        TEST(a_range_reused_by_another_owner_is_dropped),
        TEST(memory_is_reclaimed_for_the_margin),
        TEST(a_range_that_is_in_use_is_refused),
        TEST(a_free_releases_the_devices_lock),
        TEST(references_to_contexts_are_released_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
