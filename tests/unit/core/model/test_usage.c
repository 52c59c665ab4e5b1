/* Guards what is counted as mapped, by device and by tag, and the peaks; and the rows that list usage. */

#include "support.h"

#include <string.h>

enum { ROWS = 16 };

static uint64_t peak_of_tag(fixture_t *f, const char *tag) {
    tms_usage_info_t rows[ROWS];
    assert_int_equal(tms_inspect_usage(&f->saver, tag, TMS_NO_DEVICE, rows, ROWS), 2);
    assert_string_equal(rows[0].tag, tag);
    return rows[0].resident_peak_bytes;
}

static uint64_t peak_of_all(fixture_t *f) {
    tms_counters_t counters;
    tms_inspect_counters(&f->saver, &counters);
    return counters.resident_peak_bytes;
}

static void a_peak_is_the_most_that_was_mapped_at_once(void **state) {
    fixture_t *f = *state;
    uint64_t first = allocate(f, "a", TMS_BACKUP_NONE, 4 * MIB);
    (void)allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(peak_of_all(f), 6 * MIB);
    assert_int_equal(pause_tag(f, "a", NULL), TMS_OK);
    (void)allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(peak_of_all(f), 6 * MIB); /* never more than 6 at once */
    assert_int_equal(peak_of_tag(f, "a"), 4 * MIB);
    assert_int_equal(peak_of_tag(f, "b"), 4 * MIB);
    assert_int_equal(resume_tag(f, "a", NULL), TMS_OK);
    assert_int_equal(peak_of_all(f), 8 * MIB);
    assert_int_equal(tms_free_address(&f->saver, first, NULL), TMS_OK);
    assert_int_equal(peak_of_all(f), 8 * MIB);
    tms_inspect_reset_peaks(&f->saver);
    assert_int_equal(peak_of_all(f), 4 * MIB);
    assert_int_equal(peak_of_tag(f, "b"), 4 * MIB);
    (void)allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB); /* which had no memory when the peaks were reset */
    assert_int_equal(peak_of_tag(f, "a"), 2 * MIB);
}

static void a_resume_that_is_undone_raises_no_peak(void **state) {
    fixture_t *f = *state;
    (void)allocate(f, "a", TMS_BACKUP_NONE, 4 * MIB);
    assert_int_equal(pause_all(f, NULL), TMS_OK);
    tms_inspect_reset_peaks(&f->saver);
    simulator()->fail_after("cuMemSetAccess", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_all(f, NULL), TMS_DRIVER);
    assert_int_equal(peak_of_all(f), 0);
    assert_int_equal(resume_all(f, NULL), TMS_OK);
    assert_int_equal(peak_of_all(f), 4 * MIB);
}

static void a_pause_that_fails_raises_no_peak(void **state) {
    fixture_t *f = *state;
    (void)allocate(f, "a", TMS_BACKUP_PINNED, 4 * MIB);
    simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, NULL), TMS_DRIVER);
    assert_int_equal(peak_of_all(f), 4 * MIB);
    assert_int_equal(peak_of_tag(f, "a"), 4 * MIB);
}

static void rows_are_tags_and_then_devices(void **state) {
    fixture_t *f = *state;
    tms_usage_info_t rows[ROWS];
    (void)allocate_on(f, 0, "a", TMS_BACKUP_PINNED, 3 * MIB);
    (void)allocate_on(f, 1, "a", TMS_BACKUP_NONE, 2 * MIB);
    (void)allocate_on(f, 0, "b", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(pause_tag(f, "a", NULL), TMS_OK);
    assert_int_equal(tms_inspect_usage(&f->saver, NULL, TMS_NO_DEVICE, rows, ROWS), 4);
    assert_string_equal(rows[0].tag, "a");
    assert_int_equal(rows[0].allocations, 2);
    assert_int_equal(rows[0].bytes, 5 * MIB);
    assert_int_equal(rows[0].paused_bytes, 6 * MIB);
    assert_int_equal(rows[0].resident_bytes, 0);
    assert_true(rows[0].backup_bytes >= 3 * MIB);
    assert_string_equal(rows[1].tag, "b");
    assert_int_equal(rows[1].resident_bytes, 2 * MIB);
    for (int device = 0; device < 2; device++) {
        assert_null(rows[2 + device].tag);
        assert_int_equal(rows[2 + device].device, device);
    }
    assert_int_equal(rows[2].paused_bytes, 4 * MIB);
    assert_int_equal(rows[2].resident_bytes, 2 * MIB);
    assert_int_equal(rows[2].resident_peak_bytes, 6 * MIB);
    assert_int_equal(rows[3].resident_peak_bytes, 2 * MIB);
}

static void a_tag_or_a_device_can_be_selected(void **state) {
    fixture_t *f = *state;
    tms_usage_info_t rows[ROWS];
    (void)allocate_on(f, 0, "a", TMS_BACKUP_NONE, 4 * MIB);
    (void)allocate_on(f, 1, "a", TMS_BACKUP_NONE, 2 * MIB);
    (void)allocate_on(f, 1, "b", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_inspect_usage(&f->saver, "a", 1, rows, ROWS), 2);
    assert_string_equal(rows[0].tag, "a");
    assert_int_equal(rows[0].resident_bytes, 2 * MIB);
    assert_int_equal(rows[1].device, 1);
    assert_int_equal(rows[1].allocations, 1);
    assert_int_equal(tms_inspect_usage(&f->saver, NULL, 0, rows, ROWS), 2);
    assert_int_equal(rows[0].allocations, 1);
    assert_int_equal(tms_inspect_usage(&f->saver, "never", TMS_NO_DEVICE, rows, ROWS), 0);
}

static void rows_beyond_the_capacity_are_counted_and_not_written(void **state) {
    fixture_t *f = *state;
    tms_usage_info_t rows[2] = {{.allocations = 77}, {.allocations = 77}};
    for (int i = 0; i < 3; i++) {
        char tag[] = {(char)('a' + i), 0};
        (void)allocate(f, tag, TMS_BACKUP_NONE, 2 * MIB);
        (void)allocate(f, tag, TMS_BACKUP_NONE, 2 * MIB);
    }
    assert_int_equal(tms_inspect_usage(&f->saver, NULL, TMS_NO_DEVICE, NULL, 0), 4);
    assert_int_equal(tms_inspect_usage(&f->saver, NULL, TMS_NO_DEVICE, rows, 1), 4);
    assert_int_equal(rows[0].allocations, 2);
    assert_int_equal(rows[1].allocations, 77);
}

static void damaged_memory_is_neither_resident_nor_paused(void **state) {
    fixture_t *f = *state;
    tms_usage_info_t rows[ROWS];
    (void)allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, NULL), TMS_DRIVER);
    assert_int_equal(tms_inspect_usage(&f->saver, NULL, TMS_NO_DEVICE, rows, ROWS), 2);
    assert_int_equal(rows[0].damaged_bytes, 2 * MIB);
    assert_int_equal(rows[0].resident_bytes + rows[0].paused_bytes, 0);
}

