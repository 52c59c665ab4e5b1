/* Guards live bytes: which bytes one call keeps. */
#include "support/choice_fixture.h"

/* ---- which bytes are live ---- */

typedef struct knowledge {
    fixture_t *fixture;
    tms_live_t live;
    int asked, result;
    uint64_t waits; /* for devices, before it was asked */
} knowledge_t;

static int32_t tell(void *context, tms_live_t *live) {
    knowledge_t *knowledge = context;
    knowledge->asked++;
    knowledge->waits = simulator()->calls("cuCtxSynchronize");
    *live = knowledge->live;
    return knowledge->result;
}

static tms_status_t pause_knowing(fixture_t *f, knowledge_t *knowledge, tms_report_t *report, tms_error_t *error) {
    tms_selection_t selection = {.find_live = tell, .live_context = knowledge};
    simulator()->clear_counts();
    return pause_selected_with_report(f, &selection, report, error);
}

static void only_live_bytes_are_kept(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    enum { KIB = 1024 };
    uint64_t bytes = 4 * MIB;
    uint64_t thinned = allocate(f, "a", TMS_BACKUP_PINNED, bytes), whole = allocate(f, "a", TMS_BACKUP_MMAP, bytes);
    /* Two adjacent ranges, one separate, and the rest of the segment behind a gap. */
    const tms_live_range_t ranges[] = {{thinned, thinned + 64 * KIB},
                                       {thinned + 64 * KIB, thinned + 128 * KIB},
                                       {thinned + MIB, thinned + MIB + 512},
                                       {thinned + 3 * MIB, thinned + 4 * MIB}};
    const uint64_t kept = 128 * KIB + 512 + MIB;
    knowledge_t knowledge = {.live = {.allocations = &thinned, .allocation_count = 1, .ranges = ranges, .range_count = 4}};
    for (int cycle = 0; cycle < 2; cycle++) {
        fill(thinned, bytes, 1);
        fill(whole, bytes, 2);
        ASSERT_OK(pause_knowing(f, &knowledge, &report, &error), error);
        assert_int_equal(knowledge.waits, 1); /* called after the wait for the devices */
        assert_int_equal(report.copied_bytes, kept + bytes);
        ASSERT_OK(tms_inspect_host_backup(&f->saver, thinned + 100, 128 * KIB - 100, &buffer, &host, &error), error);
        assert_non_null(host);
        assert_memory_equal(host, (uint8_t *)buffer->memory + 100, 1);
        tms_host_buffer_drop(buffer);
        ASSERT_OK(tms_inspect_host_backup(&f->saver, thinned + 100, 128 * KIB, &buffer, &host, &error), error);
        assert_null(host); /* not kept whole */
        ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
        assert_int_equal(report.copied_bytes, kept + bytes);
        assert_filled(whole, bytes, 2);
        assert_filled_part(thinned, 0, 128 * KIB, 1);
        assert_filled_part(thinned, MIB, 512, 1);
        assert_filled_part(thinned, 3 * MIB, MIB, 1);
        assert_poisoned(thinned + 128 * KIB, MIB - 128 * KIB);
        assert_poisoned(thinned + MIB + 512, 2 * MIB - 512);
    }
    assert_int_equal(knowledge.asked, 2);
}

