/* Guards the cost of thousands of segments, counted in segments visited and driver calls, so that the speed of the machine
 * does not matter. Work may grow with the number of segments, selected tags or allocations, and no faster. */

#include "support.h"

#include <stdio.h>
#include <string.h>

enum { NAME_BYTES = 32, STEPS_A_SEGMENT = 8 };

static const uint64_t SMALL = 2 * MIB;

static const char *name_of(char *name, int number) {
    (void)snprintf(name, NAME_BYTES, "request-%08d", number);
    return name;
}

static void allocate_some(fixture_t *f, int count, int tags) {
    char name[NAME_BYTES];
    for (int i = 0; i < count; i++) allocate(f, name_of(name, i % tags), TMS_BACKUP_NONE, SMALL);
}

/* ---- pause and resume ---- */

enum { SEGMENTS = 96 };

/* Steps of a pause and a resume of `selection`. */
static uint64_t steps_of_a_cycle(fixture_t *f, const tms_selection_t *selection) {
    tms_error_t error;
    tms_report_t report;
    uint64_t before = f->saver.steps;
    ASSERT_OK(pause_selected_with_report(f, selection, &report, &error), error);
    assert_int_equal(report.allocations, SEGMENTS);
    ASSERT_OK(resume_selected_with_report(f, selection, &report, &error), error);
    assert_int_equal(report.allocations, SEGMENTS);
    return f->saver.steps - before;
}

/* The last tag comes after all segments of the first one, where a search of the list for it cost most. */
static void a_pause_of_several_tags_looks_at_each_segment_a_few_times(void **state) {
    fixture_t *f = *state;
    const tms_selection_t all = {0};
    char name[NAME_BYTES];
    for (int i = 0; i < SEGMENTS; i++) allocate(f, i < SEGMENTS / 2 ? "a" : "b", TMS_BACKUP_NONE, SMALL);
    uint64_t steps = steps_of_a_cycle(f, &all);
    assert_true(steps >= 2 * SEGMENTS); /* they are counted */
    assert_true(steps <= (uint64_t)STEPS_A_SEGMENT * SEGMENTS);
    assert_int_equal(tms_tag_find(&f->regions.tags, "a")->pause_epoch, 1);
    assert_int_equal(tms_tag_find(&f->regions.tags, "b")->pause_epoch, 1);
    assert_null(tms_tag_find(&f->regions.tags, name_of(name, 0)));
}

static void a_selection_of_many_tags_costs_each_tag_and_each_segment_once(void **state) {
    fixture_t *f = *state;
    char names[SEGMENTS][NAME_BYTES];
    const char *tags[SEGMENTS];
    for (int i = 0; i < SEGMENTS; i++) tags[i] = name_of(names[i], i);
    allocate_some(f, SEGMENTS, SEGMENTS);
    uint64_t other = allocate(f, "other", TMS_BACKUP_NONE, SMALL);
    const tms_selection_t selection = {.tags = tags, .tag_count = SEGMENTS};
    assert_true(steps_of_a_cycle(f, &selection) <= (uint64_t)STEPS_A_SEGMENT * 2 * SEGMENTS);
    assert_int_equal(tms_tag_find(&f->regions.tags, "other")->pause_epoch, 0);
    assert_int_equal(state_of(f, other), TMS_SEGMENT_ACTIVE);
    for (int i = 0; i < SEGMENTS; i++) assert_int_equal(tms_tag_find(&f->regions.tags, tags[i])->pause_epoch, 1);
}

/* Each counts one pause, whatever other calls have marked in between. */
static void every_pause_counts_once_for_each_tag_that_it_changed(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    enum { CYCLES = 3 };
    for (int i = 0; i < SEGMENTS; i++) allocate(f, i % 2 ? "a" : "b", TMS_BACKUP_NONE, SMALL);
    for (int i = 0; i < CYCLES; i++) {
        ASSERT_OK(pause_tag(f, "a", &error), error);
        ASSERT_OK(pause_all(f, &error), error); /* the rest: b */
        ASSERT_OK(pause_all(f, &error), error); /* nothing */
        ASSERT_OK(resume_all(f, &error), error);
    }
    assert_int_equal(tms_tag_find(&f->regions.tags, "a")->pause_epoch, CYCLES);
    assert_int_equal(tms_tag_find(&f->regions.tags, "b")->pause_epoch, CYCLES);
}

/* ---- access for peers ---- */

static void use_device(fixture_t *f, int device) {
    const tms_error_context_t context = {.operation = "test", .device = device};
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, device, &context, &error), error);
    tms_devices_leave(&f->devices, device);
}

static tms_segment_t *segment_of(fixture_t *f, uint64_t address) {
    return tms_segment_of(tms_registry_find(&f->saver.registry, address));
}

/* Other code unmaps one, so that every attempt to share it fails. */
static void take_mapping(fixture_t *f, uint64_t address) {
    assert_int_equal(f->cuda->cuMemUnmap(address, SMALL), CUDA_SUCCESS);
}

