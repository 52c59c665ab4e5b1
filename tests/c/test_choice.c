/* What one call chooses: where contents go this time, which bytes are worth keeping, what becomes of the host memory, zeros
 * where there are no contents, and all devices at once. */

#include "support.h"

#include <string.h>

static tms_counters_t counters_of(fixture_t *f) {
    tms_counters_t counters;
    tms_host_store_settle(&f->saver.stores.host);
    tms_saver_counters(&f->saver, &counters);
    return counters;
}

/* ---- where contents go this time ---- */

static void a_pause_may_choose_another_place(void **state) {
    fixture_t *f = *state;
    const tms_backup_kind_t regions[] = {TMS_BACKUP_NONE, TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
    const int32_t choices[] = {TMS_BACKUP_NONE, TMS_BACKUP_PINNED, TMS_BACKUP_DISK};
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t k = 0; k < 3; k++) {
            tms_error_t error;
            tms_report_t report;
            tms_segment_info_t row;
            tms_selection_t chosen = {.has_backup = 1, .backup = choices[k]};
            uint64_t address = allocate(f, "a", regions[i], 2 * MIB);
            bool kept = choices[k] != TMS_BACKUP_NONE;
            fill(address, 2 * MIB, i * 3 + k);
            ASSERT_OK(pause_selected(f, &chosen, &report, &error), error);
            assert_int_equal(report.copied_bytes, kept ? 2 * MIB : 0);
            assert_int_equal(atomic_load(&f->saver.stores.disk_bytes) > 0, choices[k] == TMS_BACKUP_DISK);
            assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes) > 0, choices[k] == TMS_BACKUP_PINNED);
            ASSERT_OK(tms_saver_find(&f->saver, address, &row), error);
            assert_int_equal(row.backup, regions[i]); /* what the region said stays */
            ASSERT_OK(resume_tag(f, NULL, &report, &error), error);
            if (kept)
                assert_filled(address, 2 * MIB, i * 3 + k);
            else
                assert_poisoned(address, 2 * MIB);
            assert_int_equal(counters_of(f).host_resident_bytes, 0);
            assert_int_equal(counters_of(f).disk_backup_bytes > 0,
                             choices[k] == TMS_BACKUP_DISK && regions[i] == TMS_BACKUP_DISK);

            fill(address, 2 * MIB, 50 + i); /* the next pause does as the region said */
            ASSERT_OK(pause_tag(f, NULL, &report, &error), error);
            assert_int_equal(report.copied_bytes, regions[i] == TMS_BACKUP_NONE ? 0 : 2 * MIB);
            ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
            if (regions[i] != TMS_BACKUP_NONE) assert_filled(address, 2 * MIB, 50 + i);
            assert_int_equal(tms_saver_free(&f->saver, address, &error), TMS_OK);
            assert_int_equal(counters_of(f).disk_backup_bytes, 0);
        }
    }
}

/* Active, and its contents of the pause before retained. */
static uint64_t allocate_retained(fixture_t *f, uint32_t seed) {
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
    fill(address, 2 * MIB, seed);
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    return address;
}

static void a_discarded_pause_forgets_what_was_retained(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    tms_selection_t discard = {.has_backup = 1, .backup = TMS_BACKUP_NONE};
    uint64_t address = allocate_retained(f, 1);
    assert_int_equal(counters_of(f).host_backup_bytes, 2 * MIB);
    ASSERT_OK(pause_selected(f, &discard, NULL, &error), error);
    ASSERT_OK(tms_saver_host_backup(&f->saver, address, 2 * MIB, &buffer, &host, &error), error);
    assert_null(host);
    assert_int_equal(counters_of(f).host_resident_bytes, 0);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_poisoned(address, 2 * MIB);
}