/* The file holds the kept bytes without gaps: several parts of each of its pieces come from, and go to, different places. */
static void only_live_bytes_reach_the_disk(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    enum { FIRST = 1000, EACH = 8 << 10, STEP = 2 * EACH, PARTS = 300, CYCLES = 2 };
    const uint64_t bytes = 8 * MIB, kept = FIRST + (uint64_t)PARTS * EACH;
    const uint64_t at_borders = kept / TMS_DISK_BLOCK_BYTES; /* of pieces, each of which divides a part */
    uint64_t thinned = allocate(f, "a", TMS_BACKUP_DISK, bytes), whole = allocate(f, "a", TMS_BACKUP_DISK, bytes);
    uint64_t empty = allocate(f, "a", TMS_BACKUP_DISK, bytes);
    tms_live_range_t ranges[1 + PARTS] = {{thinned, thinned + FIRST}};
    for (uint64_t i = 0; i < PARTS; i++) {
        uint64_t begin = thinned + (i + 1) * STEP;
        ranges[1 + i] = (tms_live_range_t){begin, begin + EACH};
    }
    const uint64_t known[] = {thinned < empty ? thinned : empty, thinned < empty ? empty : thinned};
    knowledge_t knowledge = {
        .live = {.allocations = known, .allocation_count = 2, .ranges = ranges, .range_count = 1 + PARTS}};
    for (int cycle = 0; cycle < CYCLES; cycle++) {
        fill(thinned, bytes, 1);
        fill(whole, bytes, 2);
        ASSERT_OK(pause_knowing(f, &knowledge, &report, &error), error);
        assert_int_equal(knowledge.asked, cycle + 1);
        assert_int_equal(report.copied_bytes, kept + bytes);
        uint64_t copies = 1 + PARTS + at_borders + bytes / TMS_DISK_BLOCK_BYTES;
        assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync"), copies);
        assert_int_equal(counters_of(f).disk_backup_bytes, 2 * bytes); /* room for everything, where there is anything */
        ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
        assert_int_equal(report.copied_bytes, kept + bytes);
        assert_filled(whole, bytes, 2);
        for (size_t i = 0; i <= PARTS; i++) {
            uint64_t end = i < PARTS ? ranges[i + 1].begin : thinned + bytes;
            assert_filled_part(thinned, ranges[i].begin - thinned, ranges[i].end - ranges[i].begin, 1);
            assert_poisoned(ranges[i].end, end - ranges[i].end);
        }
        assert_poisoned(empty, bytes);
    }
    const tms_selection_t everything = {0};
    fill(thinned, bytes, 3);
    ASSERT_OK(pause_selected_with_report(f, &everything, &report, &error), error); /* no caller reports what is live */
    assert_int_equal(report.copied_bytes, 3 * bytes);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(thinned, bytes, 3);
}

/* A range may begin before the segment or end behind it: the part in the segment is kept, at its place. */
static void ranges_are_cut_to_the_segment(void **state) {
    fixture_t *f = *state;
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK, HEAP_BACKUP};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        tms_error_t error;
        tms_report_t report;
        uint64_t address = allocate(f, "a", kinds[i], 4 * MIB);
        const tms_live_range_t ranges[] = {{address - 3 * MIB, address + MIB}, {address + 3 * MIB, address + 9 * MIB}};
        knowledge_t knowledge = {
            .live = {.allocations = &address, .allocation_count = 1, .ranges = ranges, .range_count = 2}};
        fill(address, 4 * MIB, 1);
        ASSERT_OK(pause_knowing(f, &knowledge, &report, &error), error);
        assert_int_equal(report.copied_bytes, 2 * MIB);
        ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
        assert_int_equal(report.copied_bytes, 2 * MIB);
        assert_filled_part(address, 0, MIB, 1);
        assert_poisoned(address + MIB, 2 * MIB);
        assert_filled_part(address, 3 * MIB, MIB, 1);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

static void live_bytes_beyond_4_gib(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    const uint64_t bytes = 4 * GIB + 4 * MIB;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, bytes);
    const tms_live_range_t ranges[] = {{address, address + MIB},
                                       {address + 4 * GIB, address + 4 * GIB + 2 * MIB},
                                       {address + bytes - MIB, address + bytes}};
    knowledge_t knowledge = {.live = {.allocations = &address, .allocation_count = 1, .ranges = ranges, .range_count = 3}};
    for (uint32_t i = 0; i < 3; i++) fill(ranges[i].begin, ranges[i].end - ranges[i].begin, i);
    ASSERT_OK(pause_knowing(f, &knowledge, &report, &error), error);
    assert_int_equal(report.bytes, bytes);
    assert_int_equal(report.copied_bytes, 4 * MIB);
    assert_int_equal(physical_bytes(0), 0);
    ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
    for (uint32_t i = 0; i < 3; i++) assert_filled(ranges[i].begin, ranges[i].end - ranges[i].begin, i);
}

