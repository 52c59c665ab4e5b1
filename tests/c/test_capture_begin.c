/* A capture that begins while a pause or resume is under way, and what a call asks of captures that it cannot see. */

#include "support.h"

#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <unistd.h>

enum { GATE = 1, LONG_SECONDS = 600, GIVE_UP_SECONDS = 120 };

/* Another thread, and what it found. */
typedef struct other {
    fixture_t *fixture;
    pthread_t thread;
    uint64_t address;
    tms_segment_state_t state; /* of `address`, when its call had ended */
    bool must_not_begin;
    tms_status_t status;
    tms_error_t error;
} other_t;

static void *begin_capture(void *argument) {
    other_t *other = argument;
    other->status = tms_saver_capture_begin(&other->fixture->saver, NULL, NULL, &other->error);
    other->state = state_of(other->fixture, other->address);
    return NULL;
}

static void *pause_others(void *argument) {
    other_t *other = argument;
    other->status = pause_tag(other->fixture, "other", NULL, &other->error);
    return NULL;
}

/* What a pause that waits for the device does each time it is asked: about every 50 ms, so that a thread started at one
 * question has come to its wait, or past it, at the next. */
typedef struct script {
    int asked;
    other_t capture, pause;
    bool with_pause;
} script_t;

static int32_t play(void *context) {
    script_t *script = context;
    int question = script->asked++;
    if (question == 0)
        assert_int_equal(pthread_create(&script->capture.thread, NULL, begin_capture, &script->capture), 0);
    else if (question == 1 && script->with_pause)
        assert_int_equal(pthread_create(&script->pause.thread, NULL, pause_others, &script->pause), 0);
    else
        simulator()->open_gate(GATE);
    return 0;
}

static void a_capture_waits_for_the_call_under_way(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "held", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 1);
    CUstream stream = launch_behind_gate(f, GATE, address);
    script_t script = {.capture = {.fixture = f, .address = address}};
    tms_selection_t selection = {.interrupted = play, .interrupt_context = &script};
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_true(script.asked >= 2); /* it has waited for the device */
    assert_int_equal(pthread_join(script.capture.thread, NULL), 0);
    ASSERT_OK(script.capture.status, script.capture.error);
    assert_int_equal(script.capture.state, TMS_SEGMENT_PAUSED); /* and not still PAUSING */
    assert_int_equal(resume_tag(f, NULL, NULL, &error), TMS_CAPTURE_IN_PROGRESS);
    (void)tms_saver_capture_end(&f->saver, 0);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    destroy_stream(f, stream);
}

