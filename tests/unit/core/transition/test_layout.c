/* Guards the layout of a resume (transition/layout.h): which neighbours share a run, what happens if a run does not fit, and
 * which kinds get none. */

#include "neighbours.h"

#include <stdlib.h>
#include <string.h>

#include "core/model/export.h"
#include "core/model/kinds.h"

/* Pauses and resumes all, and returns how many handles the resume has made. */
static uint64_t handles_of_cycle(fixture_t *f) {
    tms_error_t error;
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuMemMap"), simulator()->calls("cuMemCreate"));
    return simulator()->calls("cuMemCreate");
}

static void neighbours_share_a_run(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_sim_usage_t usage;
    uint64_t at[NEIGHBOURS];
    make_neighbours(f, "a", TMS_BACKUP_PINNED, at);
    for (int i = 0; i < NEIGHBOURS; i++) fill(at[i], NEIGHBOUR_BYTES, (uint32_t)i);
    simulator()->usage(0, &usage);
    assert_int_equal(usage.handles, NEIGHBOURS);
    assert_int_equal(usage.reservations, 1);
    assert_int_equal(handles_of_cycle(f), 1);
    simulator()->clear_counts();
    ASSERT_OK(pause_tag(f, "a", &error), error);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    assert_int_equal(simulator()->calls("cuMemRelease"), 1);
    assert_int_equal(handles_of_cycle(f), 1);
    for (int i = 0; i < NEIGHBOURS; i++) assert_filled(at[i], NEIGHBOUR_BYTES, (uint32_t)i);
}

static void a_hole_divides_a_run(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    tms_error_t error;
    make_neighbours(f, "a", TMS_BACKUP_NONE, at);
    ASSERT_OK(pause_all(f, &error), error);
    free_at(f, at[1]);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuMemCreate"), 2);
    assert_int_equal(tms_run_bytes(run_at(f, at[0])), NEIGHBOUR_BYTES);
    assert_int_equal(tms_run_bytes(run_at(f, at[2])), 2 * NEIGHBOUR_BYTES);
    assert_int_equal(slack_bytes(f), 0);
    assert_int_equal(physical_bytes(0), 3 * NEIGHBOUR_BYTES);
}

static void a_run_is_of_one_kind(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    make_neighbours(f, "a", TMS_BACKUP_NONE, at);
    make_neighbours(f, "b", TMS_BACKUP_NONE, at);
    make_neighbours(f, "a", TMS_BACKUP_PINNED, at);
    for (int i = 0; i < NEIGHBOURS; i++) (void)allocate_on(f, 1, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    assert_int_equal(handles_of_cycle(f), 3 + 3); /* on device 1 there are ranges of 1, 1 and 2 */
    for (tms_registry_node_t *node = f->saver.registry.first; node; node = node->next) {
        const tms_segment_t *segment = tms_segment_of(node);
        assert_int_equal(segment->run->device, segment->device);
        assert_ptr_equal(segment->run->tag, segment->tag);
    }
}

/* Only what a call resumes is in its runs. */
static void a_run_is_of_what_comes_back_together(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    tms_error_t error;
    make_neighbours(f, "a", TMS_BACKUP_NONE, at);
    ASSERT_OK(pause_all(f, &error), error);
    free_at(f, at[1]);
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[1]); /* ACTIVE between paused ones */
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuMemCreate"), 2);
    assert_int_equal(handles_of_cycle(f), 1);
}

static void a_run_has_a_largest_size(void **state) {
    fixture_t *f = *state;
    enum { SEGMENTS = 8 };
    uint64_t at[SEGMENTS];
    for (int i = 0; i < SEGMENTS; i++) at[i] = allocate(f, "a", TMS_BACKUP_NONE, TMS_MAX_RUN_BYTES * 3 / 8);
    const uint64_t handles = handles_of_cycle(f); /* ranges of 1, 1, 2 and 4; two segments fit into a run */
    assert_int_equal(handles, 1 + 1 + 1 + 2);
    for (int i = 0; i < SEGMENTS; i++) assert_true(tms_run_bytes(run_at(f, at[i])) <= TMS_MAX_RUN_BYTES);
    assert_int_equal(physical_bytes(0), 3 * TMS_MAX_RUN_BYTES);
}

