/* Guards the parts of thinned segments: how many the driver gets in one call, when, and what happens if it fails. */

#include "core/transition/pending.h"
#include "support.h"

#include <stdlib.h>
#include <string.h>

#define KIB ((uint64_t)1 << 10)

enum { SEGMENTS = 30, PARTS = 5, RANGES = SEGMENTS * PARTS, STEPS_BYTES = 512 };
#define SEGMENT_BYTES (2 * MIB)
#define PART_BYTES    (64 * KIB)
/* From the start of one part to that of the next. */
#define STRIDE (256 * KIB)

typedef struct world {
    fixture_t *fixture;
    tms_live_t live;
    uint64_t segments[SEGMENTS];
    tms_live_range_t ranges[RANGES];
    uint64_t part, stride;
    int parts;
} world_t;

static int32_t tell(void *context, tms_live_t *live) {
    const world_t *world = context;
    *live = world->live;
    return 0;
}

static int32_t never(void *context) {
    (void)context;
    return 0;
}

static int compare(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

/* Declares for each of `count` segments `parts` live parts, `stride` apart. */
static void know(world_t *world, int count, int parts, uint64_t part, uint64_t stride) {
    size_t ranges = 0;
    qsort(world->segments, (size_t)count, sizeof *world->segments, compare);
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < parts; k++) {
            uint64_t begin = world->segments[i] + (uint64_t)k * stride;
            world->ranges[ranges++] = (tms_live_range_t){begin, begin + part};
        }
    }
    world->parts = parts;
    world->part = part;
    world->stride = stride;
    world->live = (tms_live_t){
        .allocations = world->segments, .allocation_count = (size_t)count, .ranges = world->ranges, .range_count = ranges};
}

static void make(world_t *world, fixture_t *f, int count) {
    world->fixture = f;
    simulator()->set_poison_limit(SEGMENTS * SEGMENT_BYTES); /* a resume may back all of them by one run */
    for (int i = 0; i < count; i++) world->segments[i] = allocate(f, "a", TMS_BACKUP_PINNED, SEGMENT_BYTES);
    know(world, count, PARTS, PART_BYTES, STRIDE);
    for (int i = 0; i < count; i++) fill(world->segments[i], SEGMENT_BYTES, (uint32_t)i);
}

static tms_status_t pause_thinned(world_t *world, tms_error_t *error) {
    const tms_selection_t selection = {.find_live = tell, .live_context = world};
    simulator()->clear_counts();
    return pause_selected(world->fixture, &selection, error);
}

static tms_status_t pause_thinned_interruptibly(world_t *world, tms_error_t *error) {
    const tms_selection_t selection = {.find_live = tell, .live_context = world, .interrupted = never};
    simulator()->clear_counts();
    return pause_selected(world->fixture, &selection, error);
}

static void assert_parts(const world_t *world, int count) {
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < world->parts; k++)
            assert_filled_part(world->segments[i], (uint64_t)k * world->stride, world->part, (uint32_t)i);
    }
}

/* Asserts that exactly the live bytes are there. */
static void assert_only_parts(const world_t *world, int count) {
    assert_parts(world, count);
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < world->parts; k++)
            assert_poisoned(world->segments[i] + (uint64_t)k * world->stride + world->part, world->stride - world->part);
    }
}

static void assert_copies(uint64_t at_once, uint64_t to_host, uint64_t to_device) {
    assert_int_equal(simulator()->calls("cuMemcpyBatchAsync"), at_once);
    assert_int_equal(simulator()->calls("cuMemcpyDtoHAsync"), to_host);
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), to_device);
}

/* B for a batch of copies, D and H for one from and to the device, E for an event behind them, S for a wait for all. */
static void read_steps(char *steps) {
    static char trace[1 << 16];
    static const char *const calls[] = {"BcuMemcpyBatchAsync\n", "DcuMemcpyDtoHAsync\n", "HcuMemcpyHtoDAsync\n",
                                        "EcuEventRecord\n", "ScuStreamSynchronize\n"};
    size_t count = 0;
    simulator()->read_trace(trace, sizeof trace);
    for (const char *line = trace; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        assert_true(count + 1 < STEPS_BYTES);
        for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
            if (strncmp(line, calls[i] + 1, strlen(calls[i] + 1)) == 0) steps[count++] = calls[i][0];
    }
    steps[count] = '\0';
}

static void parts_of_many_segments_are_copied_in_one_call(void **state) {
    static world_t world;
    tms_error_t error;
    make(&world, *state, SEGMENTS);
    const uint64_t calls = (RANGES + TMS_GATHERED_COPIES - 1) / TMS_GATHERED_COPIES;
    ASSERT_OK(pause_thinned(&world, &error), error);
    assert_copies(calls, 0, 0);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(world.fixture, &error), error);
    assert_copies(calls, 0, 0);
    assert_only_parts(&world, SEGMENTS);
}

