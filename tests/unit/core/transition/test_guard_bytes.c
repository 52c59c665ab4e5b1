/* Guards the count of guard bytes: what it counts, where the contents of allocations are from, and that it changes nothing.
 */
#include "core/transition/guard_bytes.h"
#include "support/guard_fixture.h"

#include <stdlib.h>

enum { GATE = 1, PART = 64, BYTES = 4 << 20 };

static tms_status_t sample(fixture_t *f, const char *tag, const tms_live_range_t *ranges, size_t count, uint64_t *counts,
                           tms_error_t *error) {
    const tms_selection_t selection = {.tags = tag ? &tag : NULL, .tag_count = tag != NULL};
    return tms_guard_bytes_count(&f->saver, &selection, ranges, count, counts, error);
}

static tms_contents_t contents_of(fixture_t *f, uint64_t address) {
    tms_segment_info_t row;
    assert_int_equal(tms_inspect_find(&f->saver, address, 1, &row), TMS_OK);
    return (tms_contents_t)row.contents;
}

static tms_live_range_t part(uint64_t address, uint64_t offset, uint64_t bytes) {
    return (tms_live_range_t){address + offset, address + offset + bytes};
}

/* Of addresses, and of ranges by their begin. */
static int by_address(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

/* ---- counts ---- */

static void ranges_are_counted(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES - 100), counts[6];
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    memset((void *)(address + MIB + 10), 0, 20);
    memset((void *)(address + 2 * MIB), 7, MIB);
    const tms_live_range_t ranges[] = {part(address, 0, PART),       part(address, PART, 1),
                                       part(address, MIB, PART),     part(address, 2 * MIB - PART, 2 * PART),
                                       part(address, 3 * MIB, 4096), part(address, BYTES - 100 - PART, PART)};
    ASSERT_OK(sample(f, "kv", ranges, 6, counts, &error), error);
    const uint64_t expected[] = {PART, 1, PART - 20, PART, 4096, PART};
    for (int i = 0; i < 6; i++) assert_int_equal(counts[i], expected[i]);
    const tms_live_range_t whole = part(address, 0, BYTES - 100);
    ASSERT_OK(sample(f, ALL_TAGS, &whole, 1, counts, &error), error);
    assert_int_equal(counts[0], BYTES - 100 - 20 - MIB);
    ASSERT_OK(sample(f, ALL_TAGS, NULL, 0, NULL, &error), error);
}

static void what_is_not_resident_is_said(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    enum { SEGMENTS = 4 };
    uint64_t paused = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), freed = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_tag(f, "a", &error), error);
    uint64_t active = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), other = allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    uint64_t addresses[SEGMENTS] = {active, other, paused, freed}, counts[2 * SEGMENTS];
    tms_live_range_t ranges[2 * SEGMENTS];
    memset((void *)active, TMS_GUARD_BYTE, 2 * MIB);
    assert_int_equal(tms_free_address(&f->saver, freed, &error), TMS_OK);
    qsort(addresses, SEGMENTS, sizeof *addresses, by_address);
    for (int i = 0; i < SEGMENTS; i++) {
        ranges[2 * i] = part(addresses[i], 0, PART);
        ranges[2 * i + 1] = part(addresses[i], 2 * MIB - PART, PART + 1); /* goes beyond its allocation */
    }
    ASSERT_OK(sample(f, "a", ranges, 2 * SEGMENTS, counts, &error), error);
    for (int i = 0; i < SEGMENTS; i++) {
        assert_int_equal(counts[2 * i], addresses[i] == active ? PART : TMS_NOT_RESIDENT);
        assert_int_equal(counts[2 * i + 1], TMS_NOT_RESIDENT);
    }
    ASSERT_OK(sample(f, "never", ranges, 2 * SEGMENTS, counts, &error), error);
    for (int i = 0; i < 2 * SEGMENTS; i++) assert_int_equal(counts[i], TMS_NOT_RESIDENT);
}