static void calls_are_summed_up(void **state) {
    fixture_t *f = *state;
    tms_counters_t counters;
    tms_error_t error;
    uint64_t address = 0;
    (void)allocate(f, "a", TMS_BACKUP_PINNED, 4 * MIB);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pause_all(f, NULL), TMS_OK);
        assert_int_equal(resume_all(f, NULL), TMS_OK);
    }
    simulator()->fail_after("cuCtxSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_not_equal(pause_all(f, &error), TMS_OK);
    tms_region_t region = tms_saver_settings(&f->saver);
    assert_int_not_equal(tms_allocation_create(&f->saver, &region, UINT64_MAX, 0, &address, &error), TMS_OK);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.pauses_total, 2);
    assert_int_equal(counters.pause_bytes_total, 8 * MIB);
    assert_int_equal(counters.pause_copied_bytes_total, 8 * MIB);
    assert_int_equal(counters.resume_bytes_total, 8 * MIB);
    assert_int_equal(counters.resume_copied_bytes_total, 8 * MIB);
    assert_true(counters.pause_nanoseconds_total > 0 && counters.resume_nanoseconds_total > 0);
    assert_int_equal(counters.failed_pauses_total, 1);
    assert_int_equal(counters.failed_resumes_total, 0);
    assert_int_equal(counters.failed_allocations_total, 1);
    assert_int_equal(counters.failures_total, 2);
}

static tms_usage_info_t row_of(fixture_t *f, const char *tag, int device, size_t index) {
    tms_usage_info_t rows[ROWS];
    assert_true(tms_inspect_usage(&f->saver, tag, device, rows, ROWS) > index);
    return rows[index];
}

/* A free during a capture: its memory stays mapped, and belongs to its tag and device although the allocation is gone. */
static void memory_of_deferred_frees_is_counted(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t capture = 0, freed[] = {allocate_on(f, 1, "a", TMS_BACKUP_NONE, 4 * MIB),
                                     allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), allocate(f, "b", TMS_BACKUP_NONE, 6 * MIB)};
    uint64_t paused = allocate(f, "paused", TMS_BACKUP_NONE, 2 * MIB);
    (void)allocate(f, "b", TMS_BACKUP_NONE, 8 * MIB);
    ASSERT_OK(pause_tag(f, "paused", &error), error);
    ASSERT_OK(tms_capture_table_begin(&f->saver, NULL, &capture, &error), error);
    for (size_t i = 0; i < 3; i++) ASSERT_OK(tms_free_address(&f->saver, freed[i], &error), error);
    ASSERT_OK(tms_free_address(&f->saver, paused, &error), error); /* holds no memory */
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.deferred_frees, 3);
    assert_int_equal(counters.deferred_bytes, 12 * MIB);
    assert_int_equal(counters.resident_bytes, 8 * MIB);
    assert_int_equal(physical_bytes(0) + physical_bytes(1), 20 * MIB);
    assert_int_equal(row_of(f, "a", TMS_NO_DEVICE, 0).deferred_bytes, 6 * MIB);
    assert_int_equal(row_of(f, "a", TMS_NO_DEVICE, 0).allocations, 0);
    assert_int_equal(row_of(f, "a", 1, 0).deferred_bytes, 4 * MIB);
    assert_int_equal(row_of(f, "b", TMS_NO_DEVICE, 0).deferred_bytes, 6 * MIB);
    assert_int_equal(row_of(f, "b", TMS_NO_DEVICE, 0).resident_bytes, 8 * MIB);
    assert_int_equal(row_of(f, NULL, 1, 1).deferred_bytes, 4 * MIB); /* the device */
    (void)tms_capture_end_of(&f->saver, capture);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.deferred_bytes, 0);
    assert_int_equal(physical_bytes(0) + physical_bytes(1), 8 * MIB);
    assert_int_equal(row_of(f, "b", TMS_NO_DEVICE, 0).deferred_bytes, 0);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_peak_is_the_most_that_was_mapped_at_once),
        TEST(a_resume_that_is_undone_raises_no_peak),
        TEST(a_pause_that_fails_raises_no_peak),
        TEST(rows_are_tags_and_then_devices),
        TEST(a_tag_or_a_device_can_be_selected),
        TEST(rows_beyond_the_capacity_are_counted_and_not_written),
        TEST(damaged_memory_is_neither_resident_nor_paused),
        TEST(calls_are_summed_up),
        TEST(memory_of_deferred_frees_is_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