static void enough_bytes_are_submitted_without_waiting_for_more(void **state) {
    static world_t world;
    tms_error_t error;
    enum { LARGE = 2 };
    fixture_t *f = world.fixture = *state;
    for (int i = 0; i < LARGE; i++) world.segments[i] = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB);
    know(&world, LARGE, 4, TMS_GATHERED_BYTES / 2, 10 * MIB);
    for (int i = 0; i < LARGE; i++) fill(world.segments[i], 40 * MIB, (uint32_t)i);
    ASSERT_OK(pause_thinned(&world, &error), error);
    assert_copies(LARGE * 4 / 2, 0, 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_parts(&world, LARGE);
    for (int i = 0; i < LARGE; i++) fill(world.segments[i], 40 * MIB, (uint32_t)i);
    /* A part that is large enough is copied alone, like any single copy. */
    know(&world, LARGE, 2, TMS_GATHERED_BYTES, 20 * MIB);
    ASSERT_OK(pause_thinned(&world, &error), error);
    assert_copies(0, LARGE * 2, 0);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    assert_copies(0, 0, LARGE * 2);
    assert_parts(&world, LARGE);
}

/* An error names the tag and the size of everything that the failed call was to copy. */
static void a_call_copies_parts_of_one_tag(void **state) {
    static world_t world;
    tms_error_t error;
    enum { COUNT = 4 };
    fixture_t *f = world.fixture = *state;
    const char *const tags[COUNT] = {"first", "first", "second", "third"};
    for (int i = 0; i < COUNT; i++) world.segments[i] = allocate(f, tags[i], TMS_BACKUP_PINNED, SEGMENT_BYTES);
    for (int i = 0; i < COUNT; i++) fill(world.segments[i], SEGMENT_BYTES, 1);
    know(&world, COUNT, PARTS, PART_BYTES, STRIDE);
    for (int failing = 0; failing < 3; failing++) {
        simulator()->fail_after("cuMemcpyBatchAsync", (uint64_t)failing, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_thinned(&world, &error), TMS_DRIVER);
        assert_string_equal(error.call, "cuMemcpyBatchAsync");
        assert_string_equal(error.tag, tags[failing + (failing > 0)]);
        assert_int_equal(error.bytes, (failing == 0 ? 2 : 1) * PARTS * PART_BYTES);
        for (int i = 0; i < COUNT; i++) {
            assert_int_equal(state_of(f, world.segments[i]), TMS_SEGMENT_ACTIVE);
            assert_filled(world.segments[i], SEGMENT_BYTES, 1);
        }
    }
    ASSERT_OK(pause_thinned(&world, &error), error);
    assert_copies(3, 0, 0);
    simulator()->fail_after("cuMemcpyBatchAsync", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_all(f, &error), TMS_DRIVER);
    for (int i = 0; i < COUNT; i++) assert_int_equal(state_of(f, world.segments[i]), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_all(f, &error), error);
    for (int i = 0; i < COUNT; i++) assert_filled_part(world.segments[i], STRIDE, PART_BYTES, 1);
}

