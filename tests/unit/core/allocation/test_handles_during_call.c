/* Guards memory that the program maps and unmaps itself while a pause or resume owns it: the call never makes an unmap or a
 * map wait, and memory that is taken over belongs to the handle that is mapped there. */

#include "support/handles_fixture.h"

#include <sched.h>

/* ---- while a pause asks what is live: PyTorch's mutex is held by the thread that maps ---- */

typedef struct question {
    program_t *program;
    void (*act)(struct question *question); /* what the program does while the pause asks */
    bool was_called;                        /* the pause has asked */
    bool busy;                              /* the last map of `act` was refused for now */
    bool wrong;                             /* `act` has found an error */
} question_t;

/* While a pause owns the memory no handle has any. Its successor is found at its addresses, and mapped only once. Returns
 * whether this is so, and asserts nothing, because the pause could not end then. */
static bool are_handles_right(program_t *program) {
    tms_saver_t *saver = &program->fixture->saver;
    CUmemGenericAllocationHandle memory = 0;
    bool right, busy = true;
    uint64_t number = 0;
    tms_error_t error;
    right = tms_handles_memory(saver, program->handles[0], &memory, &error) == TMS_INVALID_STATE;
    unmap(program, 1);
    map(program, 1, TMS_BACKUP_PINNED);
    right &= tms_handles_retain(saver, place(program, 1), &number) && number == program->handles[1];
    if (number) right &= tms_handles_release(saver, number, &error) == TMS_OK;
    right &= tms_handles_memory(saver, program->handles[1], &memory, &error) == TMS_INVALID_STATE;
    number = create(program, TMS_BACKUP_PINNED);
    right &= tms_handles_map(saver, place(program, 1), PIECE_BYTES, number, &busy, &error) == TMS_INVALID_ARGUMENT;
    right &= tms_handles_release(saver, number, &error) == TMS_OK;
    fill(place(program, 1), PIECE_BYTES, 7);
    return right && !busy;
}

static void unmap_one(question_t *question) { unmap(question->program, 1); }

static void map_again(question_t *question) {
    unmap(question->program, 1);
    map(question->program, 1, TMS_BACKUP_PINNED);
    fill(place(question->program, 1), PIECE_BYTES, 7);
}

static void map_twice(question_t *question) {
    unmap(question->program, 1);
    map(question->program, 1, TMS_BACKUP_PINNED);
    map_again(question);
}

static void map_and_unmap_one(question_t *question) {
    unmap(question->program, 1);
    map(question->program, 1, TMS_BACKUP_PINNED);
    unmap(question->program, 1);
}

static void map_weights(question_t *question) {
    program_t *program = question->program;
    unmap(program, 1);
    map_handle(program, 1, create_on(program, 0, "weights", TMS_BACKUP_PINNED));
    fill(place(program, 1), PIECE_BYTES, 7);
}

static void query_handles(question_t *question) { question->wrong = !are_handles_right(question->program); }

static void map_another_devices(question_t *question) {
    program_t *program = question->program;
    tms_error_t error;
    unmap(program, 1);
    program->handles[1] = create_on(program, 1, "default", TMS_BACKUP_PINNED);
    (void)tms_handles_map(&program->fixture->saver, place(program, 1), PIECE_BYTES, program->handles[1], &question->busy,
                          &error);
}

static void grow(question_t *question) {
    map(question->program, 3, TMS_BACKUP_PINNED);
    fill(place(question->program, 3), PIECE_BYTES, 8);
}

static void free_all_addresses(question_t *question) {
    program_t *program = question->program;
    for (int piece = 0; piece < PIECES; piece++) unmap(program, piece);
    free_addresses(program);
    program->base = 0;
}

static void fail_to_map(question_t *question) {
    program_t *program = question->program;
    tms_error_t error;
    unmap(program, 1);
    program->handles[3] = create(program, TMS_BACKUP_PINNED);
    simulator()->fail_after("cuMemMap", 0, 1, CUDA_ERROR_INVALID_VALUE);
    (void)tms_handles_map(&program->fixture->saver, place(program, 3), PIECE_BYTES, program->handles[3], &question->busy,
                          &error);
}

static int32_t find_live(void *context, tms_live_t *live) {
    question_t *question = context;
    (void)live;
    question->was_called = true;
    question->act(question);
    return -1; /* everything is live */
}

/* Pauses, and acts while the pause asks what is live. Returns the status of the pause. */
static tms_status_t pause_with(program_t *program, void (*act)(question_t *question), tms_report_t *report,
                               tms_error_t *error) {
    question_t question = {.program = program, .act = act};
    const tms_selection_t selection = {.find_live = find_live, .live_context = &question};
    tms_status_t status = pause_selected_with_report(program->fixture, &selection, report, error);
    assert_true(question.was_called);
    assert_false(question.wrong);
    assert_int_equal(question.busy, act == fail_to_map || act == map_another_devices);
    return status;
}