static void a_run_may_have_exactly_the_largest_size(void **state) {
    fixture_t *f = *state;
    enum { SEGMENTS = 4 };
    uint64_t first[SEGMENTS], at[SEGMENTS];
    for (int i = 0; i < SEGMENTS; i++) first[i] = allocate(f, "a", TMS_BACKUP_NONE, TMS_MAX_RUN_BYTES / SEGMENTS);
    for (int i = 0; i < SEGMENTS; i++) at[i] = allocate(f, "a", TMS_BACKUP_NONE, TMS_MAX_RUN_BYTES / SEGMENTS);
    for (int i = 0; i < SEGMENTS; i++) free_at(f, first[i]);
    assert_int_equal(handles_of_cycle(f), 1);
    assert_int_equal(tms_run_bytes(run_at(f, at[0])), TMS_MAX_RUN_BYTES);
}

static void a_handle_of_its_own_was_asked_for(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    make_neighbours(f, "a", TMS_BACKUP_NONE, at);
    tms_segment_of(tms_registry_find(&f->saver.registry, at[1]))->own_handle = true;
    assert_int_equal(handles_of_cycle(f), 3);
    assert_int_equal(tms_run_bytes(run_at(f, at[1])), NEIGHBOUR_BYTES);
}

/* An importer maps all of a handle, and the program may send any memory of the kind next. */
static void a_kind_that_was_sent_gets_no_runs(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_export_t exported;
    uint64_t at[NEIGHBOURS], other[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    make_run(f, "b", TMS_BACKUP_NONE, other);
    ASSERT_OK(tms_export_memory(&f->saver, at[1], &exported, &error), error);
    assert_int_equal(exported.bytes, NEIGHBOURS * NEIGHBOUR_BYTES); /* it lies in that run already */
    for (int i = 0; i < 2; i++) assert_int_equal(handles_of_cycle(f), NEIGHBOURS + 1);
    ASSERT_OK(tms_export_memory(&f->saver, at[1], &exported, &error), error);
    assert_int_equal(exported.address, at[1]);
    assert_int_equal(exported.bytes, NEIGHBOUR_BYTES);
}

/* ---- what does not fit ---- */

static void a_run_that_does_not_fit_is_tried_with_half_of_it(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_PINNED, at);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemCreate", 0, 2, CUDA_ERROR_OUT_OF_MEMORY);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    /* 4: refused, 2: refused, then 1, 1 and 2. */
    assert_int_equal(simulator()->calls("cuMemCreate"), 2 + 3);
    assert_int_equal(tms_run_bytes(run_at(f, at[0])), NEIGHBOUR_BYTES);
    assert_int_equal(tms_run_bytes(run_at(f, at[2])), 2 * NEIGHBOUR_BYTES);
    for (int i = 0; i < NEIGHBOURS; i++) assert_filled(at[i], NEIGHBOUR_BYTES, (uint32_t)i);
    assert_int_equal(handles_of_cycle(f), 1);
}

static void a_resume_that_finds_too_little_memory_leaves_no_run(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_sim_usage_t usage;
    uint64_t at[NEIGHBOURS], other[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_PINNED, at);
    make_run(f, "b", TMS_BACKUP_NONE, other);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->usage(0, &usage);
    assert_int_equal(simulator()->take_memory(0, (int64_t)(256 * MIB - 7 * NEIGHBOUR_BYTES)), 0); /* room for 7 of 8 */
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(physical_bytes(0), 0);
    for (int i = 0; i < NEIGHBOURS; i++) {
        assert_int_equal(state_of(f, at[i]), TMS_SEGMENT_PAUSED);
        assert_null(run_at(f, at[i]));
        assert_null(run_at(f, other[i]));
    }
    assert_int_equal(simulator()->take_memory(0, -(int64_t)NEIGHBOUR_BYTES), 0);
    ASSERT_OK(resume_all(f, &error), error); /* now it fits exactly, as with a handle a segment */
    for (int i = 0; i < NEIGHBOURS; i++) assert_filled(at[i], NEIGHBOUR_BYTES, (uint32_t)i);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(256 * MIB - 8 * NEIGHBOUR_BYTES)), 0);
}

