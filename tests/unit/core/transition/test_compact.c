/* Guards a compaction (transition/compact.h): which segments it moves, what they keep, and how it fails. */

#include "core/transition/compact.h"
#include "core/transition/pause.h"
#include "core/transition/resume.h"
#include "neighbours.h"

#include <string.h>

static tms_status_t compact(fixture_t *f, const char *tag, tms_report_t *report, tms_error_t *error) {
    const tms_selection_t selection = {.tags = tag ? &tag : NULL, .tag_count = tag != NULL};
    return tms_transition_compact(&f->saver, &selection, report, error);
}

static void slack_goes_and_contents_stay(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t at[NEIGHBOURS], whole[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at); /* also where the region drops contents */
    make_run(f, "b", TMS_BACKUP_NONE, whole);
    free_at(f, at[1]);
    const tms_run_t *untouched = run_at(f, whole[0]);
    simulator()->clear_counts();
    ASSERT_OK(compact(f, NULL, &report, &error), error);
    assert_int_equal(report.bytes, NEIGHBOUR_BYTES);
    assert_int_equal(report.allocations, NEIGHBOURS - 1);
    assert_int_equal(report.copied_bytes, (NEIGHBOURS - 1) * NEIGHBOUR_BYTES);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    assert_ptr_equal(run_at(f, whole[0]), untouched);
    assert_int_equal(slack_bytes(f), 0);
    assert_int_equal(physical_bytes(0), (2 * NEIGHBOURS - 1) * NEIGHBOUR_BYTES);
    for (int i = 0; i < NEIGHBOURS; i++) {
        assert_filled(whole[i], NEIGHBOUR_BYTES, (uint32_t)i);
        if (i != 1) assert_filled(at[i], NEIGHBOUR_BYTES, (uint32_t)i);
        if (i != 1) assert_int_equal(state_of(f, at[i]), TMS_SEGMENT_ACTIVE);
    }
    /* The region still drops contents. */
    tms_counters_t counters;
    tms_saver_counters(&f->saver, &counters);
    assert_int_equal(counters.host_backup_bytes, 0);
    ASSERT_OK(pause_tag(f, "a", &report, &error), error);
    assert_int_equal(report.copied_bytes, 0);
}

/* check_fresh() must still find what the program has not written since the last resume. */
static void where_contents_are_from_is_kept(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_segment_info_t before, after;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    assert_int_equal(tms_saver_find(&f->saver, at[0], &before), TMS_OK);
    assert_int_equal(before.contents, TMS_CONTENTS_UNDEFINED);
    ASSERT_OK(compact(f, "a", NULL, &error), error);
    assert_int_equal(tms_saver_find(&f->saver, at[0], &after), TMS_OK);
    assert_int_equal(after.contents, TMS_CONTENTS_UNDEFINED);
}

static void without_slack_there_is_nothing_to_do(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t at[NEIGHBOURS], other[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    make_run(f, "b", TMS_BACKUP_NONE, other);
    free_at(f, other[0]);
    simulator()->clear_counts();
    ASSERT_OK(compact(f, "a", &report, &error), error);
    assert_int_equal(report.bytes, 0);
    assert_int_equal(report.allocations, 0);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
    assert_int_equal(slack_bytes(f), NEIGHBOUR_BYTES);
}

/* A compaction is no cycle of the program's: the kind keeps its runs. */
static void a_compacted_kind_keeps_its_runs(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[3]);
    ASSERT_OK(compact(f, "a", NULL, &error), error);
    assert_int_equal(tms_run_bytes(run_at(f, at[0])), 3 * NEIGHBOUR_BYTES);
    assert_int_equal(slack_bytes(f), 0);
}

static void memory_that_was_paused_stays_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS], paused = allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    ASSERT_OK(pause_tag(f, "a", NULL, &error), error);
    make_run(f, "b", TMS_BACKUP_NONE, at);
    free_at(f, at[2]);
    ASSERT_OK(compact(f, NULL, NULL, &error), error);
    assert_int_equal(state_of(f, paused), TMS_SEGMENT_PAUSED);
    assert_int_equal(state_of(f, at[0]), TMS_SEGMENT_ACTIVE);
    assert_int_equal(slack_bytes(f), 0);
}

/* Another thread pauses the tag between the halves of a compaction: when its call has returned, the memory stays paused. */
static void a_pause_in_between_wins(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t at[NEIGHBOURS], slack = 0;
    const tms_selection_t all = {.tags = NULL};
    const tms_selection_t first_half = {.has_backup = 1, .backup = TMS_BACKUP_PINNED};
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    ASSERT_OK(tms_transition_pause_slack(&f->saver, &first_half, 1, &slack, &report, &error), error);
    assert_int_equal(slack, NEIGHBOUR_BYTES);
    ASSERT_OK(pause_tag(f, "a", NULL, &error), error);
    ASSERT_OK(tms_transition_resume_compacted(&f->saver, &all, 1, &report, &error), error);
    assert_int_equal(report.allocations, 0);
    assert_int_equal(state_of(f, at[0]), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_tag(f, "a", NULL, &error), error);
    assert_filled(at[0], NEIGHBOUR_BYTES, 0);
}

/* Stands in for the driver's cuMemRelease, which fails for one handle. */
static CUmemGenericAllocationHandle refused;
static CUresult (*release)(CUmemGenericAllocationHandle);
static CUresult release_others(CUmemGenericAllocationHandle handle) {
    return handle == refused ? CUDA_ERROR_UNKNOWN : release(handle);
}