static void an_unmap_is_carried_out_at_the_end(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_report_t report;
    tms_error_t error;
    map_all(&program, TMS_BACKUP_PINNED);
    const uint64_t before = used();
    ASSERT_OK(pause_with(&program, unmap_one, &report, &error), error);
    assert_int_equal(used(), before - PIECES * PIECE_BYTES);
    ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
    assert_int_equal(report.bytes, (PIECES - 1) * PIECE_BYTES);
    map(&program, 1, TMS_BACKUP_PINNED); /* its addresses are free */
    end(&program);
}

static void memory_is_taken_over(program_t *program, void (*act)(question_t *question)) {
    fixture_t *f = program->fixture;
    tms_report_t report;
    tms_error_t error;
    map_all(program, TMS_BACKUP_PINNED);
    const uint64_t before = used();
    ASSERT_OK(pause_with(program, act, &report, &error), error);
    assert_int_equal(report.bytes, (PIECES - 1) * PIECE_BYTES);
    assert_int_equal(used(), before - (PIECES - 1) * PIECE_BYTES);
    assert_filled(place(program, 1), PIECE_BYTES, 7);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(place(program, 0), PIECE_BYTES, 1);
    assert_filled(place(program, 1), PIECE_BYTES, 7);
    ASSERT_OK(pause_all(f, &error), error); /* from now on it is like the others */
    assert_int_equal(used(), before - PIECES * PIECE_BYTES);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(place(program, 1), PIECE_BYTES, 7);
    end(program);
}

static void a_map_takes_the_memory_over(void **state) {
    program_t program = reserve(*state);
    memory_is_taken_over(&program, map_again);
}

static void a_map_takes_the_memory_over_twice(void **state) {
    program_t program = reserve(*state);
    memory_is_taken_over(&program, map_twice);
}

static void handles_are_known_during_a_pause(void **state) {
    program_t program = reserve(*state);
    memory_is_taken_over(&program, query_handles);
}

static void a_failed_pause_leaves_what_was_taken_over(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_report_t report;
    tms_error_t error;
    map_all(&program, TMS_BACKUP_PINNED);
    const uint64_t before = used();
    simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_not_equal(pause_with(&program, map_again, &report, &error), TMS_OK);
    assert_int_equal(simulator()->failures_fired(), 1);
    assert_int_equal(used(), before);
    assert_filled(place(&program, 0), PIECE_BYTES, 1);
    assert_filled(place(&program, 1), PIECE_BYTES, 7);
    end(&program);
}

static void memory_that_was_taken_over_is_unmapped_again(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_report_t report;
    tms_error_t error;
    map_all(&program, TMS_BACKUP_PINNED);
    ASSERT_OK(pause_with(&program, map_and_unmap_one, &report, &error), error);
    assert_int_equal(report.bytes, (PIECES - 1) * PIECE_BYTES);
    assert_int_equal(used(), 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(used(), (PIECES - 1) * PIECE_BYTES);
    end(&program);
}

static tms_segment_info_t row_of(program_t *program, int piece) {
    tms_segment_info_t row;
    assert_int_equal(tms_inspect_find(&program->fixture->saver, place(program, piece), 1, &row), TMS_OK);
    return row;
}

/* The orphan and the new handle have different tags and backups, whether the pause succeeds or fails. */
static void what_was_taken_over_belongs_to_the_new_handle(void **state) {
    fixture_t *f = *state;
    for (int fails = 0; fails < 2; fails++) {
        program_t program = reserve(f);
        tms_report_t report;
        tms_error_t error;
        for (int piece = 0; piece < PIECES; piece++) map(&program, piece, piece == 3 ? TMS_BACKUP_PINNED : TMS_BACKUP_NONE);
        fill(place(&program, 3), PIECE_BYTES, 4);
        const uint64_t before = used();
        if (fails) simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_UNKNOWN);
        tms_status_t status = pause_with(&program, map_weights, &report, &error);
        assert_int_equal(status == TMS_OK, !fails);
        const tms_segment_info_t row = row_of(&program, 1);
        assert_string_equal(row.tag, "weights");
        assert_int_equal(row.backup, TMS_BACKUP_PINNED);
        assert_int_equal(row.state, TMS_SEGMENT_ACTIVE);
        ASSERT_OK(pause_with_report(f, "default", &report, &error), error);
        assert_int_equal(report.bytes, fails ? (PIECES - 1) * PIECE_BYTES : 0);
        assert_int_equal(used(), before - (PIECES - 1) * PIECE_BYTES);
        ASSERT_OK(pause_with_report(f, "weights", &report, &error), error);
        assert_int_equal(report.bytes, PIECE_BYTES);
        assert_int_equal(report.copied_bytes, PIECE_BYTES);
        ASSERT_OK(resume_all(f, &error), error);
        assert_int_equal(used(), before);
        assert_filled(place(&program, 1), PIECE_BYTES, 7);
        assert_filled(place(&program, 3), PIECE_BYTES, 4);
        end(&program);
        assert_int_equal(used(), 0);
    }
}