static void many_ranges_of_many_segments(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    enum { SEGMENTS = 8, RANGES = 500, STRIDE = 4096, COUNT = SEGMENTS * RANGES };
    static tms_live_range_t ranges[COUNT];
    static uint64_t counts[COUNT];
    uint64_t addresses[SEGMENTS];
    for (int i = 0; i < SEGMENTS; i++) addresses[i] = allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    qsort(addresses, SEGMENTS, sizeof *addresses, by_address);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    for (size_t i = 0; i < COUNT; i++) {
        ranges[i] = part(addresses[i / RANGES], i % RANGES * STRIDE, PART);
        if (i % 3 == 0) memset((void *)ranges[i].begin, 0, i % PART);
    }
    simulator()->clear_counts();
    ASSERT_OK(sample(f, ALL_TAGS, ranges, COUNT, counts, &error), error);
    for (size_t i = 0; i < COUNT; i++) assert_int_equal(counts[i], PART - (i % 3 == 0 ? i % PART : 0));
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync_v2"), 0);
    assert_int_equal(simulator()->calls("cuMemcpyBatchAsync_v2"), (COUNT + TMS_GATHERED_COPIES - 1) / TMS_GATHERED_COPIES);
}

static void two_devices(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t here = allocate_on(f, 0, "kv", TMS_BACKUP_NONE, BYTES), there = allocate_on(f, 1, "kv", TMS_BACKUP_NONE, BYTES);
    uint64_t counts[2];
    turn_guard_on(f);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    memset((void *)there, 0, PART / 2);
    bool swapped = there < here;
    const tms_live_range_t ranges[] = {part(swapped ? there : here, 0, PART), part(swapped ? here : there, 0, PART)};
    ASSERT_OK(sample(f, ALL_TAGS, ranges, 2, counts, &error), error);
    assert_int_equal(counts[swapped], PART);
    assert_int_equal(counts[!swapped], PART / 2);
}

/* ---- what it waits for, and what it leaves alone ---- */

typedef struct sampling {
    fixture_t *fixture;
    tms_live_range_t range;
    uint64_t count;
    tms_status_t status;
    tms_error_t error;
} sampling_t;

static void *run_sample(void *argument) {
    sampling_t *s = argument;
    s->status = sample(s->fixture, ALL_TAGS, &s->range, 1, &s->count, &s->error);
    return NULL;
}

static void work_in_flight_is_waited_for(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    pthread_t thread;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES), doomed = allocate(f, "kv", TMS_BACKUP_NONE, BYTES);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    CUstream stream = launch_behind_gate(f, GATE, address);
    sampling_t sampling = {.fixture = f, .range = part(address, 0, PART)};
    assert_int_equal(pthread_create(&thread, NULL, run_sample, &sampling), 0);
    simulator()->wait_until_synchronizing();
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSING);
    assert_int_equal(contents_of(f, address), TMS_CONTENTS_GUARD);
    assert_int_equal(tms_free_address(&f->saver, doomed, &error), TMS_OK); /* carried out by the call */
    simulator()->open_gate(GATE);
    assert_int_equal(pthread_join(thread, NULL), 0);
    ASSERT_OK(sampling.status, sampling.error);
    assert_int_equal(sampling.count, 0); /* 0xFF + 1 */
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_int_equal(contents_of(f, address), TMS_CONTENTS_GUARD);
    destroy_stream(f, stream);
    assert_int_equal(physical_bytes(0), BYTES);
    assert_nothing_waits(&f->saver);
}

static void retained_backups_are_left_alone(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_host_buffer_t *buffer = NULL;
    void *before = NULL, *after = NULL;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_PINNED, BYTES), count;
    atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
    fill(address, BYTES, 1);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    ASSERT_OK(tms_inspect_host_backup(&f->saver, address, BYTES, &buffer, &before, &error), error);
    memset((void *)address, TMS_GUARD_BYTE, BYTES);
    const tms_live_range_t whole = part(address, 0, BYTES);
    ASSERT_OK(sample(f, ALL_TAGS, &whole, 1, &count, &error), error);
    assert_int_equal(count, BYTES);
    tms_host_buffer_drop(buffer);
    ASSERT_OK(tms_inspect_host_backup(&f->saver, address, BYTES, &buffer, &after, &error), error);
    assert_ptr_equal(before, after);
    assert_filled((uint64_t)after, BYTES, 1);
    tms_host_buffer_drop(buffer);
}