static void without_live_bytes_nothing_is_kept(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    const tms_live_range_t elsewhere = {address + 64 * MIB, address + 65 * MIB};
    knowledge_t knowledge = {
        .live = {.allocations = &address, .allocation_count = 1, .ranges = &elsewhere, .range_count = 1}};
    fill(address, 2 * MIB, 1);
    ASSERT_OK(pause_knowing(f, &knowledge, &report, &error), error);
    assert_int_equal(report.copied_bytes, 0);
    assert_int_equal(counters_of(f).host_resident_bytes, 0);
    tms_selection_t zero = {.zero = 1};
    ASSERT_OK(resume_selected(f, &zero, &error), error);
    for (uint64_t i = 0; i < 2 * MIB; i++) assert_int_equal(((uint8_t *)address)[i], 0);
}

static void without_an_answer_everything_is_kept(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    knowledge_t knowledge = {.live = {.allocations = &address, .allocation_count = 1}, .result = 1};
    fill(address, 2 * MIB, 1);
    ASSERT_OK(pause_knowing(f, &knowledge, &report, &error), error);
    assert_int_equal(report.copied_bytes, 2 * MIB);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, 2 * MIB, 1);
}

/* Of memory without a backup only the listed ranges are kept, in whatever it lies; the rest comes back without contents. */
static void listed_memory_without_a_backup_keeps_its_ranges(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    const uint64_t bytes = 4 * MIB, kept = 4096 + MIB;
    uint64_t listed = allocate(f, "a", TMS_BACKUP_NONE, bytes), other = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    const tms_live_range_t ranges[] = {{listed + 512, listed + 512 + 4096}, {listed + 3 * MIB, listed + 4 * MIB}};
    knowledge_t knowledge = {.live = {.allocations = &listed, .allocation_count = 1, .ranges = ranges, .range_count = 2}};
    for (int cycle = 0; cycle < 2; cycle++) {
        tms_selection_t selection = {.find_live = tell, .live_context = &knowledge, .preserves = 1};
        fill(listed, bytes, 1);
        fill(other, bytes, 2);
        simulator()->clear_counts();
        ASSERT_OK(pause_selected_with_report(f, &selection, &report, &error), error);
        assert_int_equal(knowledge.asked, cycle + 1);
        assert_int_equal(report.bytes, 2 * bytes);
        assert_int_equal(report.copied_bytes, kept);
        assert_int_equal(physical_bytes(0), 0);
        ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
        assert_int_equal(report.copied_bytes, kept);
        assert_filled_part(listed, 512, 4096, 1);
        assert_filled_part(listed, 3 * MIB, MIB, 1);
        assert_poisoned(listed, 512);
        assert_poisoned(listed + 512 + 4096, 3 * MIB - 512 - 4096);
        assert_poisoned(other, bytes);
    }
    tms_selection_t discard = {
        .find_live = tell, .live_context = &knowledge, .preserves = 1, .has_backup = 1, .backup = TMS_BACKUP_NONE};
    fill(listed, bytes, 1);
    ASSERT_OK(pause_selected_with_report(f, &discard, &report, &error), error);
    assert_int_equal(report.copied_bytes, 0); /* discard means all of it */
    ASSERT_OK(resume_all(f, &error), error);
    assert_poisoned(listed, bytes);
}

static void the_callback_is_not_called_if_nothing_is_kept(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    knowledge_t knowledge = {.result = 0};
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_knowing(f, &knowledge, NULL, &error), error);
    assert_int_equal(knowledge.asked, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(only_live_bytes_are_kept),
        ONE(only_live_bytes_reach_the_disk),
        ONE(ranges_are_cut_to_the_segment),
        cmocka_unit_test_setup_teardown(live_bytes_beyond_4_gib, setup_large_device, teardown),
        ONE(without_live_bytes_nothing_is_kept),
        ONE(without_an_answer_everything_is_kept),
        ONE(listed_memory_without_a_backup_keeps_its_ranges),
        ONE(the_callback_is_not_called_if_nothing_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
