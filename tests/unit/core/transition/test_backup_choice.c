/* Guards the options of one call: where contents go this time, how host memory is released, zeros for memory without
 * contents, and all devices concurrently. */
#include "support/choice_fixture.h"

/* ---- where contents go this time ---- */

static void a_pause_may_choose_another_place(void **state) {
    fixture_t *f = *state;
    const tms_backup_kind_t regions[] = {TMS_BACKUP_NONE, TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK, HEAP_BACKUP};
    const tms_backup_kind_t *choices = regions;
    for (uint32_t i = 0; i < 5; i++) {
        for (uint32_t k = 0; k < 5; k++) {
            tms_error_t error;
            tms_report_t report;
            tms_segment_info_t row;
            tms_selection_t chosen = {.has_backup = 1, .backup = choices[k]};
            uint64_t address = allocate(f, "a", regions[i], 2 * MIB);
            bool kept = choices[k] != TMS_BACKUP_NONE;
            fill(address, 2 * MIB, i * 5 + k);
            ASSERT_OK(pause_selected_with_report(f, &chosen, &report, &error), error);
            assert_int_equal(report.copied_bytes, kept ? 2 * MIB : 0);
            assert_int_equal(atomic_load(&f->saver.stores.disk.total) > 0, choices[k] == TMS_BACKUP_DISK);
            assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes) > 0,
                             choices[k] == TMS_BACKUP_PINNED || choices[k] == TMS_BACKUP_MMAP);
            ASSERT_OK(tms_inspect_find(&f->saver, address, 1, &row), error);
            assert_int_equal(row.backup, regions[i]); /* the region's setting stays */
            ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
            if (kept)
                assert_filled(address, 2 * MIB, i * 5 + k);
            else
                assert_poisoned(address, 2 * MIB);
            assert_int_equal(counters_of(f).host_resident_bytes, 0);
            assert_int_equal(counters_of(f).disk_backup_bytes > 0,
                             choices[k] == TMS_BACKUP_DISK && regions[i] == TMS_BACKUP_DISK);

            fill(address, 2 * MIB, 50 + i); /* the next pause obeys the region's setting */
            ASSERT_OK(pause_with_report(f, ALL_TAGS, &report, &error), error);
            assert_int_equal(report.copied_bytes, regions[i] == TMS_BACKUP_NONE ? 0 : 2 * MIB);
            ASSERT_OK(resume_all(f, &error), error);
            if (regions[i] != TMS_BACKUP_NONE) assert_filled(address, 2 * MIB, 50 + i);
            assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
            assert_int_equal(counters_of(f).disk_backup_bytes, 0);
        }
    }
}

/* Active, with the contents of the previous pause retained. */
static uint64_t allocate_retained(fixture_t *f, uint32_t seed) {
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
    fill(address, 2 * MIB, seed);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    return address;
}

/* The pool keeps the page that a pause has used for fingerprints. */
enum { FINGERPRINTS = 4096 };

static void a_discarded_pause_drops_retained_backups(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    tms_selection_t discard = {.has_backup = 1, .backup = TMS_BACKUP_NONE};
    uint64_t address = allocate_retained(f, 1);
    assert_int_equal(counters_of(f).host_backup_bytes, 2 * MIB);
    ASSERT_OK(pause_selected(f, &discard, &error), error);
    ASSERT_OK(tms_inspect_host_backup(&f->saver, address, 2 * MIB, &buffer, &host, &error), error);
    assert_null(host);
    assert_int_equal(counters_of(f).host_resident_bytes, FINGERPRINTS);
    assert_int_equal(counters_of(f).host_pooled_bytes, FINGERPRINTS);
    ASSERT_OK(resume_all(f, &error), error);
    assert_poisoned(address, 2 * MIB);
}