static void a_failed_resume_undoes_its_runs(void **state) {
    fixture_t *f = *state;
    static const char *const calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync"};
    uint64_t at[NEIGHBOURS], other[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_PINNED, at);
    make_run(f, "b", TMS_BACKUP_PINNED, other);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        ASSERT_OK(pause_all(f, &error), error);
        simulator()->fail_after(calls[i], 1, 1, CUDA_ERROR_UNKNOWN); /* of the second run */
        assert_int_equal(resume_all(f, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_int_equal(physical_bytes(0), 0);
        assert_null(run_at(f, at[0]));
        ASSERT_OK(resume_all(f, &error), error);
        for (int k = 0; k < NEIGHBOURS; k++) assert_filled(at[k], NEIGHBOUR_BYTES, (uint32_t)k);
        assert_nothing_waits(&f->saver);
    }
}

/* Access is not granted, also because memory is short, and the driver does not unmap: no half is tried at these addresses.
 */
static void a_run_that_cannot_be_undone_is_damaged_and_not_halved(void **state) {
    fixture_t *f = *state;
    static const struct {
        CUresult result;
        tms_status_t status;
    } failures[] = {{CUDA_ERROR_UNKNOWN, TMS_DRIVER}, {CUDA_ERROR_OUT_OF_MEMORY, TMS_OUT_OF_DEVICE_MEMORY}};
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_PINNED, at);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    for (size_t i = 0; i < 2; i++) {
        tms_error_t error;
        ASSERT_OK(pause_all(f, &error), error);
        simulator()->fail_after("cuMemSetAccess", 0, 1, failures[i].result);
        simulator()->fail_after("cuMemUnmap", 0, 2, CUDA_ERROR_UNKNOWN); /* by the mapping, and by the call */
        simulator()->clear_counts();
        assert_int_equal(resume_all(f, &error), failures[i].status);
        assert_int_equal(simulator()->calls("cuMemCreate"), 1);
        for (int k = 0; k < NEIGHBOURS; k++) assert_int_equal(state_of(f, at[k]), TMS_SEGMENT_DAMAGED);
        assert_int_equal(physical_bytes(0), NEIGHBOURS * NEIGHBOUR_BYTES);
        ASSERT_OK(resume_all(f, &error), error); /* repaired, then resumed */
        for (int k = 0; k < NEIGHBOURS; k++) assert_filled(at[k], NEIGHBOUR_BYTES, (uint32_t)k);
        assert_nothing_waits(&f->saver);
    }
}

/* The segment with the most contents comes first in a resume. It is the last of the run. */
static void the_first_to_be_restored_may_be_in_the_last_half(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const uint64_t bytes[NEIGHBOURS] = {2 * MIB, 2 * MIB, 2 * MIB, 6 * MIB};
    uint64_t at[NEIGHBOURS], first = allocate(f, "a", TMS_BACKUP_PINNED, 16 * MIB); /* the next range is as large */
    for (uint32_t i = 0; i < NEIGHBOURS; i++) {
        at[i] = allocate(f, "a", TMS_BACKUP_PINNED, bytes[i]);
        fill(at[i], bytes[i], i);
    }
    free_at(f, first);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(physical_bytes(0), 12 * MIB);
    for (uint32_t i = 0; i < NEIGHBOURS; i++) assert_filled(at[i], bytes[i], i);
}

/* ---- kinds that free ---- */

static void a_kind_that_frees_gets_no_runs_at_the_next_resume(void **state) {
    fixture_t *f = *state;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[3]); /* a quarter of its bytes */
    assert_int_equal(handles_of_cycle(f), 3);
    assert_int_equal(handles_of_cycle(f), 1);
    free_at(f, at[2]);
    assert_int_equal(handles_of_cycle(f), 2);
    free_at(f, at[1]); /* counts, although this leaves no slack */
    assert_int_equal(slack_bytes(f), 0);
    assert_int_equal(allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES), at[1]);
    assert_int_equal(handles_of_cycle(f), 2);
    assert_int_equal(handles_of_cycle(f), 1);
}

/* A failed resume decides nothing: the next one follows the same frees. */
static void a_resume_that_fails_forgets_no_frees(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[3]);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemMap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuMemCreate"), 3);
}

/* Memory that was never resumed, or is paused, had a handle of its own or had none. */
static void other_frees_do_not_count(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOURS * NEIGHBOUR_BYTES));
    ASSERT_OK(pause_all(f, &error), error);
    free_at(f, at[3]);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuMemCreate"), 1);
}