static void memory_of_another_device_is_not_taken_over(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_report_t report;
    tms_error_t error;
    tms_sim_usage_t usage;
    map_all(&program, TMS_BACKUP_PINNED);
    ASSERT_OK(pause_with(&program, map_another_devices, &report, &error), error);
    map_handle(&program, 1, program.handles[1]); /* now that the orphan is gone */
    assert_int_equal(used(), 0);
    simulator()->usage(1, &usage);
    assert_int_equal(usage.physical_bytes, PIECE_BYTES);
    fill(place(&program, 1), PIECE_BYTES, 7);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(place(&program, 1), PIECE_BYTES, 7);
    end(&program);
}

static struct {
    program_t *program;
    CUresult (*unmap)(CUdeviceptr address, size_t bytes);
    bool tried, busy;
} releasing;

/* The pause releases another piece first. */
static CUresult map_during_the_release(CUdeviceptr address, size_t bytes) {
    program_t *program = releasing.program;
    if (!releasing.tried) {
        const int piece = address == place(program, 1) ? 2 : 1;
        tms_error_t error;
        releasing.tried = true;
        unmap(program, piece);
        program->handles[piece] = create(program, TMS_BACKUP_PINNED);
        (void)tms_handles_map(&program->fixture->saver, place(program, piece), PIECE_BYTES, program->handles[piece],
                              &releasing.busy, &error);
        if (!releasing.busy) unmap(program, piece); /* the pause releases the memory: the test fails at its end */
    }
    return releasing.unmap(address, bytes);
}

static void memory_that_a_pause_releases_is_not_taken_over(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_report_t report;
    tms_error_t error;
    map_all(&program, TMS_BACKUP_PINNED);
    releasing = (__typeof__(releasing)){.program = &program, .unmap = f->cuda->cuMemUnmap};
    writable(f)->cuMemUnmap = map_during_the_release;
    ASSERT_OK(pause_with_report(f, ALL_TAGS, &report, &error), error);
    assert_true(releasing.tried);
    assert_true(releasing.busy);
    assert_int_equal(report.bytes, PIECES * PIECE_BYTES);
    writable(f)->cuMemUnmap = releasing.unmap;
    map_handle(&program, 1, program.handles[1]);
    assert_int_equal(used(), PIECE_BYTES);
    ASSERT_OK(resume_all(f, &error), error);
    for (int piece = 2; piece < PIECES; piece++) assert_filled(place(&program, piece), PIECE_BYTES, (uint32_t)piece + 1);
    end(&program);
}

static void a_segment_grows_during_a_pause(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_report_t report;
    tms_error_t error;
    for (int piece = 0; piece < PIECES - 1; piece++) map(&program, piece, TMS_BACKUP_PINNED);
    ASSERT_OK(pause_with(&program, grow, &report, &error), error);
    assert_int_equal(report.bytes, (PIECES - 1) * PIECE_BYTES);
    assert_filled(place(&program, 3), PIECE_BYTES, 8);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(place(&program, 3), PIECE_BYTES, 8);
    end(&program);
}

/* The orphan may be unmapped a moment after it is no segment any more. */
static void a_map_that_fails_beside_an_orphan_is_tried_again(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_report_t report;
    tms_error_t error;
    for (int piece = 0; piece < PIECES - 1; piece++) map(&program, piece, TMS_BACKUP_PINNED);
    ASSERT_OK(pause_with(&program, fail_to_map, &report, &error), error);
    map_handle(&program, 3, program.handles[3]);
    fill(place(&program, 3), PIECE_BYTES, 6);
    assert_filled(place(&program, 3), PIECE_BYTES, 6);
    ASSERT_OK(resume_all(f, &error), error);
    end(&program);
}

static void addresses_are_freed_at_the_end(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    tms_report_t report;
    tms_error_t error;
    tms_sim_usage_t usage;
    map_all(&program, TMS_BACKUP_PINNED);
    ASSERT_OK(pause_with(&program, free_all_addresses, &report, &error), error);
    simulator()->usage(0, &usage);
    assert_int_equal(usage.physical_bytes, 0);
    assert_nothing_waits(&f->saver);
}