static void a_failed_pause_keeps_what_was_retained(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    tms_selection_t to_disk = {.has_backup = 1, .backup = TMS_BACKUP_DISK};
    uint64_t address = allocate_retained(f, 1);
    fill(address, 2 * MIB, 2);
    simulator()->fail_after("cuStreamSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_selected(f, &to_disk, NULL, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    ASSERT_OK(tms_saver_host_backup(&f->saver, address, 2 * MIB, &buffer, &host, &error), error);
    assert_filled((uint64_t)host, 2 * MIB, 1);
    tms_host_buffer_drop(buffer);
    assert_int_equal(counters_of(f).disk_backup_bytes, 0);
}

static void choices_are_checked(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t wrong[] = {{.has_backup = 1, .backup = TMS_BACKUP_MMAP},
                                     {.has_backup = 1, .backup = 9},
                                     {.has_backup = 1, .backup = -1},
                                     {.host_policy = 4},
                                     {.host_policy = -1}};
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(pause_selected(f, &wrong[i], NULL, &error), TMS_INVALID_ARGUMENT);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    }
}

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
    return pause_selected(f, &selection, report, error);
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
    /* Two that touch, one alone, and the rest of the segment behind a gap. */
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
        assert_int_equal(knowledge.waits, 1); /* asked once the devices had been waited for */
        assert_int_equal(report.copied_bytes, kept + bytes);
        ASSERT_OK(tms_saver_host_backup(&f->saver, thinned + 100, 128 * KIB - 100, &buffer, &host, &error), error);
        assert_non_null(host);
        assert_memory_equal(host, (uint8_t *)buffer->memory + 100, 1);
        tms_host_buffer_drop(buffer);
        ASSERT_OK(tms_saver_host_backup(&f->saver, thinned + 100, 128 * KIB, &buffer, &host, &error), error);
        assert_null(host); /* not wholly kept */
        ASSERT_OK(resume_tag(f, NULL, &report, &error), error);
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

/* What is kept lies in the file without gaps: of each piece of it several parts go to, and come from, several places. */
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
        ASSERT_OK(resume_tag(f, NULL, &report, &error), error);
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
    ASSERT_OK(pause_selected(f, &everything, &report, &error), error); /* nobody says what is live */
    assert_int_equal(report.copied_bytes, 3 * bytes);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled(thinned, bytes, 3);
}

/* Of a range that begins before the segment or ends behind it, what lies in the segment is kept, at its place. */
static void ranges_are_cut_to_the_segment(void **state) {
    fixture_t *f = *state;
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK};
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
        ASSERT_OK(resume_tag(f, NULL, &report, &error), error);
        assert_int_equal(report.copied_bytes, 2 * MIB);
        assert_filled_part(address, 0, MIB, 1);
        assert_poisoned(address + MIB, 2 * MIB);
        assert_filled_part(address, 3 * MIB, MIB, 1);
        assert_int_equal(tms_saver_free(&f->saver, address, &error), TMS_OK);
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
    ASSERT_OK(resume_tag(f, NULL, &report, &error), error);
    for (uint32_t i = 0; i < 3; i++) assert_filled(ranges[i].begin, ranges[i].end - ranges[i].begin, i);
}

static void nothing_live_is_nothing_kept(void **state) {
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
    ASSERT_OK(resume_selected(f, &zero, NULL, &error), error);
    for (uint64_t i = 0; i < 2 * MIB; i++) assert_int_equal(((uint8_t *)address)[i], 0);
}

static void who_does_not_know_gets_everything_kept(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    knowledge_t knowledge = {.live = {.allocations = &address, .allocation_count = 1}, .result = 1};
    fill(address, 2 * MIB, 1);
    ASSERT_OK(pause_knowing(f, &knowledge, &report, &error), error);
    assert_int_equal(report.copied_bytes, 2 * MIB);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled(address, 2 * MIB, 1);
}

static void nobody_is_asked_where_nothing_is_kept(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    knowledge_t knowledge = {.result = 0};
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_knowing(f, &knowledge, NULL, &error), error);
    assert_int_equal(knowledge.asked, 0);
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
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    ASSERT_OK(resume_selected(f, &zero, &report, &error), error);
    assert_int_equal(report.copied_bytes, 2 * MIB);
    assert_filled(kept, 2 * MIB, 2);
    for (uint64_t i = 0; i < 2 * MIB; i++) assert_int_equal(((uint8_t *)dropped)[i], 0);
    assert_int_equal(simulator()->calls("cuMemsetD8Async"), 1);
}

/* ---- what becomes of host memory ---- */

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
        {TMS_HOST_POOL, TMS_HOST_RETAIN, TMS_HOST_DEFAULT, 2 * MIB, 0},
        {TMS_HOST_POOL, TMS_HOST_RETAIN, TMS_HOST_RELEASE, 0, 0},
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
        ASSERT_OK(tms_saver_allocate(&f->saver, &region, 2 * MIB, 0, &address, &error), error);
        fill(address, 2 * MIB, 1);
        ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
        ASSERT_OK(resume_selected(f, &selection, NULL, &error), error);
        assert_filled(address, 2 * MIB, 1);
        tms_counters_t counters = counters_of(f);
        assert_int_equal(counters.host_backup_bytes, cases[i].backup);
        assert_int_equal(counters.host_pooled_bytes, cases[i].pooled);
        assert_int_equal(counters.host_resident_bytes, cases[i].backup + cases[i].pooled);
        assert_int_equal(tms_saver_free(&f->saver, address, &error), TMS_OK);
        tms_host_store_set_pool_limit(&f->saver.stores.host, 0); /* empties it */
        assert_int_equal(counters_of(f).host_resident_bytes, 0);
        tms_host_store_set_pool_limit(&f->saver.stores.host, UINT64_MAX);
    }
}