static void restore_mapping(fixture_t *f, uint64_t address) {
    const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const tms_segment_t *segment = segment_of(f, address);
    assert_int_equal(f->cuda->cuMemMap(address, SMALL, 0, segment->run->handle, 0), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemSetAccess(address, SMALL, &access, 1), CUDA_SUCCESS);
}

/* Searches among `count` allocations on device 0, each of which shares itself once. */
static uint64_t looks_of(fixture_t *f, int count) {
    simulator()->clear_counts();
    for (int i = 0; i < count; i++) allocate(f, "a", TMS_BACKUP_NONE, SMALL);
    return simulator()->calls("cuMemSetAccess") - (uint64_t)count;
}

static void a_segment_that_cannot_be_shared_is_retried_less_and_less(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    enum { ALLOCATIONS = 62, LOOKS = 5 }; /* after 1, 2, 4, 8, 16 searches that have skipped it */
    uint64_t refused = allocate(f, "a", TMS_BACKUP_NONE, SMALL);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    take_mapping(f, refused);
    use_device(f, 1);
    assert_int_equal(looks_of(f, 1), 1);
    assert_int_equal(looks_of(f, ALLOCATIONS), LOOKS);
    /* An explicit request reports the failure each time, and resets the interval. */
    for (int i = 0; i < 2; i++) assert_int_equal(tms_peers_refresh(&f->saver, &error), TMS_DRIVER);
    assert_int_equal(error.address, refused);
    assert_int_equal(looks_of(f, 2), 1);
    restore_mapping(f, refused);
    ASSERT_OK(tms_peers_refresh(&f->saver, &error), error);
    assert_int_equal(tms_segment_accessible(segment_of(f, refused)), 3);
    assert_int_equal(looks_of(f, 2), 0); /* nothing is new */
}

static void a_pause_makes_the_next_allocation_look_again(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t refused = allocate(f, "a", TMS_BACKUP_NONE, SMALL), other = allocate(f, "b", TMS_BACKUP_NONE, SMALL);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    take_mapping(f, refused);
    use_device(f, 1);
    assert_int_equal(looks_of(f, 8), 3 + 1); /* the first, the third and the sixth; the first reaches `other` as well */
    assert_int_equal(tms_segment_accessible(segment_of(f, other)), 3);
    ASSERT_OK(pause_tag(f, "b", &error), error);
    assert_int_equal(looks_of(f, 1), 1);
    restore_mapping(f, refused);
}

/* The first look after it is at once, and the second after one allocation that skips it. */
static void a_new_device_begins_the_interval_again(void **state) {
    enum { MANY = 40 };
    fixture_t *f = *state;
    uint64_t refused = allocate(f, "a", TMS_BACKUP_NONE, SMALL);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    take_mapping(f, refused);
    use_device(f, 1);
    assert_true(looks_of(f, MANY) > 0);
    use_device(f, 2);
    simulator()->clear_counts();
    allocate(f, "a", TMS_BACKUP_NONE, SMALL);
    assert_true(simulator()->calls("cuMemSetAccess") > 1);
    assert_int_equal(looks_of(f, 2), 1);
    restore_mapping(f, refused);
}

static void memory_that_scans_have_skipped_begins_the_interval_again(void **state) {
    enum { MANY = 40 };
    fixture_t *f = *state;
    uint64_t refused = allocate(f, "a", TMS_BACKUP_NONE, SMALL);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    take_mapping(f, refused);
    use_device(f, 1);
    assert_true(looks_of(f, MANY) > 0);
    assert_int_equal(looks_of(f, 1), 0);
    pthread_mutex_lock(&f->saver.lock);
    const bool skipped = tms_peers_note_skipped(&f->saver, 1); /* as if it had been in transition since then */
    pthread_mutex_unlock(&f->saver.lock);
    assert_true(skipped);
    assert_true(looks_of(f, 1) > 0);
    restore_mapping(f, refused);
}

/* One call a device queries every allocation on it, not one call a segment. */
static void a_search_queries_each_owner_once(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t calls[2];
    for (int i = 0; i < 2; i++) {
        allocate_some(f, i == 0 ? 2 : SEGMENTS - 2, 1);
        f->saver.peers = (tms_peer_scans_t){0}; /* a search of everything */
        use_device(f, 1);
        simulator()->clear_counts();
        ASSERT_OK(tms_peers_refresh(&f->saver, &error), error);
        calls[i] = simulator()->calls("cuDevicePrimaryCtxGetState");
    }
    assert_int_equal(calls[0], calls[1]);
    assert_true(calls[0] > 0);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_of_several_tags_looks_at_each_segment_a_few_times),
        ONE(a_selection_of_many_tags_costs_each_tag_and_each_segment_once),
        ONE(every_pause_counts_once_for_each_tag_that_it_changed),
        TWO(a_segment_that_cannot_be_shared_is_retried_less_and_less),
        TWO(a_pause_makes_the_next_allocation_look_again),
        cmocka_unit_test_setup_teardown(a_new_device_begins_the_interval_again, setup_three_devices, teardown),
        TWO(memory_that_scans_have_skipped_begins_the_interval_again),
        TWO(a_search_queries_each_owner_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
