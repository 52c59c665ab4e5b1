#include "neighbours.h"

void make_neighbours(fixture_t *fixture, const char *tag, tms_backup_kind_t backup, uint64_t *addresses) {
    uint64_t first[NEIGHBOURS];
    for (int i = 0; i < NEIGHBOURS; i++) first[i] = allocate(fixture, tag, backup, NEIGHBOUR_BYTES);
    for (int i = 0; i < NEIGHBOURS; i++) addresses[i] = allocate(fixture, tag, backup, NEIGHBOUR_BYTES);
    for (int i = 0; i < NEIGHBOURS; i++) free_at(fixture, first[i]);
    for (int i = 1; i < NEIGHBOURS; i++) assert_int_equal(addresses[i], addresses[i - 1] + NEIGHBOUR_BYTES);
}

void make_run(fixture_t *fixture, const char *tag, tms_backup_kind_t backup, uint64_t *addresses) {
    tms_error_t error;
    make_neighbours(fixture, tag, backup, addresses);
    for (int cycle = 0; cycle < 2; cycle++) { /* if the test has freed memory of the tag, the first resume makes no run */
        ASSERT_OK(pause_tag(fixture, tag, &error), error);
        simulator()->clear_counts();
        ASSERT_OK(resume_tag(fixture, tag, &error), error);
    }
    assert_int_equal(simulator()->calls("cuMemCreate"), 1);
    assert_int_equal(tms_run_bytes(run_at(fixture, addresses[0])), NEIGHBOURS * NEIGHBOUR_BYTES);
    for (int i = 0; i < NEIGHBOURS; i++) fill(addresses[i], NEIGHBOUR_BYTES, (uint32_t)i);
}

tms_run_t *run_at(fixture_t *fixture, uint64_t address) {
    tms_registry_node_t *node = tms_registry_find(&fixture->saver.registry, address);
    assert_non_null(node);
    return tms_segment_of(node)->run;
}

uint64_t slack_bytes(fixture_t *fixture) {
    tms_counters_t counters;
    tms_inspect_counters(&fixture->saver, &counters);
    return counters.slack_bytes;
}

void free_at(fixture_t *fixture, uint64_t address) {
    tms_error_t error;
    ASSERT_OK(tms_free_address(&fixture->saver, address, &error), error);
}
