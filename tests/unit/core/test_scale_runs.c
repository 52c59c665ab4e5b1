/* Guards the cost of tens of thousands of segments in runs and in address ranges, counted in driver calls and in free spans
 * that were compared, so that the speed of the machine does not matter. The rest of test_scale.c. */

#include "support.h"

#include <stdio.h>
#include <stdlib.h>

#include "core/allocation/free.h"
#include "core/model/kinds.h"
#include "core/model/ranges.h"

enum { MANY = 50000, NAME_BYTES = 32, STEPS_A_SEGMENT = 8 };

static const uint64_t SMALL = 2 * MIB;

/* A segment with addresses and without memory, as the first half of an allocation makes it: the simulated GPU would write to
 * the memory of each. */
static tms_segment_t *make_segment(fixture_t *f, const char *tag) {
    const tms_error_context_t context = {.operation = "test", .device = 0};
    tms_segment_t *segment = calloc(1, sizeof *segment);
    tms_error_t error;
    assert_non_null(segment);
    ASSERT_OK(tms_tag_intern(&f->regions.tags, tag, &segment->tag, &error), error);
    segment->bytes = segment->backup.bytes = SMALL;
    ASSERT_OK(tms_ranges_take(&f->saver, segment, SMALL, f->cuda, &context, &error), error);
    return segment;
}

static uint64_t reserved_bytes(const fixture_t *f) {
    uint64_t bytes = 0;
    for (const tms_kind_t *kind = f->saver.kinds; kind; kind = kind->next) bytes += kind->space.reserved_bytes;
    return bytes;
}

static uint64_t compared_spans(const fixture_t *f) {
    uint64_t steps = 0;
    for (const tms_kind_t *kind = f->saver.kinds; kind; kind = kind->next) steps += kind->space.steps;
    return steps;
}

/* ---- addresses ---- */

static void dispose_of_all(fixture_t *f, tms_segment_t **segments) {
    for (int i = 0; i < MANY; i++) (void)tms_free_release_segment(&f->saver, segments[i], tms_quiesced_without_users());
    assert_int_equal(reserved_bytes(f), 0);
    assert_int_equal(simulator()->calls("cuMemAddressFree"), simulator()->calls("cuMemAddressReserve"));
}

static void a_tag_of_one_segment_reserves_no_more_than_twice_its_bytes(void **state) {
    fixture_t *f = *state;
    char name[NAME_BYTES];
    tms_segment_t **segments = calloc(MANY, sizeof(void *));
    assert_non_null(segments);
    for (int i = 0; i < MANY; i++) {
        (void)snprintf(name, sizeof name, "request-%08d", i);
        segments[i] = make_segment(f, name);
    }
    assert_true(reserved_bytes(f) <= 2 * MANY * SMALL);
    assert_int_equal(simulator()->calls("cuMemAddressReserve"), MANY);
    assert_true(compared_spans(f) <= MANY);
    dispose_of_all(f, segments);
    free(segments);
}

/* The logarithm of their number, while ranges double, and then one for each 64 GiB. */
static void one_tag_needs_few_ranges(void **state) {
    fixture_t *f = *state;
    enum { MAX_RANGES = 24 };
    tms_segment_t **segments = calloc(MANY, sizeof(void *));
    assert_non_null(segments);
    for (int i = 0; i < MANY; i++) {
        segments[i] = make_segment(f, "a");
        assert_true(reserved_bytes(f) <= 2 * (uint64_t)(i + 1) * SMALL);
    }
    assert_true(simulator()->calls("cuMemAddressReserve") <= MAX_RANGES);
    assert_true(compared_spans(f) <= (uint64_t)STEPS_A_SEGMENT * MANY);
    dispose_of_all(f, segments);
    free(segments);
}

/* ---- runs ---- */

/* Publishes a segment as one that is paused. */
static void publish_paused(fixture_t *f, tms_segment_t *segment) {
    segment->tag->used = true;
    tms_registry_insert(&f->saver.registry, &segment->node);
    tms_account_publish(&f->saver.account, segment);
    tms_account_settle(&f->saver.account, segment, TMS_SEGMENT_PAUSED, (tms_event_t){.kind = TMS_EVENT_REPAIR});
}

static void runs_cost_as_much_as_their_number(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    for (int i = 0; i < MANY; i++) publish_paused(f, make_segment(f, "a"));
    const uint64_t ranges = simulator()->calls("cuMemAddressReserve");
    const uint64_t runs = MANY * SMALL / TMS_MAX_RUN_BYTES + 1 + ranges; /* each range may end with a small one */
    for (int cycle = 0; cycle < 2; cycle++) {
        simulator()->clear_counts();
        uint64_t steps = f->saver.steps;
        ASSERT_OK(resume_with_report(f, "a", &report, &error), error);
        assert_int_equal(report.allocations, MANY);
        assert_int_equal(physical_bytes(0), MANY * SMALL);
        assert_true(simulator()->calls("cuMemCreate") <= runs);
        assert_int_equal(simulator()->calls("cuMemSetAccess"), simulator()->calls("cuMemCreate"));
        if (cycle == 0) {
            ASSERT_OK(pause_with_report(f, "a", &report, &error), error);
            assert_int_equal(report.allocations, MANY);
            assert_int_equal(simulator()->calls("cuMemUnmap"), simulator()->calls("cuMemCreate"));
        }
        assert_true(f->saver.steps - steps <= (uint64_t)STEPS_A_SEGMENT * MANY);
    }
    /* Every second one, so that no free span joins another, and then the rest. */
    const uint64_t created = simulator()->calls("cuMemCreate"), compared = compared_spans(f);
    uint64_t *addresses = calloc(MANY, sizeof *addresses);
    assert_non_null(addresses);
    int count = 0;
    for (tms_registry_node_t *node = f->saver.registry.first; node; node = node->next) addresses[count++] = node->begin;
    assert_int_equal(count, MANY);
    for (int first = 0; first < 2; first++) {
        for (int i = first; i < MANY; i += 2) ASSERT_OK(tms_free_address(&f->saver, addresses[i], &error), error);
        /* The first range has one segment, whose run went back with it. */
        if (first == 0) assert_int_equal(physical_bytes(0), (MANY - 1) * SMALL);
    }
    free(addresses);
    assert_int_equal(physical_bytes(0), 0);
    assert_int_equal(simulator()->calls("cuMemUnmap"), created);
    assert_int_equal(compared_spans(f), compared); /* a free searches nothing */
    assert_int_equal(reserved_bytes(f), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_tag_of_one_segment_reserves_no_more_than_twice_its_bytes, setup_one_device,
                                        teardown),
        cmocka_unit_test_setup_teardown(one_tag_needs_few_ranges, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(runs_cost_as_much_as_their_number, setup_huge_device, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