static void little_slack_changes_nothing(void **state) {
    fixture_t *f = *state;
    enum { SEGMENTS = 16 };
    uint64_t at[SEGMENTS];
    for (int i = 0; i < SEGMENTS; i++) at[i] = allocate(f, "a", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    assert_int_equal(handles_of_cycle(f), 5); /* ranges of 1, 1, 2, 4 and 8 */
    free_at(f, at[SEGMENTS - 1]);
    free_at(f, at[SEGMENTS - 2]); /* an eighth */
    assert_int_equal(slack_bytes(f), 2 * NEIGHBOUR_BYTES);
    assert_int_equal(handles_of_cycle(f), 5);
}

static void an_allocation_names_the_slack_of_others(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS], address = 0;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    free_at(f, at[0]);
    free_at(f, at[2]);
    tms_tag_t *tag = NULL;
    ASSERT_OK(tms_tag_intern(&f->regions.tags, "b", &tag, &error), error);
    const tms_region_t region = {.tag = tag, .managed = true};
    const uint64_t room = 256 * MIB - physical_bytes(0);
    assert_int_equal(tms_allocation_create(&f->saver, &region, room + NEIGHBOUR_BYTES, 0, &address, &error),
                     TMS_OUT_OF_DEVICE_MEMORY);
    assert_non_null(strstr(error.message, "4.0 MiB are slack"));
    assert_non_null(strstr(error.message, "'a' 4.0 MiB"));
    assert_non_null(strstr(error.message, "pause(tag, backup=\"host\") and resume(tag)"));
    assert_int_equal(handles_of_cycle(f), 2);
    ASSERT_OK(tms_allocation_create(&f->saver, &region, room + NEIGHBOUR_BYTES, 0, &address, &error), error);
}

static void a_resume_names_the_slack_of_others(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS];
    make_run(f, "a", TMS_BACKUP_NONE, at);
    const uint64_t large = 256 * MIB - physical_bytes(0);
    (void)allocate(f, "b", TMS_BACKUP_NONE, large);
    ASSERT_OK(pause_tag(f, "b", &error), error);
    assert_int_equal(simulator()->take_memory(0, NEIGHBOUR_BYTES), 0);
    free_at(f, at[1]);
    assert_int_equal(resume_tag(f, "b", &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_non_null(strstr(error.message, "2.0 MiB are slack"));
    ASSERT_OK(pause_tag(f, "a", &error), error);
    ASSERT_OK(resume_tag(f, "b", &error), error);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)NEIGHBOUR_BYTES), 0);
}

/* Also where undoing the resume has failed, and nothing else is said about the shortage. */
static void a_resume_that_leaves_damage_names_slack(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t at[NEIGHBOURS], first, large;
    make_run(f, "a", TMS_BACKUP_NONE, at);
    first = allocate(f, "b", TMS_BACKUP_NONE, NEIGHBOUR_BYTES);
    large = allocate(f, "c", TMS_BACKUP_NONE, 128 * MIB);
    ASSERT_OK(pause_tag(f, "b", &error), error);
    ASSERT_OK(pause_tag(f, "c", &error), error);
    free_at(f, at[1]);
    const int64_t taken = (int64_t)(128 * MIB);
    assert_int_equal(simulator()->take_memory(0, taken), 0);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    simulator()->fail_after("cuMemRelease", 0, 1, CUDA_ERROR_UNKNOWN); /* undoing the first of them */
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(state_of(f, first), TMS_SEGMENT_DAMAGED);
    assert_int_equal(state_of(f, large), TMS_SEGMENT_PAUSED);
    assert_non_null(strstr(error.message, "2.0 MiB are slack"));
    assert_int_equal(simulator()->take_memory(0, -taken), 0);
    tms_reclaim_all(&f->saver);
}

#define ONE_DEVICE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE_DEVICE(neighbours_share_a_run),
        ONE_DEVICE(a_hole_divides_a_run),
        cmocka_unit_test_setup_teardown(a_run_is_of_one_kind, setup_two_devices, teardown),
        ONE_DEVICE(a_run_is_of_what_comes_back_together),
        cmocka_unit_test_setup_teardown(a_run_has_a_largest_size, setup_large_device, teardown),
        cmocka_unit_test_setup_teardown(a_run_may_have_exactly_the_largest_size, setup_large_device, teardown),
        ONE_DEVICE(a_handle_of_its_own_was_asked_for),
        ONE_DEVICE(a_kind_that_was_sent_gets_no_runs),
        ONE_DEVICE(a_run_that_does_not_fit_is_tried_with_half_of_it),
        ONE_DEVICE(a_resume_that_finds_too_little_memory_leaves_no_run),
        ONE_DEVICE(a_failed_resume_undoes_its_runs),
        ONE_DEVICE(a_run_that_cannot_be_undone_is_damaged_and_not_halved),
        ONE_DEVICE(the_first_to_be_restored_may_be_in_the_last_half),
        ONE_DEVICE(a_kind_that_frees_gets_no_runs_at_the_next_resume),
        ONE_DEVICE(a_resume_that_fails_forgets_no_frees),
        ONE_DEVICE(other_frees_do_not_count),
        ONE_DEVICE(little_slack_changes_nothing),
        ONE_DEVICE(an_allocation_names_the_slack_of_others),
        ONE_DEVICE(a_resume_names_the_slack_of_others),
        ONE_DEVICE(a_resume_that_leaves_damage_names_slack),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