static void a_failed_pause_keeps_retained_backups(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    tms_selection_t to_disk = {.has_backup = 1, .backup = TMS_BACKUP_DISK};
    uint64_t address = allocate_retained(f, 1);
    fill(address, 2 * MIB, 2);
    simulator()->fail_after("cuStreamSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_selected(f, &to_disk, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    ASSERT_OK(tms_inspect_host_backup(&f->saver, address, 2 * MIB, &buffer, &host, &error), error);
    assert_filled((uint64_t)host, 2 * MIB, 1);
    tms_host_buffer_drop(buffer);
    assert_int_equal(counters_of(f).disk_backup_bytes, 0);
}

static void choices_are_checked(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t wrong[] = {
        {.has_backup = 1, .backup = 9}, {.has_backup = 1, .backup = -1}, {.host_policy = 4}, {.host_policy = -1}};
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(pause_selected(f, &wrong[i], &error), TMS_INVALID_ARGUMENT);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    }
}

/* ---- zeros ---- */

static void memory_without_contents_can_come_back_zeroed(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    tms_selection_t zero = {.zero = 1};
    uint64_t dropped = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB - 100), kept = allocate(f, "a", TMS_BACKUP_MMAP, 2 * MIB);
    fill(dropped, 2 * MIB - 100, 1);
    fill(kept, 2 * MIB, 2);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_selected_with_report(f, &zero, &report, &error), error);
    assert_int_equal(report.copied_bytes, 2 * MIB);
    assert_filled(kept, 2 * MIB, 2);
    for (uint64_t i = 0; i < 2 * MIB; i++) assert_int_equal(((uint8_t *)dropped)[i], 0);
    assert_int_equal(simulator()->calls("cuMemsetD8Async"), 1);
}

/* ---- release of host memory ---- */

static void the_narrowest_policy_counts(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const struct {
        tms_host_policy_t process, region, call;
        uint64_t backup, pooled;
    } cases[] = {
        {TMS_HOST_RELEASE, TMS_HOST_DEFAULT, TMS_HOST_DEFAULT, 0, 0},
        {TMS_HOST_POOL, TMS_HOST_DEFAULT, TMS_HOST_DEFAULT, 0, 2 * MIB},
        {TMS_HOST_RELEASE, TMS_HOST_POOL, TMS_HOST_DEFAULT, 0, 2 * MIB},
        {TMS_HOST_POOL, TMS_HOST_RETAIN, TMS_HOST_DEFAULT, 2 * MIB, FINGERPRINTS},
        {TMS_HOST_POOL, TMS_HOST_RETAIN, TMS_HOST_RELEASE, 0, FINGERPRINTS},
        {TMS_HOST_RELEASE, TMS_HOST_RELEASE, TMS_HOST_RETAIN, 2 * MIB, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tms_region_settings_t settings = {
            .managed = 1, .backup = TMS_BACKUP_PINNED, .tag = "a", .host_policy = cases[i].region};
        tms_selection_t selection = {.host_policy = cases[i].call};
        tms_region_t region;
        uint64_t address = 0;
        atomic_store(&f->saver.host_policy, cases[i].process);
        ASSERT_OK(tms_region_from_settings(&f->regions, &settings, &region, &error), error);
        ASSERT_OK(tms_allocation_create(&f->saver, &region, 2 * MIB, 0, &address, &error), error);
        fill(address, 2 * MIB, 1);
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_selected(f, &selection, &error), error);
        assert_filled(address, 2 * MIB, 1);
        tms_counters_t counters = counters_of(f);
        assert_int_equal(counters.host_backup_bytes, cases[i].backup);
        assert_int_equal(counters.host_pooled_bytes, cases[i].pooled);
        assert_int_equal(counters.host_resident_bytes, cases[i].backup + cases[i].pooled);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        tms_host_store_set_pool_limit(&f->saver.stores.host, 0); /* empties it */
        assert_int_equal(counters_of(f).host_resident_bytes, 0);
        tms_host_store_set_pool_limit(&f->saver.stores.host, UINT64_MAX);
    }
}

/* ---- progress, and several devices ---- */

typedef struct watcher {
    uint64_t done, total;
    int calls;
    bool backwards;
} watcher_t;

static void watch(void *context, uint64_t done, uint64_t total) {
    watcher_t *watcher = context;
    watcher->backwards |= done < watcher->done;
    watcher->done = done;
    watcher->total = total;
    watcher->calls++;
}