/* The driver reports it at the first call, or lacks the function. */
static void without_the_batch_call_parts_are_copied_one_by_one(void **state) {
    static world_t world;
    tms_error_t error;
    enum { COUNT = 2 };
    make(&world, *state, COUNT);
    tms_driver_table_t *driver = (tms_driver_table_t *)(uintptr_t)world.fixture->cuda; /* the next setup loads another */
    for (int lacks = 0; lacks < 2; lacks++) {
        if (lacks)
            driver->cuMemcpyBatchAsync = NULL;
        else
            simulator()->fail_after("cuMemcpyBatchAsync", 0, 2, CUDA_ERROR_NOT_SUPPORTED);
        for (int i = 0; i < COUNT; i++) fill(world.segments[i], SEGMENT_BYTES, (uint32_t)i);
        ASSERT_OK(pause_thinned(&world, &error), error);
        assert_copies(!lacks, COUNT * PARTS, 0);
        simulator()->clear_counts();
        ASSERT_OK(resume_all(world.fixture, &error), error);
        assert_copies(!lacks, 0, COUNT * PARTS);
        assert_only_parts(&world, COUNT);
    }
    simulator()->fail_after("cuMemcpyDtoHAsync", 1, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_thinned(&world, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemcpyDtoHAsync");
    assert_copies(0, 2, 0);
    for (int i = 0; i < COUNT; i++) assert_int_equal(state_of(world.fixture, world.segments[i]), TMS_SEGMENT_ACTIVE);
}

/* If a call can be cancelled, a chunk's event is behind all copies of the chunk. */
static void parts_in_unpinned_memory_are_copied_one_by_one(void **state) {
    fixture_t *f = *state;
    world_t world;
    tms_error_t error;
    make(&world, f, 1);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    simulator()->fail_after("cuMemHostRegister", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    ASSERT_OK(pause_thinned(&world, &error), error);
    assert_copies(0, PARTS, 0);
    simulator()->clear_counts();
    ASSERT_OK(resume_tag(f, "a", &error), error);
    assert_copies(0, 0, PARTS);
    assert_only_parts(&world, 1);
    ASSERT_OK(pause_thinned(&world, &error), error); /* memory of the next pause can be pinned */
    assert_copies(1, 0, 0);
    ASSERT_OK(resume_tag(f, "a", &error), error);
    assert_parts(&world, 1);
}

static void a_chunk_ends_behind_its_parts(void **state) {
    static world_t world;
    tms_error_t error;
    char steps[STEPS_BYTES];
    enum { COUNT = 6 };
    fixture_t *f = *state;
    make(&world, f, COUNT);
    f->saver.stores.copying.chunk_bytes = 8 * PART_BYTES;
    simulator()->trace(ON);
    ASSERT_OK(pause_thinned_interruptibly(&world, &error), error);
    read_steps(steps);
    assert_string_equal(steps, "BEBEBEBS"); /* 8, 8, 8 and 6 of 30 parts */
    const tms_selection_t selection = {.interrupted = never};
    simulator()->clear_counts();
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    read_steps(steps);
    simulator()->trace(OFF);
    assert_string_equal(steps, "BEBEBEBS");
    assert_only_parts(&world, COUNT);
}

/* Whatever waits for a pending resume waits for all of its copies. */
static void the_mark_of_a_pending_resume_is_behind_all_parts(void **state) {
    static world_t world;
    tms_error_t error;
    char steps[STEPS_BYTES];
    tms_pending_t *pending = NULL;
    const tms_selection_t everything = {0};
    make(&world, *state, SEGMENTS);
    ASSERT_OK(pause_thinned(&world, &error), error);
    simulator()->trace(ON);
    simulator()->clear_counts();
    ASSERT_OK(tms_resume_begin(&world.fixture->saver, &everything, &pending, &error), error);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    read_steps(steps);
    simulator()->trace(OFF);
    tms_pending_release(pending);
    assert_string_equal(steps, "BBBES");
    assert_only_parts(&world, SEGMENTS);
}

/* A whole segment is one copy, and waits for no other. */
static void whole_segments_are_copied_by_themselves(void **state) {
    static world_t world;
    tms_error_t error;
    char steps[STEPS_BYTES];
    fixture_t *f = *state;
    make(&world, f, 1);
    uint64_t whole = allocate(f, "a", TMS_BACKUP_PINNED, SEGMENT_BYTES);
    fill(whole, SEGMENT_BYTES, 7);
    simulator()->trace(ON);
    ASSERT_OK(pause_thinned(&world, &error), error);
    read_steps(steps);
    simulator()->trace(OFF);
    assert_string_equal(steps, "DBS");
    ASSERT_OK(resume_all(f, &error), error);
    assert_only_parts(&world, 1);
    assert_filled(whole, SEGMENT_BYTES, 7);
}

/* The driver refuses a single copy of such memory. In a batch of copies it does not survive it. */
static void memory_unmapped_by_the_program_is_an_error(void **state) {
    static world_t world;
    tms_error_t error;
    enum { COUNT = 3 };
    fixture_t *f = *state;
    make(&world, f, COUNT);
    CUmemGenericAllocationHandle other = 0;
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    const CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    assert_int_equal(f->cuda->cuMemUnmap(world.segments[1], SEGMENT_BYTES), CUDA_SUCCESS);
    assert_int_equal(pause_thinned(&world, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemGetAccess");
    assert_int_equal(error.address, world.segments[1]);
    assert_copies(0, 0, 0);
    for (int i = 0; i < COUNT; i++) assert_int_equal(state_of(f, world.segments[i]), TMS_SEGMENT_ACTIVE);
    assert_filled(world.segments[0], SEGMENT_BYTES, 0);
    assert_int_equal(f->cuda->cuMemCreate(&other, SEGMENT_BYTES, &properties, 0), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemMap(world.segments[1], SEGMENT_BYTES, 0, other, 0), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemSetAccess(world.segments[1], SEGMENT_BYTES, &access, 1), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuMemRelease(other), CUDA_SUCCESS);
    fill(world.segments[1], SEGMENT_BYTES, 1);
    ASSERT_OK(pause_thinned(&world, &error), error);
    assert_int_equal(simulator()->calls("cuMemGetAccess"), COUNT);
    ASSERT_OK(resume_all(f, &error), error);
    assert_only_parts(&world, COUNT);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(parts_of_many_segments_are_copied_in_one_call),
        ONE(enough_bytes_are_submitted_without_waiting_for_more),
        ONE(a_call_copies_parts_of_one_tag),
        ONE(without_the_batch_call_parts_are_copied_one_by_one),
        ONE(a_chunk_ends_behind_its_parts),
        ONE(the_mark_of_a_pending_resume_is_behind_all_parts),
        ONE(parts_in_unpinned_memory_are_copied_one_by_one),
        ONE(whole_segments_are_copied_by_themselves),
        ONE(memory_unmapped_by_the_program_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