/* The capture has waited for longer, and does not take the turn. */
static void a_capture_that_waits_keeps_nobody_from_the_turn(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    alarm(GIVE_UP_SECONDS); /* a turn that is lost is one that nobody ever gets */
    uint64_t held = allocate(f, "held", TMS_BACKUP_NONE, 2 * MIB), other = allocate(f, "other", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, held);
    script_t script = {.capture = {.fixture = f, .address = held}, .pause = {.fixture = f}, .with_pause = true};
    const char *const tags[] = {"held"};
    tms_selection_t selection = {.tags = tags, .tag_count = 1, .interrupted = play, .interrupt_context = &script};
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_true(script.asked >= 3);
    assert_int_equal(pthread_join(script.capture.thread, NULL), 0);
    assert_int_equal(pthread_join(script.pause.thread, NULL), 0);
    alarm(0);
    ASSERT_OK(script.capture.status, script.capture.error);
    /* Whichever of the two came first. */
    bool paused = script.pause.status == TMS_OK;
    if (!paused) assert_int_equal(script.pause.status, TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(state_of(f, other), paused ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_ACTIVE);
    (void)tms_saver_capture_end(&f->saver, 0);
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    destroy_stream(f, stream);
}

/* A callback that does not return before a capture of another thread has begun or failed, as one that needs the GIL which
 * that thread holds. */
typedef struct needy {
    other_t capture, on_stream;
    int called;
} needy_t;

static void *begin_capture_on(void *argument) {
    other_t *other = argument;
    int stream = 0; /* its address is as good as a stream's */
    tms_capture_begun_t begun;
    other->status = tms_saver_capture_begin_on(&other->fixture->saver, &stream, &begun, &other->error);
    other->must_not_begin = begun.must_not_begin;
    return NULL;
}

static void need_what_they_hold(needy_t *needy) {
    if (needy->called++ > 0) return;
    assert_int_equal(pthread_create(&needy->capture.thread, NULL, begin_capture, &needy->capture), 0);
    assert_int_equal(pthread_create(&needy->on_stream.thread, NULL, begin_capture_on, &needy->on_stream), 0);
    assert_int_equal(pthread_join(needy->capture.thread, NULL), 0);
    assert_int_equal(pthread_join(needy->on_stream.thread, NULL), 0);
    simulator()->open_gate(GATE);
}

static int32_t needy_interrupted(void *context) {
    need_what_they_hold(context);
    return 0;
}
static int32_t needy_find_live(void *context, tms_live_t *live) {
    need_what_they_hold(context);
    *live = (tms_live_t){.allocation_count = 0};
    return 1;
}
static void needy_progress(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    (void)done_bytes;
    (void)total_bytes;
    need_what_they_hold(context);
}

static void a_capture_does_not_wait_for_a_callback_that_waits_for_it(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    needy_t needy[3];
    const tms_selection_t selections[] = {{.interrupted = needy_interrupted, .interrupt_context = &needy[0]},
                                          {.find_live = needy_find_live, .live_context = &needy[1]},
                                          {.progress = needy_progress, .progress_context = &needy[2]}};
    alarm(GIVE_UP_SECONDS);
    f->saver.callback_patience_seconds = 0.01;
    for (size_t i = 0; i < sizeof selections / sizeof *selections; i++) {
        uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
        fill(address, 2 * MIB, 1);
        CUstream stream = i == 0 ? launch_behind_gate(f, GATE, allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB)) : NULL;
        needy[i] = (needy_t){.capture = {.fixture = f, .address = address}, .on_stream = {.fixture = f}};
        ASSERT_OK(pause_selected(f, &selections[i], NULL, &error), error);
        assert_true(needy[i].called > 0);
        assert_int_equal(needy[i].capture.status, TMS_INVALID_STATE);
        assert_non_null(strstr(needy[i].capture.error.message, "GIL"));
        assert_int_equal(needy[i].on_stream.status, TMS_INVALID_STATE);
        assert_true(needy[i].on_stream.must_not_begin);
        assert_int_equal(tms_capture_visible(&f->saver.capture), 0);
        ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
        assert_filled(address, 2 * MIB, 1);
        if (stream) destroy_stream(f, stream);
    }
    alarm(0);
}

static int32_t begin_inside(void *context) {
    other_t *other = context;
    other->status = tms_saver_capture_begin(&other->fixture->saver, NULL, NULL, &other->error);
    simulator()->open_gate(GATE);
    return 0;
}

static void a_capture_from_inside_is_refused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, address);
    other_t other = {.fixture = f};
    tms_selection_t selection = {.interrupted = begin_inside, .interrupt_context = &other};
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_int_equal(other.status, TMS_INVALID_STATE);
    assert_string_equal(other.error.operation, "capture_begin");
    assert_non_null(strstr(other.error.message, "inside pause() or resume()"));
    assert_int_equal(tms_capture_visible(&f->saver.capture), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    destroy_stream(f, stream);
}

/* The turn is given away meanwhile: the capture need not wait, and the next attempt sees it. */
static int32_t capture_elsewhere_and_make_room(void *context) {
    script_t *script = context;
    if (simulator()->calls("cuMemGetInfo") == 0 || script->asked++ > 0) return 0;
    assert_int_equal(pthread_create(&script->capture.thread, NULL, begin_capture, &script->capture), 0);
    assert_int_equal(pthread_join(script->capture.thread, NULL), 0);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(250 * MIB)), 0);
    return 0;
}

static void a_capture_while_a_resume_waits_for_memory(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB);
    fill(address, 40 * MIB, 1);
    ASSERT_OK(pause_tag(f, NULL, NULL, &error), error);
    assert_int_equal(simulator()->take_memory(0, 250 * MIB), 0);
    simulator()->clear_counts();
    script_t script = {.capture = {.fixture = f, .address = address}};
    tms_selection_t selection = {
        .interrupted = capture_elsewhere_and_make_room, .interrupt_context = &script, .timeout_seconds = LONG_SECONDS};
    assert_int_equal(resume_selected(f, &selection, NULL, &error), TMS_CAPTURE_IN_PROGRESS);
    ASSERT_OK(script.capture.status, script.capture.error);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    (void)tms_saver_capture_end(&f->saver, 0);
    ASSERT_OK(resume_tag(f, NULL, NULL, &error), error);
    assert_filled(address, 40 * MIB, 1);
}