/* ---- progress, and devices at once ---- */

typedef struct watcher {
    uint64_t done, total;
    int told;
    bool backwards;
} watcher_t;

static void watch(void *context, uint64_t done, uint64_t total) {
    watcher_t *watcher = context;
    watcher->backwards |= done < watcher->done;
    watcher->done = done;
    watcher->total = total;
    watcher->told++;
}

static void progress_is_told_to_the_end(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    watcher_t watcher = {0};
    tms_selection_t selection = {.progress = watch, .progress_context = &watcher};
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK, TMS_BACKUP_NONE};
    for (uint32_t i = 0; i < 4; i++) fill(allocate(f, "a", kinds[i], 2 * MIB), 2 * MIB, i);
    f->saver.stores.copy_chunk_bytes = MIB / 2;
    for (int resume = 0; resume < 2; resume++) {
        watcher = (watcher_t){0};
        ASSERT_OK((resume ? resume_selected : pause_selected)(f, &selection, NULL, &error), error);
        assert_true(watcher.told >= 1);
        assert_false(watcher.backwards);
        assert_int_equal(watcher.total, 6 * MIB);
        assert_int_equal(watcher.done, 6 * MIB);
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
        ASSERT_OK(pause_tag(f, NULL, &report, &error), error);
        assert_int_equal(report.copied_bytes, 10 * MIB);
        assert_int_equal(physical_bytes(0) + physical_bytes(1), 0);
        ASSERT_OK(resume_tag(f, NULL, &report, &error), error);
        assert_int_equal(report.copied_bytes, 10 * MIB);
        for (uint32_t i = 0; i < 3; i++) assert_filled(addresses[i], i == 2 ? 2 * MIB : 4 * MIB, i);
    }
}

static void a_failure_on_one_device_is_one_on_all(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemcpyDtoHAsync", "cuStreamCreate", "cuStreamSynchronize", "cuMemcpyHtoDAsync", "cuMemMap"};
    /* The second wait for a stream may be the one before the first is closed, which fails nothing. */
    const uint64_t occurrences[] = {2, 2, 1, 2, 2};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (uint64_t occurrence = 0; occurrence < occurrences[i]; occurrence++) {
            tms_error_t error;
            uint64_t addresses[] = {allocate_on(f, 0, "a", TMS_BACKUP_PINNED, 2 * MIB),
                                    allocate_on(f, 1, "a", TMS_BACKUP_PINNED, 2 * MIB)};
            bool at_resume = i >= 3;
            for (uint32_t k = 0; k < 2; k++) fill(addresses[k], 2 * MIB, k);
            if (at_resume) ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
            simulator()->fail_after(calls[i], occurrence, 1, CUDA_ERROR_UNKNOWN);
            assert_int_equal((at_resume ? resume_tag : pause_tag)(f, NULL, NULL, &error), TMS_DRIVER);
            assert_string_equal(error.call, calls[i]);
            for (int k = 0; k < 2; k++)
                assert_int_equal(state_of(f, addresses[k]), at_resume ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_ACTIVE);
            assert_int_equal(physical_bytes(0) + physical_bytes(1), at_resume ? 0 : 4 * MIB);
            if (!at_resume) ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
            ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
            for (uint32_t k = 0; k < 2; k++) {
                assert_filled(addresses[k], 2 * MIB, k);
                assert_int_equal(tms_saver_free(&f->saver, addresses[k], &error), TMS_OK);
            }
        }
    }
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_may_choose_another_place),
        ONE(a_discarded_pause_forgets_what_was_retained),
        ONE(a_failed_pause_keeps_what_was_retained),
        ONE(choices_are_checked),
        ONE(only_live_bytes_are_kept),
        ONE(only_live_bytes_reach_the_disk),
        ONE(ranges_are_cut_to_the_segment),
        cmocka_unit_test_setup_teardown(live_bytes_beyond_4_gib, setup_large_device, teardown),
        ONE(nothing_live_is_nothing_kept),
        ONE(who_does_not_know_gets_everything_kept),
        ONE(nobody_is_asked_where_nothing_is_kept),
        ONE(memory_without_contents_can_come_back_zeroed),
        ONE(the_narrowest_policy_counts),
        ONE(progress_is_told_to_the_end),
        TWO(both_devices_copy),
        TWO(a_failure_on_one_device_is_one_on_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