static void a_capture_is_said_before_anything_happens(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES), identity = 0, count = 5;
    const tms_live_range_t range = part(address, 0, PART);
    ASSERT_OK(tms_capture_table_begin(&f->saver, NULL, &identity, &error), error);
    simulator()->clear_counts();
    assert_int_equal(sample(f, ALL_TAGS, &range, 1, &count, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_string_equal(error.operation, "check_fresh");
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
    assert_true(tms_capture_end_of(&f->saver, identity));
    ASSERT_OK(sample(f, ALL_TAGS, &range, 1, &count, &error), error);
    assert_int_equal(count, 0);
}

static int32_t stop(void *context) {
    (void)context;
    return 1;
}

static void a_cancelled_call_changes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES), count;
    const tms_live_range_t range = part(address, 0, PART);
    const tms_selection_t selection = {.interrupted = stop};
    CUstream stream = launch_behind_gate(f, GATE, address);
    assert_int_equal(tms_guard_bytes_count(&f->saver, &selection, &range, 1, &count, &error), TMS_INTERRUPTED);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    simulator()->open_gate(GATE);
    destroy_stream(f, stream);
    ASSERT_OK(sample(f, ALL_TAGS, &range, 1, &count, &error), error);
}

static void every_failure_changes_nothing(void **state) {
    fixture_t *f = *state;
    const char *const calls[] = {"cuCtxSynchronize", "cuStreamCreate",      "cuMemcpyBatchAsync_v2",
                                 "cuMemGetAccess",   "cuStreamSynchronize", "cuDevicePrimaryCtxRetain"};
    uint64_t address = allocate(f, "kv", TMS_BACKUP_PINNED, BYTES), counts[2];
    const tms_live_range_t ranges[] = {part(address, 0, PART), part(address, MIB, PART)};
    fill(address, BYTES, 1);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        tms_error_t error;
        uint64_t fired = simulator()->failures_fired(), failures = counters_of(f).failures_total;
        simulator()->fail_after(calls[i], 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(sample(f, ALL_TAGS, ranges, 2, counts, &error), TMS_DRIVER);
        if (simulator()->failures_fired() != fired + 1) fail_msg("%s was not called", calls[i]);
        assert_string_equal(error.operation, "check_fresh");
        assert_int_equal(counters_of(f).failures_total, failures); /* of pauses, resumes and allocations */
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        ASSERT_OK(sample(f, ALL_TAGS, ranges, 2, counts, &error), error);
        settle_host_memory(&f->saver);
        assert_int_equal(counters_of(f).host_backup_bytes, 0);
        assert_nothing_waits(&f->saver);
    }
    /* Without pinned memory each copy is a call of its own. */
    tms_error_t error;
    simulator()->fail_after("cuMemHostRegister_v2", 0, 1000, CUDA_ERROR_UNKNOWN);
    simulator()->clear_counts();
    ASSERT_OK(sample(f, ALL_TAGS, ranges, 2, counts, &error), error);
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync_v2"), 2);
    simulator()->fail_after("cuMemHostRegister_v2", 0, 0, 0);
    assert_filled(address, BYTES, 1);
}

