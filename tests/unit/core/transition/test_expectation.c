/* Guards pauses that copy what was live the last time while they search for what is live now. */
#include "support.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "copies.h"
#include "core/transition/expectation.h"
#include "own_process.h"

enum { SEGMENTS = 4, ANSWERS = 2 };
#define BYTES      (4 * MIB)
#define LIVE_BYTES MIB

/* A program with two sets of live bytes: the first or the last MiB of each segment. */
typedef struct program {
    fixture_t *fixture;
    uint64_t segments[SEGMENTS];
    tms_live_range_t ranges[ANSWERS][SEGMENTS];
    int answer;         /* index of the set that is live now */
    bool holds;         /* copies are held until their call waits for their end */
    bool knows_nothing; /* find_live has no answer */
    bool cancels;       /* the call is cancelled after the search */
    bool cancelled;
    bool forks; /* find_live forks a child */
    int searches;
    int polls;       /* since the last search */
    bool planned;    /* backups were planned when it began */
    uint64_t copies; /* that had been queued then */
} program_t;

static uint64_t copies_out(void) {
    return simulator()->calls("cuMemcpyBatchAsync") + simulator()->calls("cuMemcpyDtoHAsync");
}

/* Returns in both processes; in the parent once the child has ended, with status 0. */
static void fork_child(void) {
    int ended = -1;
    pid_t child = fork();
    if (child == 0) return;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
}

static int32_t search(void *context, tms_live_t *live) {
    program_t *program = context;
    program->searches++;
    if (program->holds) {
        simulator()->wait_until_synchronizing(); /* for copies that are under way */
    }
    program->polls = 0;
    program->planned = atomic_load(&program->fixture->saver.stores.host.buffer_bytes) > 0;
    program->copies = copies_out();
    if (program->forks) fork_child();
    *live = (tms_live_t){.allocations = program->segments,
                         .allocation_count = SEGMENTS,
                         .ranges = program->ranges[program->answer],
                         .range_count = SEGMENTS};
    program->cancelled = program->cancels;
    return program->knows_nothing;
}

/* The first poll after a search comes before copies in vain are cancelled, the second one after that. */
static int32_t is_cancelled(void *context) {
    program_t *program = context;
    if (++program->polls > 1 || program->cancelled) release_copies();
    return program->cancelled;
}

static tms_status_t pause_program(program_t *program, tms_report_t *report, tms_error_t *error) {
    const tms_selection_t selection = {
        .find_live = search, .live_context = program, .interrupted = is_cancelled, .interrupt_context = program};
    simulator()->clear_counts();
    if (program->holds) hold_copies();
    tms_status_t status = pause_selected(program->fixture, &selection, report, error);
    release_copies();
    return status;
}

static uint64_t offset_of(int answer) { return answer ? BYTES - LIVE_BYTES : 0; }

static int by_number(const void *left, const void *right) {
    uint64_t one = *(const uint64_t *)left, other = *(const uint64_t *)right;
    return (one > other) - (one < other);
}

static void prepare_kind(program_t *program, fixture_t *f, int devices, tms_backup_kind_t kind) {
    *program = (program_t){.fixture = f};
    f->saver.stores.copying.chunk_bytes = LIVE_BYTES;
    for (int i = 0; i < SEGMENTS; i++) program->segments[i] = allocate_on(f, i % devices, "a", kind, BYTES);
    qsort(program->segments, SEGMENTS, sizeof *program->segments, by_number);
    for (int answer = 0; answer < ANSWERS; answer++) {
        for (int i = 0; i < SEGMENTS; i++) {
            uint64_t begin = program->segments[i] + offset_of(answer);
            program->ranges[answer][i] = (tms_live_range_t){begin, begin + LIVE_BYTES};
        }
    }
}

static void prepare(program_t *program, fixture_t *f, int devices) { prepare_kind(program, f, devices, TMS_BACKUP_PINNED); }

static void free_all(const program_t *program) {
    tms_error_t error;
    for (int i = 0; i < SEGMENTS; i++)
        ASSERT_OK(tms_saver_free(&program->fixture->saver, program->segments[i], &error), error);
}