/* A pause that waits for its turn while another call has it. */
typedef struct late {
    fixture_t *fixture;
    pthread_t thread;
    int asked;
    bool started;
    tms_status_t capture_status, pause_status;
    uint64_t identity;
    tms_error_t error;
} late_t;

/* Announced directly: tms_saver_capture_begin would wait for the call that has the turn. */
static int32_t capture_and_end_the_other(void *context) {
    late_t *late = context;
    if (late->asked++ > 0) return 0;
    const tms_error_context_t here = {.operation = "test", .device = TMS_NO_DEVICE};
    tms_saver_t *saver = &late->fixture->saver;
    pthread_mutex_lock(&saver->lock);
    late->capture_status = tms_capture_begin(&saver->capture, NULL, &late->identity, &here, NULL);
    pthread_mutex_unlock(&saver->lock);
    simulator()->open_gate(GATE);
    return 0;
}

static void *pause_late(void *argument) {
    late_t *late = argument;
    const char *const tags[] = {"late"};
    const tms_selection_t selection = {
        .tags = tags, .tag_count = 1, .interrupted = capture_and_end_the_other, .interrupt_context = late};
    late->pause_status = pause_selected(late->fixture, &selection, NULL, &late->error);
    return NULL;
}

static int32_t start_late_pause(void *context) {
    late_t *late = context;
    if (!late->started) assert_int_equal(pthread_create(&late->thread, NULL, pause_late, late), 0);
    late->started = true;
    return 0;
}