static void progress_is_reported_to_the_end(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    watcher_t watcher = {0};
    tms_selection_t selection = {.on_progress = watch, .on_progress_context = &watcher};
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK, HEAP_BACKUP, TMS_BACKUP_NONE};
    for (uint32_t i = 0; i < 5; i++) fill(allocate(f, "a", kinds[i], 2 * MIB), 2 * MIB, i);
    f->saver.stores.copying.chunk_bytes = MIB / 2;
    for (int resume = 0; resume < 2; resume++) {
        watcher = (watcher_t){0};
        ASSERT_OK((resume ? resume_selected : pause_selected)(f, &selection, &error), error);
        assert_true(watcher.calls >= 1);
        assert_false(watcher.backwards);
        assert_int_equal(watcher.total, 8 * MIB);
        assert_int_equal(watcher.done, 8 * MIB);
    }
}

static void both_devices_copy(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t addresses[] = {
        allocate_on(f, 0, "a", TMS_BACKUP_PINNED, 4 * MIB), allocate_on(f, 1, "a", TMS_BACKUP_MMAP, 4 * MIB),
        allocate_on(f, 1, "a", TMS_BACKUP_DISK, 2 * MIB), allocate_on(f, 0, "a", TMS_BACKUP_NONE, 2 * MIB)};
    for (int cycle = 0; cycle < 3; cycle++) {
        for (uint32_t i = 0; i < 3; i++) fill(addresses[i], i == 2 ? 2 * MIB : 4 * MIB, i);
        ASSERT_OK(pause_with_report(f, ALL_TAGS, &report, &error), error);
        assert_int_equal(report.copied_bytes, 10 * MIB);
        assert_int_equal(physical_bytes(0) + physical_bytes(1), 0);
        ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
        assert_int_equal(report.copied_bytes, 10 * MIB);
        for (uint32_t i = 0; i < 3; i++) assert_filled(addresses[i], i == 2 ? 2 * MIB : 4 * MIB, i);
    }
}

static void a_failure_on_one_device_fails_the_call_on_all(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemcpyDtoHAsync", "cuStreamCreate", "cuStreamSynchronize", "cuMemcpyHtoDAsync", "cuMemMap"};
    /* The second wait for a stream may precede the close of the first, which causes no failure. */
    const uint64_t occurrences[] = {2, 2, 1, 2, 2};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (uint64_t occurrence = 0; occurrence < occurrences[i]; occurrence++) {
            tms_error_t error;
            uint64_t addresses[] = {allocate_on(f, 0, "a", TMS_BACKUP_PINNED, 2 * MIB),
                                    allocate_on(f, 1, "a", TMS_BACKUP_PINNED, 2 * MIB)};
            bool at_resume = i >= 3;
            for (uint32_t k = 0; k < 2; k++) fill(addresses[k], 2 * MIB, k);
            if (at_resume) ASSERT_OK(pause_all(f, &error), error);
            simulator()->fail_after(calls[i], occurrence, 1, CUDA_ERROR_UNKNOWN);
            assert_int_equal((at_resume ? resume_all : pause_all)(f, &error), TMS_DRIVER);
            assert_string_equal(error.call, calls[i]);
            for (int k = 0; k < 2; k++)
                assert_int_equal(state_of(f, addresses[k]), at_resume ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_ACTIVE);
            assert_int_equal(physical_bytes(0) + physical_bytes(1), at_resume ? 0 : 4 * MIB);
            if (!at_resume) ASSERT_OK(pause_all(f, &error), error);
            ASSERT_OK(resume_all(f, &error), error);
            for (uint32_t k = 0; k < 2; k++) {
                assert_filled(addresses[k], 2 * MIB, k);
                assert_int_equal(tms_free_address(&f->saver, addresses[k], &error), TMS_OK);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_may_choose_another_place),
        ONE(a_discarded_pause_drops_retained_backups),
        ONE(a_failed_pause_keeps_retained_backups),
        ONE(choices_are_checked),
        ONE(memory_without_contents_can_come_back_zeroed),
        ONE(the_narrowest_policy_counts),
        ONE(progress_is_reported_to_the_end),
        TWO(both_devices_copy),
        TWO(a_failure_on_one_device_fails_the_call_on_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