/* One cycle, with other contents than before. `early`: whether copies had begun before the search. */
static void cycle(program_t *program, int answer, bool early) {
    tms_error_t error;
    tms_report_t report;
    const uint32_t seed = (uint32_t)(program->searches + 1) * SEGMENTS;
    for (uint32_t i = 0; i < SEGMENTS; i++) fill(program->segments[i], BYTES, seed + i);
    program->answer = answer;
    program->holds = early;
    const int searches = program->searches;
    ASSERT_OK(pause_program(program, &report, &error), error);
    assert_int_equal(program->searches, searches + 1);
    assert_int_equal(program->planned, early);
    assert_int_equal(program->copies > 0, early);
    assert_int_equal(report.copied_bytes, SEGMENTS * LIVE_BYTES);
    ASSERT_OK(resume_tag(program->fixture, NULL, &report, &error), error);
    assert_int_equal(report.copied_bytes, SEGMENTS * LIVE_BYTES);
    for (uint32_t i = 0; i < SEGMENTS; i++)
        assert_filled_part(program->segments[i], offset_of(answer), LIVE_BYTES, seed + i);
}

static void the_second_pause_copies_before_it_knows(void **state) {
    program_t program;
    prepare(&program, *state, 1);
    cycle(&program, 0, false);
    const uint64_t copies = copies_out();
    cycle(&program, 0, true);
    assert_int_equal(copies_out(), copies); /* nothing is copied twice */
    cycle(&program, 0, true);
}

static void another_answer_decides_and_ends_the_expectation(void **state) {
    program_t program;
    prepare(&program, *state, 1);
    cycle(&program, 0, false);
    const uint64_t copies = copies_out();
    cycle(&program, 1, true);
    assert_true(copies_out() > copies && copies_out() < copies + SEGMENTS); /* those in vain were cancelled */
    cycle(&program, 0, false);
    cycle(&program, 1, false);
    cycle(&program, 1, false); /* the same as before: from here on it is expected again */
    cycle(&program, 1, true);
}

static void devices_copy_side_by_side(void **state) {
    program_t program;
    prepare(&program, *state, 2);
    cycle(&program, 0, false);
    cycle(&program, 0, true);
    cycle(&program, 1, true);
}

/* Without an answer everything is live. */
static void without_an_answer_everything_is_copied(void **state) {
    tms_error_t error;
    tms_report_t report;
    program_t program;
    prepare(&program, *state, 1);
    cycle(&program, 0, false);
    for (uint32_t i = 0; i < SEGMENTS; i++) fill(program.segments[i], BYTES, i);
    program.knows_nothing = true;
    ASSERT_OK(pause_program(&program, &report, &error), error);
    assert_int_equal(report.copied_bytes, SEGMENTS * BYTES);
    ASSERT_OK(resume_tag(program.fixture, NULL, NULL, &error), error);
    for (uint32_t i = 0; i < SEGMENTS; i++) assert_filled(program.segments[i], BYTES, i);
    program.knows_nothing = false;
    cycle(&program, 0, false);
}

/* They may lie at the same addresses as others before them. */
static void nothing_is_expected_of_other_segments(void **state) {
    tms_error_t error;
    program_t program;
    fixture_t *f = *state;
    prepare(&program, f, 1);
    cycle(&program, 0, false);
    int second = 1; /* of two side by side, which are in one run */
    while (program.segments[second] != program.segments[second - 1] + BYTES) assert_true(++second < SEGMENTS);
    assert_int_equal(tms_saver_free(&f->saver, program.segments[second], &error), TMS_OK);
    assert_int_equal(allocate(f, "a", TMS_BACKUP_PINNED, BYTES), program.segments[second]);
    cycle(&program, 0, false);
    cycle(&program, 0, true);
    uint64_t further = allocate(f, "b", TMS_BACKUP_NONE, BYTES);
    cycle(&program, 0, false);
    assert_int_equal(tms_saver_free(&f->saver, further, &error), TMS_OK);
    cycle(&program, 0, false);
}

static int plans_of_last_call(fixture_t *f) {
    static tms_event_t events[1024];
    uint64_t recorded = 0;
    size_t count = tms_events_copy(&f->saver.events, events, sizeof events / sizeof *events, &recorded);
    int plans = 0;
    assert_true(count > 0);
    for (size_t i = 0; i < count; i++) {
        plans += events[i].kind == TMS_EVENT_PHASE && events[i].phase == TMS_PHASE_PLAN &&
                 events[i].call == events[count - 1].call;
    }
    return plans;
}