static void copies_need_the_host_memory_that_is_allowed(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES), count;
    const tms_live_range_t range = part(address, 0, BYTES);
    const uint64_t before = f->saver.stores.host.limits.cap_bytes;
    f->saver.stores.host.limits.cap_bytes = 2 * MIB;
    assert_int_equal(sample(f, ALL_TAGS, &range, 1, &count, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_int_equal(counters_of(f).host_backup_bytes, 0);
    f->saver.stores.host.limits.cap_bytes = before;
    ASSERT_OK(sample(f, ALL_TAGS, &range, 1, &count, &error), error);
}

/* ---- where contents are from ---- */

typedef struct knowledge {
    tms_live_t live;
} knowledge_t;

static int32_t tell(void *context, tms_live_t *live) {
    *live = ((const knowledge_t *)context)->live;
    return 0;
}

static void the_last_resume_says_where_contents_are_from(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t zero = {.zero = 1}, discarding = {.has_backup = 1, .backup = TMS_BACKUP_NONE};
    const tms_selection_t keeping = {.has_backup = 1, .backup = TMS_BACKUP_PINNED};
    uint64_t kept = allocate(f, "kept", TMS_BACKUP_PINNED, BYTES), lost = allocate(f, "lost", TMS_BACKUP_NONE, BYTES);
    const struct {
        const tms_selection_t *pause, *resume;
        bool guard;
        tms_contents_t kept, lost;
    } cycles[] = {
        {.guard = true, .kept = TMS_CONTENTS_RESTORED, .lost = TMS_CONTENTS_GUARD},
        {.resume = &zero, .guard = true, .kept = TMS_CONTENTS_RESTORED, .lost = TMS_CONTENTS_ZEROED},
        {.resume = &zero, .kept = TMS_CONTENTS_RESTORED, .lost = TMS_CONTENTS_ZEROED},
        {.kept = TMS_CONTENTS_RESTORED, .lost = TMS_CONTENTS_UNDEFINED},
        {.pause = &discarding, .guard = true, .kept = TMS_CONTENTS_GUARD, .lost = TMS_CONTENTS_GUARD},
        {.pause = &keeping, .guard = true, .kept = TMS_CONTENTS_RESTORED, .lost = TMS_CONTENTS_RESTORED},
    };
    assert_int_equal(contents_of(f, kept), TMS_CONTENTS_OWN);
    for (size_t i = 0; i < sizeof cycles / sizeof cycles[0]; i++) {
        const tms_selection_t all = {.tags = NULL};
        (cycles[i].guard ? turn_guard_on : turn_guard_off)(f);
        ASSERT_OK(pause_selected(f, cycles[i].pause ? cycles[i].pause : &all, &error), error);
        ASSERT_OK(resume_selected(f, cycles[i].resume ? cycles[i].resume : &all, &error), error);
        if (contents_of(f, kept) != cycles[i].kept || contents_of(f, lost) != cycles[i].lost)
            fail_msg("cycle %zu: %d and %d", i, contents_of(f, kept), contents_of(f, lost));
    }
}

/* Of memory with a backup all that was live is back. Of memory without one only what was preserved. */
static void live_blocks_are_all_and_preserved_ones_are_not(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t backed = allocate(f, "a", TMS_BACKUP_PINNED, BYTES), bare = allocate(f, "a", TMS_BACKUP_NONE, BYTES);
    uint64_t empty = allocate(f, "a", TMS_BACKUP_DISK, BYTES), whole = allocate(f, "a", TMS_BACKUP_NONE, BYTES);
    uint64_t listed[] = {backed, bare, empty, whole};
    tms_live_range_t ranges[] = {part(backed, 0, PART), part(bare, 0, PART), part(whole, 0, BYTES)};
    qsort(listed, 4, sizeof *listed, by_address);
    qsort(ranges, 3, sizeof *ranges, by_address);
    knowledge_t knowledge = {.live = {.allocations = listed, .allocation_count = 4, .ranges = ranges, .range_count = 3}};
    const tms_selection_t selection = {.find_live = tell, .live_context = &knowledge, .preserves = 1};
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(contents_of(f, backed), TMS_CONTENTS_RESTORED);
    assert_int_equal(contents_of(f, bare), TMS_CONTENTS_GUARD);
    assert_int_equal(contents_of(f, empty), TMS_CONTENTS_RESTORED);
    assert_int_equal(contents_of(f, whole), TMS_CONTENTS_RESTORED); /* nothing of it is missing */
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(contents_of(f, whole), TMS_CONTENTS_GUARD);
}

static void a_failed_resume_says_nothing_new(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, BYTES);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    assert_int_equal(contents_of(f, address), TMS_CONTENTS_OWN);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(contents_of(f, address), TMS_CONTENTS_GUARD);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(ranges_are_counted),
        ONE(what_is_not_resident_is_said),
        ONE(many_ranges_of_many_segments),
        cmocka_unit_test_setup_teardown(two_devices, setup_two_devices, teardown),
        ONE(work_in_flight_is_waited_for),
        ONE(retained_backups_are_left_alone),
        ONE(a_capture_is_said_before_anything_happens),
        ONE(a_cancelled_call_changes_nothing),
        ONE(every_failure_changes_nothing),
        ONE(copies_need_the_host_memory_that_is_allowed),
        ONE(the_last_resume_says_where_contents_are_from),
        ONE(live_blocks_are_all_and_preserved_ones_are_not),
        ONE(a_failed_resume_says_nothing_new),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
