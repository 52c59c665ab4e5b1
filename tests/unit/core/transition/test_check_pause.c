/* Guards the check of a pause: it fails where the pause would lack room for its backups, and it changes nothing. */
#include "support.h"

#include <string.h>
#include <sys/resource.h>

static const uint64_t BYTES = 4 * MIB;

static tms_status_t check(fixture_t *f, tms_error_t *error) {
    const tms_selection_t all = {.tags = NULL};
    return tms_pause_check(&f->saver, &all, error);
}

static tms_counters_t counters_of(fixture_t *f) {
    tms_counters_t counters = {0};
    tms_inspect_counters(&f->saver, &counters);
    return counters;
}

static void assert_nothing_is_kept(fixture_t *f) {
    settle_host_memory(&f->saver);
    assert_int_equal(counters_of(f).host_backup_bytes, 0);
    assert_int_equal(counters_of(f).disk_backup_bytes, 0);
    assert_nothing_waits(&f->saver);
}

static void a_pause_that_fits_is_only_planned(void **state) {
    static const char *const calls[] = {"cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync", "cuMemHostRegister"};
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t addresses[] = {allocate(f, "a", TMS_BACKUP_PINNED, BYTES), allocate(f, "b", TMS_BACKUP_DISK, BYTES),
                                  allocate(f, "c", TMS_BACKUP_MMAP, BYTES), allocate(f, "d", TMS_BACKUP_NONE, BYTES)};
    for (uint32_t i = 0; i < 4; i++) fill(addresses[i], BYTES, i);
    simulator()->clear_counts();
    ASSERT_OK(check(f, &error), error);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) assert_int_equal(simulator()->calls(calls[i]), 0);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(state_of(f, addresses[i]), TMS_SEGMENT_ACTIVE);
        assert_filled(addresses[i], BYTES, i);
    }
    assert_nothing_is_kept(f);
    const tms_tag_t *tag = tms_tag_find(&f->regions.tags, "a");
    assert_int_equal(tag->pause_epoch, 0);
    assert_int_equal(counters_of(f).pauses_total, 0);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    for (uint32_t i = 0; i < 3; i++) assert_filled(addresses[i], BYTES, i);
}

static void host_memory_that_is_not_allowed_is_found(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, BYTES);
    uint64_t *cap = &f->saver.stores.host.limits.cap_bytes;
    const uint64_t before = *cap;
    *cap = BYTES - 1;
    simulator()->clear_counts();
    assert_int_equal(check(f, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_string_equal(error.operation, "check_pause");
    assert_non_null(strstr(error.message, "TMS_HOST_MEMORY_LIMIT_MB"));
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_int_equal(counters_of(f).failures_total, 0);
    assert_nothing_is_kept(f);
    *cap = BYTES;
    ASSERT_OK(check(f, &error), error);
    ASSERT_OK(check(f, &error), error);
    ASSERT_OK(pause_all(f, &error), error);
    *cap = before;
}

static void a_file_that_is_too_large_is_found(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_DISK, BYTES);
    struct rlimit before;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    const struct rlimit small = {.rlim_cur = BYTES / 2, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_int_equal(check(f, &error), TMS_BACKUP_IO);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_nothing_is_kept(f);
    ASSERT_OK(check(f, &error), error);
}

static int32_t tell(void *context, tms_live_t *live) {
    *live = *(const tms_live_t *)context;
    return 0;
}

static void only_what_the_pause_keeps_needs_room(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BYTES);
    const tms_live_range_t half = {.begin = address, .end = address + BYTES / 2};
    tms_live_t live = {.allocations = &address, .allocation_count = 1, .ranges = &half, .range_count = 1};
    const tms_selection_t whole = {.has_backup = 1, .backup = TMS_BACKUP_PINNED};
    tms_selection_t known = whole, preserving = {.preserves = 1, .find_live = tell, .live_context = &live};
    known.find_live = tell;
    known.live_context = &live;
    uint64_t *cap = &f->saver.stores.host.limits.cap_bytes;
    const uint64_t before = *cap;
    *cap = BYTES / 2;
    ASSERT_OK(check(f, &error), error);
    ASSERT_OK(tms_pause_check(&f->saver, &known, &error), error);
    ASSERT_OK(tms_pause_check(&f->saver, &preserving, &error), error);
    assert_int_equal(tms_pause_check(&f->saver, &whole, &error), TMS_OUT_OF_HOST_MEMORY);
    *cap = BYTES / 4;
    assert_int_equal(tms_pause_check(&f->saver, &preserving, &error), TMS_OUT_OF_HOST_MEMORY);
    *cap = before;
    assert_nothing_is_kept(f);
}

static void retained_backups_are_their_own_room(void **state) {
    static const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_DISK};
    fixture_t *f = *state;
    tms_error_t error;
    atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        tms_report_t report;
        uint64_t address = allocate(f, "a", kinds[i], BYTES);
        uint64_t *cap = &f->saver.stores.host.limits.cap_bytes;
        const uint64_t before = *cap;
        fill(address, BYTES, 1);
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_all(f, &error), error);
        *cap = BYTES;
        ASSERT_OK(check(f, &error), error);
        *cap = before;
        ASSERT_OK(pause_with_report(f, "a", &report, &error), error);
        assert_int_equal(report.unchanged_bytes, BYTES);
        ASSERT_OK(resume_all(f, &error), error);
        assert_filled(address, BYTES, 1);
        ASSERT_OK(tms_free_address(&f->saver, address, &error), error);
    }
}

typedef struct to_free {
    fixture_t *fixture;
    uint64_t address;
} to_free_t;

static int32_t free_and_tell_nothing(void *context, tms_live_t *live) {
    const to_free_t *what = context;
    tms_error_t error;
    (void)live;
    ASSERT_OK(tms_free_address(&what->fixture->saver, what->address, &error), error);
    return 1;
}

static void memory_that_is_freed_meanwhile_is_free_afterwards(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    to_free_t what = {.fixture = f, .address = allocate(f, "a", TMS_BACKUP_PINNED, BYTES)};
    const tms_selection_t freeing = {.find_live = free_and_tell_nothing, .live_context = &what};
    ASSERT_OK(tms_pause_check(&f->saver, &freeing, &error), error);
    assert_int_equal(counters_of(f).allocations, 0);
    assert_nothing_is_kept(f);
}

static void failures_change_nothing(void **state) {
    static const char *const calls[] = {"cuCtxSynchronize", "cuDevicePrimaryCtxRetain"};
    fixture_t *f = *state;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, BYTES);
    fill(address, BYTES, 1);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(check(f, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        assert_nothing_is_kept(f);
    }
    assert_filled(address, BYTES, 1);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_that_fits_is_only_planned),
        ONE(host_memory_that_is_not_allowed_is_found),
        ONE(a_file_that_is_too_large_is_found),
        ONE(only_what_the_pause_keeps_needs_room),
        ONE(retained_backups_are_their_own_room),
        ONE(memory_that_is_freed_meanwhile_is_free_afterwards),
        ONE(failures_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