/* A view of it shows what the last pause that kept the segment has left. */
static void retained_memory_is_not_overwritten_in_vain(void **state) {
    tms_error_t error;
    tms_host_buffer_t *view = NULL;
    void *host = NULL;
    program_t program;
    fixture_t *f = *state;
    prepare(&program, f, 1);
    for (int retains = 0; retains < 2; retains++) {
        atomic_store(&f->saver.host_policy, retains ? TMS_HOST_RETAIN : TMS_HOST_RELEASE);
        program.answer = 0;
        for (int i = 0; i < 2; i++) { /* the second time it is what was before */
            ASSERT_OK(pause_program(&program, NULL, &error), error);
            ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
        }
        program.answer = 1;
        ASSERT_OK(tms_saver_host_backup(&f->saver, program.segments[0], LIVE_BYTES, &view, &host, &error), error);
        assert_int_equal(host != NULL, retains);
        ASSERT_OK(pause_program(&program, NULL, &error), error);
        assert_int_equal(plans_of_last_call(f), retains ? 1 : 2);
        ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    }
    tms_host_buffer_drop(view);
}

static void assert_nothing_happened(program_t *program, uint32_t seed) {
    for (uint32_t i = 0; i < SEGMENTS; i++) {
        assert_int_equal(state_of(program->fixture, program->segments[i]), TMS_SEGMENT_ACTIVE);
        assert_filled(program->segments[i], BYTES, seed + i);
    }
    assert_int_equal(atomic_load(&program->fixture->saver.stores.host.buffer_bytes), 0);
    assert_nothing_waits(&program->fixture->saver);
}

/* Ctrl-C during the search, with copies in flight. */
static void a_cancelled_search_ends_the_copies(void **state) {
    for (int answer = 0; answer < ANSWERS; answer++) {
        tms_error_t error;
        program_t program;
        prepare(&program, *state, 1);
        cycle(&program, 0, false);
        for (uint32_t i = 0; i < SEGMENTS; i++) fill(program.segments[i], BYTES, i);
        program.answer = answer;
        program.holds = program.cancels = true;
        assert_int_equal(pause_program(&program, NULL, &error), TMS_INTERRUPTED);
        assert_nothing_happened(&program, 0);
        program.cancels = program.cancelled = false;
        free_all(&program);
    }
}

/* Whatever was found: a copy that the driver refuses fails the pause. */
static void a_copy_that_fails_fails_the_pause(void **state) {
    for (int answer = 0; answer < ANSWERS; answer++) {
        tms_error_t error;
        program_t program;
        prepare(&program, *state, 1);
        cycle(&program, 0, false);
        for (uint32_t i = 0; i < SEGMENTS; i++) fill(program.segments[i], BYTES, i);
        program.answer = answer;
        program.holds = false;
        simulator()->fail_after("cuStreamCreate", 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_program(&program, NULL, &error), TMS_DRIVER);
        assert_string_equal(error.call, "cuStreamCreate");
        assert_nothing_happened(&program, 0);
        cycle(&program, answer, answer == 0);
        free_all(&program);
    }
}

/* Files may need more room for what was live than for what is. */
static void a_store_that_fails_fails_the_pause_unless_its_copies_are_in_vain(void **state) {
    for (int answer = 0; answer < ANSWERS; answer++) {
        tms_error_t error;
        program_t program;
        fixture_t *f = *state;
        prepare_kind(&program, f, 1, HEAP_BACKUP);
        ASSERT_OK(pause_program(&program, NULL, &error), error);
        ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
        fill(program.segments[0], BYTES, 1);
        atomic_store(&f->heap.fail_in[HEAP_SAVE], 1);
        program.answer = answer;
        assert_int_equal(pause_program(&program, NULL, &error), answer == 0 ? TMS_BACKUP_IO : TMS_OK);
        assert_int_equal(atomic_load(&f->heap.fail_in[HEAP_SAVE]), 0);
        assert_int_equal(state_of(f, program.segments[0]), answer == 0 ? TMS_SEGMENT_ACTIVE : TMS_SEGMENT_PAUSED);
        ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
        assert_filled_part(program.segments[0], offset_of(answer), LIVE_BYTES, 1);
        free_all(&program);
    }
}