static void damaged_memory_elsewhere_is_no_failure(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS], damaged = allocate(f, "b", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    tms_driver_table_t *driver = (tms_driver_table_t *)(uintptr_t)f->cuda; /* the next setup loads another */
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    refused = run_at(f, damaged)->handle;
    release = driver->cuMemRelease;
    driver->cuMemRelease = release_others;
    assert_int_equal(pause_tag(f, "b", NULL, &error), TMS_DRIVER);
    ASSERT_OK(compact(f, NULL, NULL, &error), error);
    assert_int_equal(slack_bytes(f), 0);
    assert_int_equal(state_of(f, at[0]), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, damaged), TMS_SEGMENT_DAMAGED);
    driver->cuMemRelease = release;
}

static void the_lock_of_a_device_is_kept(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    const tms_selection_t exclusive = {.exclusive = 1};
    make_neighbours(f, "a", TMS_BACKUP_NONE, at);
    ASSERT_OK(pause_tag(f, "a", NULL, &error), error);
    ASSERT_OK(resume_selected(f, &exclusive, NULL, &error), error);
    free_at(f, at[1]);
    ASSERT_OK(compact(f, "a", NULL, &error), error);
    for (int i = 0; i < NEIGHBOURS; i++) {
        if (i != 1) assert_true(tms_segment_of(tms_registry_find(&f->saver.registry, at[i]))->exclusive);
    }
    assert_int_equal(f->saver.device_locks.device[0].count, NEIGHBOURS - 1);
    ASSERT_OK(pause_tag(f, "a", NULL, &error), error);
    assert_int_equal(f->saver.device_locks.device[0].count, 0);
}

static void a_failure_before_the_commit_changes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(compact(f, "a", NULL, &error), TMS_DRIVER);
    assert_int_equal(slack_bytes(f), NEIGHBOUR_BYTES);
    assert_int_equal(state_of(f, at[0]), TMS_SEGMENT_ACTIVE);
    assert_filled(at[0], NEIGHBOUR_BYTES, 0);
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[1]);
}

static void a_failed_second_half_says_what_is_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[1]);
    simulator()->fail_after("cuMemCreate", 0, 16, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(compact(f, "a", NULL, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_non_null(strstr(error.message, "what it has paused stays paused, with its contents in host memory"));
    assert_int_equal(state_of(f, at[0]), TMS_SEGMENT_PAUSED);
    simulator()->fail_after("cuMemCreate", 0, 0, 0);
    ASSERT_OK(resume_tag(f, "a", NULL, &error), error);
    for (int i = 0; i < NEIGHBOURS; i++) {
        if (i != 1) assert_filled(at[i], NEIGHBOUR_BYTES, (uint32_t)i);
    }
    assert_nothing_waits(&f->saver);
}

/* Two runs with slack. The driver will not unmap the first. */
static void make_two_of_which_one_is_not_released(fixture_t *f, uint64_t at[NEIGHBOURS], uint64_t other[NEIGHBOURS]) {
    make_run(f, "a", TMS_BACKUP_NONE, at);
    make_run(f, "b", TMS_BACKUP_NONE, other);
    free_at(f, at[1]);
    free_at(f, other[1]);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
}

static void a_run_that_is_not_released_is_damaged_and_the_rest_comes_back(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS], other[NEIGHBOURS];
    make_two_of_which_one_is_not_released(f, at, other);
    assert_int_equal(compact(f, NULL, NULL, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemUnmap");
    assert_non_null(strstr(error.message, "all others are paused. The compaction has resumed those."));
    assert_int_equal(state_of(f, other[0]), TMS_SEGMENT_ACTIVE);
    assert_filled(other[0], NEIGHBOUR_BYTES, 0);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled(at[0], NEIGHBOUR_BYTES, 0);
    assert_nothing_waits(&f->saver);
}

/* Both halves fail: the error is that of the first, and says what is paused. */
static void both_halves_may_fail(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS], other[NEIGHBOURS];
    make_two_of_which_one_is_not_released(f, at, other);
    simulator()->fail_after("cuMemCreate", 0, 64, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(compact(f, NULL, NULL, &error), TMS_DRIVER);
    assert_int_equal(error.status, TMS_DRIVER);
    assert_string_equal(error.call, "cuMemUnmap");
    assert_non_null(strstr(error.message, "what it has paused stays paused"));
    assert_int_equal(state_of(f, other[0]), TMS_SEGMENT_PAUSED);
    simulator()->fail_after("cuMemCreate", 0, 0, 0);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled(at[0], NEIGHBOUR_BYTES, 0);
    assert_filled(other[0], NEIGHBOUR_BYTES, 0);
    assert_nothing_waits(&f->saver);
}

#define ONE_DEVICE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE_DEVICE(slack_goes_and_contents_stay),
        ONE_DEVICE(where_contents_are_from_is_kept),
        ONE_DEVICE(without_slack_there_is_nothing_to_do),
        ONE_DEVICE(a_compacted_kind_keeps_its_runs),
        ONE_DEVICE(memory_that_was_paused_stays_paused),
        ONE_DEVICE(a_pause_in_between_wins),
        ONE_DEVICE(damaged_memory_elsewhere_is_no_failure),
        ONE_DEVICE(the_lock_of_a_device_is_kept),
        ONE_DEVICE(a_failure_before_the_commit_changes_nothing),
        ONE_DEVICE(a_failed_second_half_says_what_is_paused),
        ONE_DEVICE(a_run_that_is_not_released_is_damaged_and_the_rest_comes_back),
        ONE_DEVICE(both_halves_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