/* ---- while a resume fills the memory ---- */

typedef struct refill {
    program_t *program;
    bool tried, busy;
    tms_status_t status;
} refill_t;

/* Asserts nothing, because the resume could not end then. */
static void while_resumed(void *context, uint64_t done, uint64_t total) {
    refill_t *refill = context;
    program_t *program = refill->program;
    tms_error_t error;
    (void)done;
    (void)total;
    if (refill->tried) return;
    refill->tried = true;
    unmap(program, 1);
    const uint64_t number = create(program, TMS_BACKUP_PINNED);
    refill->status =
        tms_handles_map(&program->fixture->saver, place(program, 1), PIECE_BYTES, number, &refill->busy, &error);
    program->handles[1] = number;
}

static void a_map_is_busy_while_a_resume_fills_the_memory(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    refill_t refill = {.program = &program};
    const tms_selection_t selection = {.on_progress = while_resumed, .on_progress_context = &refill};
    tms_error_t error;
    map_all(&program, TMS_BACKUP_PINNED);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_true(refill.tried);
    assert_true(refill.busy);
    assert_int_equal(refill.status, TMS_INVALID_STATE);
    map_handle(&program, 1, program.handles[1]);
    fill(place(&program, 1), PIECE_BYTES, 5);
    assert_filled(place(&program, 0), PIECE_BYTES, 1);
    assert_filled(place(&program, 1), PIECE_BYTES, 5);
    end(&program);
}

/* ---- threads ---- */

enum { CYCLES = 60 };

typedef struct mapper {
    program_t *program;
    int piece;
    _Atomic bool *ended;
    uint64_t maps;
} mapper_t;

/* Maps and unmaps one piece until the pauses have ended, as PyTorch does, which touches no memory that may be paused. */
static void *map_and_unmap(void *argument) {
    mapper_t *mapper = argument;
    program_t *program = mapper->program;
    while (!atomic_load(mapper->ended)) {
        const uint64_t number = create(program, TMS_BACKUP_PINNED);
        bool busy = true;
        tms_error_t error;
        tms_status_t status = TMS_INVALID_STATE;
        while (busy) {
            status =
                tms_handles_map(&program->fixture->saver, place(program, mapper->piece), PIECE_BYTES, number, &busy, &error);
            if (busy) sched_yield();
        }
        ASSERT_OK(status, error);
        program->handles[mapper->piece] = number;
        unmap(program, mapper->piece);
        mapper->maps++;
    }
    return NULL;
}

static void threads_map_beside_pauses(void **state) {
    fixture_t *f = *state;
    program_t program = reserve(f);
    _Atomic bool ended = false;
    mapper_t mappers[2] = {{.program = &program, .piece = 0, .ended = &ended},
                           {.program = &program, .piece = 2, .ended = &ended}};
    pthread_t threads[2];
    tms_error_t error;
    for (int piece = 1; piece < PIECES; piece += 2) {
        map(&program, piece, TMS_BACKUP_PINNED);
        fill(place(&program, piece), PIECE_BYTES, (uint32_t)piece);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], NULL, map_and_unmap, &mappers[i]), 0);
    for (int cycle = 0; cycle < CYCLES; cycle++) {
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_all(f, &error), error);
        for (int piece = 1; piece < PIECES; piece += 2) assert_filled(place(&program, piece), PIECE_BYTES, (uint32_t)piece);
    }
    atomic_store(&ended, true);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_true(mappers[i].maps > 0);
    }
    end(&program);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup_one_device, teardown)
    const struct CMUnitTest tests[] = {
        TEST(an_unmap_is_carried_out_at_the_end),
        TEST(a_map_takes_the_memory_over),
        TEST(a_map_takes_the_memory_over_twice),
        TEST(handles_are_known_during_a_pause),
        TEST(a_failed_pause_leaves_what_was_taken_over),
        TEST(memory_that_was_taken_over_is_unmapped_again),
        TEST(what_was_taken_over_belongs_to_the_new_handle),
        cmocka_unit_test_setup_teardown(memory_of_another_device_is_not_taken_over, setup_two_devices, teardown),
        TEST(memory_that_a_pause_releases_is_not_taken_over),
        TEST(a_segment_grows_during_a_pause),
        TEST(a_map_that_fails_beside_an_orphan_is_tried_again),
        TEST(addresses_are_freed_at_the_end),
        TEST(a_map_is_busy_while_a_resume_fills_the_memory),
        TEST(threads_map_beside_pauses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