/* Copies in vain are cancelled although the call goes on. Their staging memory is unpinned like that of any other copies. */
static void copies_in_vain_to_disk_leave_no_staging_memory(void **state) {
    fixture_t *f = *state;
    for (int devices = 1; devices <= 2; devices++) {
        tms_error_t error;
        tms_report_t report;
        tms_counters_t counters;
        tms_sim_usage_t usage;
        program_t program;
        prepare_kind(&program, f, devices, TMS_BACKUP_DISK);
        ASSERT_OK(pause_program(&program, NULL, &error), error);
        ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
        for (uint32_t i = 0; i < SEGMENTS; i++) fill(program.segments[i], BYTES, i);
        program.answer = 1;
        program.holds = true;
        ASSERT_OK(pause_program(&program, &report, &error), error);
        assert_true(program.copies > 0);
        assert_int_equal(report.copied_bytes, SEGMENTS * LIVE_BYTES);
        tms_saver_counters(&f->saver, &counters);
        assert_int_equal(counters.quarantined_host, 0);
        simulator()->usage(0, &usage);
        assert_int_equal(usage.host_bytes, 0); /* nothing is pinned */
        ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
        for (uint32_t i = 0; i < SEGMENTS; i++) assert_filled_part(program.segments[i], offset_of(1), LIVE_BYTES, i);
        free_all(&program);
    }
}

/* Host memory suffices for what is live, and not for what was. */
static void too_little_host_memory_for_what_is_expected_does_not_fail_the_pause(void **state) {
    tms_error_t error;
    tms_report_t report;
    program_t program;
    fixture_t *f = *state;
    prepare(&program, f, 1);
    cycle(&program, 0, false);
    for (int i = 0; i < SEGMENTS; i++) program.ranges[1][i].begin = program.ranges[1][i].end - LIVE_BYTES / 2;
    f->saver.stores.host.limits.cap_bytes = 2 * MIB; /* whole huge pages */
    fill(program.segments[0], BYTES, 7);
    program.answer = 1;
    ASSERT_OK(pause_program(&program, &report, &error), error);
    assert_int_equal(report.copied_bytes, SEGMENTS * LIVE_BYTES / 2);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled_part(program.segments[0], BYTES - LIVE_BYTES / 2, LIVE_BYTES / 2, 7);
}

/* The copies in flight are the parent's. */
static void a_child_forked_by_the_search_does_not_call_the_driver(void **state) {
    tms_error_t error;
    program_t program;
    prepare(&program, *state, 1);
    cycle(&program, 0, false);
    for (uint32_t i = 0; i < SEGMENTS; i++) fill(program.segments[i], BYTES, i);
    program.holds = program.forks = true;
    const pid_t parent = getpid();
    tms_status_t status = pause_program(&program, NULL, &error);
    if (getpid() != parent) end_child(status != TMS_FORKED ? 1 : simulator()->calls_in_child() != 0 ? 2 : 0);
    ASSERT_OK(status, error);
    assert_true(program.copies > 0);
    ASSERT_OK(resume_tag(program.fixture, NULL, NULL, &error), error);
    for (uint32_t i = 0; i < SEGMENTS; i++) assert_filled_part(program.segments[i], 0, LIVE_BYTES, i);
}

typedef struct steps {
    uint64_t last;
    int calls;
} steps_t;

static void on_progress(void *context, uint64_t done, uint64_t total) {
    steps_t *steps = context;
    assert_true(done >= steps->last && done <= total);
    assert_int_equal(total, SEGMENTS * LIVE_BYTES);
    steps->last = done;
    steps->calls++;
}

/* What was copied in vain is no progress. */
static void progress_never_goes_back(void **state) {
    for (int answer = 0; answer < ANSWERS; answer++) {
        tms_error_t error;
        program_t program;
        steps_t steps = {0};
        prepare(&program, *state, 1);
        cycle(&program, 0, false);
        program.answer = answer;
        const tms_selection_t selection = {
            .find_live = search, .live_context = &program, .on_progress = on_progress, .on_progress_context = &steps};
        ASSERT_OK(pause_selected(program.fixture, &selection, NULL, &error), error);
        assert_int_equal(steps.last, SEGMENTS * LIVE_BYTES);
        assert_true(steps.calls > 0);
        free_all(&program);
    }
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(the_second_pause_copies_before_it_knows),
        ONE(another_answer_decides_and_ends_the_expectation),
        TWO(devices_copy_side_by_side),
        ONE(without_an_answer_everything_is_copied),
        ONE(nothing_is_expected_of_other_segments),
        ONE(retained_memory_is_not_overwritten_in_vain),
        ONE(a_cancelled_search_ends_the_copies),
        ONE(a_copy_that_fails_fails_the_pause),
        ONE(a_store_that_fails_fails_the_pause_unless_its_copies_are_in_vain),
        TWO(copies_in_vain_to_disk_leave_no_staging_memory),
        ONE(too_little_host_memory_for_what_is_expected_does_not_fail_the_pause),
        ONE(a_child_forked_by_the_search_does_not_call_the_driver),
        ONE(progress_never_goes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