static void a_capture_that_began_while_a_pause_waited_for_its_turn(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t held = allocate(f, "held", TMS_BACKUP_NONE, 2 * MIB), address = allocate(f, "late", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, held);
    late_t late = {.fixture = f};
    const char *const tags[] = {"held"};
    tms_selection_t selection = {.tags = tags, .tag_count = 1, .interrupted = start_late_pause, .interrupt_context = &late};
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_true(late.started);
    assert_int_equal(pthread_join(late.thread, NULL), 0);
    assert_true(late.asked >= 1);
    assert_int_equal(late.capture_status, TMS_OK);
    assert_int_equal(late.pause_status, TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    (void)tms_saver_capture_end(&f->saver, 0);
    destroy_stream(f, stream);
}

/* Two pauses, of which the second waits for its turn. Only the one that has the turn is what a capture waits for. */
typedef struct turns {
    fixture_t *fixture;
    pthread_t waiting;
    sem_t asked; /* posted by each question of the pause that waits */
    int questions;
    other_t capture;
    bool is_kept;      /* what is noted of the callback of the pause that has the turn, while the other one asks */
    double began_seen; /* what is noted in a question of the pause that waits */
    tms_status_t status;
    tms_error_t error;
} turns_t;

static double callback_began(turns_t *turns) {
    tms_saver_t *saver = &turns->fixture->saver;
    pthread_mutex_lock(&saver->lock);
    double began = saver->callback_began;
    pthread_mutex_unlock(&saver->lock);
    return began;
}

static int32_t ask_while_waiting(void *context) {
    turns_t *turns = context;
    turns->began_seen = callback_began(turns);
    (void)sem_post(&turns->asked);
    return 0;
}

static void *pause_second(void *argument) {
    turns_t *turns = argument;
    const char *const tags[] = {"second"};
    const tms_selection_t selection = {
        .tags = tags, .tag_count = 1, .interrupted = ask_while_waiting, .interrupt_context = turns};
    turns->status = pause_selected(turns->fixture, &selection, NULL, &turns->error);
    return NULL;
}

/* Does not return before a capture has been refused, while the other pause asks again and again. */
static int32_t hold_up_a_capture(void *context) {
    turns_t *turns = context;
    if (turns->questions++ > 0) return 0;
    double began = callback_began(turns);
    assert_int_equal(pthread_create(&turns->waiting, NULL, pause_second, turns), 0);
    for (int i = 0; i < 2; i++) assert_int_equal(sem_wait(&turns->asked), 0); /* the first has ended by the second */
    turns->is_kept = began > 0 && callback_began(turns) == began;
    simulator()->open_gate(GATE);
    if (!turns->is_kept) return 0; /* the capture would wait for ever */
    assert_int_equal(pthread_create(&turns->capture.thread, NULL, begin_capture, &turns->capture), 0);
    assert_int_equal(pthread_join(turns->capture.thread, NULL), 0);
    return 0;
}

static void a_call_that_waits_for_its_turn_hides_no_callback(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    alarm(GIVE_UP_SECONDS);
    f->saver.callback_patience_seconds = 0.01;
    uint64_t held = allocate(f, "held", TMS_BACKUP_NONE, 2 * MIB), second = allocate(f, "second", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, held);
    turns_t turns = {.fixture = f, .capture = {.fixture = f, .address = held}};
    assert_int_equal(sem_init(&turns.asked, 0, 0), 0);
    const char *const tags[] = {"held"};
    tms_selection_t selection = {
        .tags = tags, .tag_count = 1, .interrupted = hold_up_a_capture, .interrupt_context = &turns};
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_int_equal(pthread_join(turns.waiting, NULL), 0);
    alarm(0);
    ASSERT_OK(turns.status, turns.error);
    assert_int_equal(state_of(f, second), TMS_SEGMENT_PAUSED);
    assert_int_equal(sem_destroy(&turns.asked), 0);
    destroy_stream(f, stream);
    assert_true(turns.is_kept);
    assert_int_equal(turns.capture.status, TMS_INVALID_STATE);
}

static void *pause_held(void *argument) {
    turns_t *turns = argument;
    turns->status = pause_tag(turns->fixture, "held", NULL, &turns->error);
    return NULL;
}

static int32_t ask_and_end_the_other(void *context) {
    (void)ask_while_waiting(context);
    simulator()->open_gate(GATE);
    return 0;
}

/* Nothing holds up a capture then but a call that goes on by itself. */
static void a_callback_of_a_call_that_waits_for_its_turn_does_not_count(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t held = allocate(f, "held", TMS_BACKUP_NONE, 2 * MIB), second = allocate(f, "second", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, held);
    turns_t turns = {.fixture = f, .began_seen = -1};
    assert_int_equal(sem_init(&turns.asked, 0, 0), 0);
    assert_int_equal(pthread_create(&turns.waiting, NULL, pause_held, &turns), 0);
    simulator()->wait_until_synchronizing();
    const char *const tags[] = {"second"};
    tms_selection_t selection = {
        .tags = tags, .tag_count = 1, .interrupted = ask_and_end_the_other, .interrupt_context = &turns};
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_int_equal(pthread_join(turns.waiting, NULL), 0);
    ASSERT_OK(turns.status, turns.error);
    assert_int_equal(state_of(f, second), TMS_SEGMENT_PAUSED);
    assert_int_equal(sem_destroy(&turns.asked), 0);
    destroy_stream(f, stream);
    assert_true(turns.began_seen == 0);
}

static CUresult say_capturing(CUstream stream, CUstreamCaptureStatus *status) {
    (void)stream;
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

/* A free that waits for the device is all that there is: a call would wait for it, and the capture would break. */
static void the_callers_stream_is_asked_also_where_only_something_waits(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_driver_table_t *driver = (tms_driver_table_t *)(uintptr_t)f->cuda; /* the next setup loads another */
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuCtxSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_saver_free(&f->saver, address, &error), TMS_OK);
    assert_false(tms_saver_has_segments(&f->saver));
    simulator()->clear_counts();
    driver->cuStreamIsCapturing = say_capturing;
    tms_selection_t selection = {.has_stream = 1};
    assert_int_equal(pause_selected(f, &selection, NULL, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(resume_selected(f, &selection, NULL, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
    assert_int_equal(physical_bytes(0), 2 * MIB);
    selection.has_stream = 0;
    ASSERT_OK(pause_selected(f, &selection, NULL, &error), error);
    assert_int_equal(physical_bytes(0), 0);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_capture_waits_for_the_call_under_way),
        TEST(a_capture_that_waits_keeps_nobody_from_the_turn),
        TEST(a_capture_does_not_wait_for_a_callback_that_waits_for_it),
        TEST(a_capture_from_inside_is_refused),
        TEST(a_capture_while_a_resume_waits_for_memory),
        TEST(a_capture_that_began_while_a_pause_waited_for_its_turn),
        TEST(a_call_that_waits_for_its_turn_hides_no_callback),
        TEST(a_callback_of_a_call_that_waits_for_its_turn_does_not_count),
        TEST(the_callers_stream_is_asked_also_where_only_something_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
