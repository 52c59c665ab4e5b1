/* Guards a capture that begins while a pause or resume is in flight. */
#include "support/capture_begin_fixture.h"

static void *pause_others(void *argument) {
    other_t *other = argument;
    other->status = pause_tag(other->fixture, "other", &other->error);
    return NULL;
}

/* A pause that waits for the device calls back about every 50 ms. So a thread started in one callback waits, or has passed
 * its wait, at the next. */
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

static void a_capture_waits_for_the_call_in_flight(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "held", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 1);
    CUstream stream = launch_behind_gate(f, GATE, address);
    script_t script = {.capture = {.fixture = f, .address = address}};
    tms_selection_t selection = {.interrupted = play, .interrupt_context = &script};
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_true(script.asked >= 2); /* it has waited for the device */
    assert_int_equal(pthread_join(script.capture.thread, NULL), 0);
    ASSERT_OK(script.capture.status, script.capture.error);
    assert_int_equal(script.capture.state, TMS_SEGMENT_PAUSED); /* and not still PAUSING */
    assert_int_equal(resume_all(f, &error), TMS_CAPTURE_IN_PROGRESS);
    (void)tms_capture_end_of(&f->saver, 0);
    ASSERT_OK(resume_all(f, &error), error);
    destroy_stream(f, stream);
}

/* The capture has waited longer, and does not take the turn. */
static void a_waiting_capture_does_not_hold_the_turn(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    alarm(GIVE_UP_SECONDS); /* a lost turn is never granted again */
    uint64_t held = allocate(f, "held", TMS_BACKUP_NONE, 2 * MIB), other = allocate(f, "other", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, held);
    script_t script = {.capture = {.fixture = f, .address = held}, .pause = {.fixture = f}, .with_pause = true};
    const char *const tags[] = {"held"};
    tms_selection_t selection = {.tags = tags, .tag_count = 1, .interrupted = play, .interrupt_context = &script};
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_true(script.asked >= 3);
    assert_int_equal(pthread_join(script.capture.thread, NULL), 0);
    assert_int_equal(pthread_join(script.pause.thread, NULL), 0);
    alarm(0);
    ASSERT_OK(script.capture.status, script.capture.error);
    /* Either of the two may come first. */
    bool paused = script.pause.status == TMS_OK;
    if (!paused) assert_int_equal(script.pause.status, TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(state_of(f, other), paused ? TMS_SEGMENT_PAUSED : TMS_SEGMENT_ACTIVE);
    (void)tms_capture_end_of(&f->saver, 0);
    ASSERT_OK(pause_all(f, &error), error);
    destroy_stream(f, stream);
}

/* A callback that does not return before another thread's capture has begun or failed, like a callback that needs the GIL
 * held by that thread. */
typedef struct needy {
    other_t capture, on_stream;
    int called;
} needy_t;

static void *begin_capture_on(void *argument) {
    other_t *other = argument;
    int stream = 0; /* any unique address serves as a stream */
    tms_capture_start_t begun;
    other->status = tms_capture_table_begin_on(&other->fixture->saver, &stream, &begun, &other->error);
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
                                          {.on_progress = needy_progress, .on_progress_context = &needy[2]}};
    alarm(GIVE_UP_SECONDS);
    f->saver.callback_patience_seconds = 0.01;
    for (size_t i = 0; i < sizeof selections / sizeof *selections; i++) {
        uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
        fill(address, 2 * MIB, 1);
        CUstream stream = i == 0 ? launch_behind_gate(f, GATE, allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB)) : NULL;
        needy[i] = (needy_t){.capture = {.fixture = f, .address = address}, .on_stream = {.fixture = f}};
        ASSERT_OK(pause_selected(f, &selections[i], &error), error);
        assert_true(needy[i].called > 0);
        assert_int_equal(needy[i].capture.status, TMS_INVALID_STATE);
        assert_non_null(strstr(needy[i].capture.error.message, "GIL"));
        assert_int_equal(needy[i].on_stream.status, TMS_INVALID_STATE);
        assert_true(needy[i].on_stream.must_not_begin);
        assert_int_equal(tms_capture_visible(&f->saver.capture), 0);
        ASSERT_OK(resume_all(f, &error), error);
        assert_filled(address, 2 * MIB, 1);
        if (stream) destroy_stream(f, stream);
    }
    alarm(0);
}

static int32_t begin_inside(void *context) {
    other_t *other = context;
    other->status = tms_capture_table_begin(&other->fixture->saver, NULL, NULL, &other->error);
    simulator()->open_gate(GATE);
    return 0;
}

static void a_capture_from_a_callback_is_refused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, address);
    other_t other = {.fixture = f};
    tms_selection_t selection = {.interrupted = begin_inside, .interrupt_context = &other};
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_int_equal(other.status, TMS_INVALID_STATE);
    assert_string_equal(other.error.operation, "capture_begin");
    assert_non_null(strstr(other.error.message, "inside pause() or resume()"));
    assert_int_equal(tms_capture_visible(&f->saver.capture), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    destroy_stream(f, stream);
}

/* The turn is free meanwhile: the capture need not wait, and the next attempt sees it. */
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
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->take_memory(0, 250 * MIB), 0);
    simulator()->clear_counts();
    script_t script = {.capture = {.fixture = f, .address = address}};
    tms_selection_t selection = {
        .interrupted = capture_elsewhere_and_make_room, .interrupt_context = &script, .timeout_seconds = LONG_SECONDS};
    assert_int_equal(resume_selected(f, &selection, &error), TMS_CAPTURE_IN_PROGRESS);
    ASSERT_OK(script.capture.status, script.capture.error);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    (void)tms_capture_end_of(&f->saver, 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, 40 * MIB, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_capture_waits_for_the_call_in_flight),
        TEST(a_waiting_capture_does_not_hold_the_turn),
        TEST(a_capture_does_not_wait_for_a_callback_that_waits_for_it),
        TEST(a_capture_from_a_callback_is_refused),
        TEST(a_capture_while_a_resume_waits_for_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
