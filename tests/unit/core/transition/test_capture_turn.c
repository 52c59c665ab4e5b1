/* Guards captures while a pause waits for its turn, and the driver queries that a call makes about captures it cannot see.
 */
#include "support/capture_begin_fixture.h"

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

/* Announced directly: tms_capture_table_begin would wait for the call that holds the turn. */
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
    late->pause_status = pause_selected(late->fixture, &selection, &late->error);
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
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_true(late.started);
    assert_int_equal(pthread_join(late.thread, NULL), 0);
    assert_true(late.asked >= 1);
    assert_int_equal(late.capture_status, TMS_OK);
    assert_int_equal(late.pause_status, TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    (void)tms_capture_end_of(&f->saver, 0);
    destroy_stream(f, stream);
}

/* Two pauses, of which the second waits for its turn. A capture waits only for the pause that holds the turn. */
typedef struct turns {
    fixture_t *fixture;
    pthread_t waiting;
    sem_t asked; /* posted by each callback of the waiting pause */
    int questions;
    other_t capture;
    bool is_kept; /* records about the callback of the pause that holds the turn, taken while the other one calls back */
    double began_seen; /* records taken in a callback of the waiting pause */
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
    turns->status = pause_selected(turns->fixture, &selection, &turns->error);
    return NULL;
}

/* Does not return before a capture has been refused, while the other pause calls back again and again. */
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

static void a_call_waiting_for_its_turn_hides_no_callback(void **state) {
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
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_int_equal(pthread_join(turns.waiting, NULL), 0);
    alarm(0);
    ASSERT_OK(turns.status, turns.error);
    assert_int_equal(state_of(f, second), TMS_SEGMENT_PAUSED);
    assert_int_equal(sem_destroy(&turns.asked), 0);
    destroy_stream(f, stream);
    assert_true(turns.is_kept);
    assert_int_equal(turns.capture.status, TMS_INVALID_STATE);
}

/* Later callbacks may come when the other call has ended and this one holds the turn. */
static int32_t ask_once_and_end_the_other(void *context) {
    turns_t *turns = context;
    if (turns->questions++ > 0) return 0;
    (void)ask_while_waiting(turns);
    simulator()->open_gate(GATE);
    return 0;
}

/* A capture is then delayed only by a call that completes by itself. */
static void a_callback_of_a_call_that_waits_for_its_turn_does_not_count(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t held = allocate(f, "held", TMS_BACKUP_NONE, 2 * MIB), second = allocate(f, "second", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, held);
    turns_t turns = {.fixture = f, .began_seen = -1};
    assert_int_equal(sem_init(&turns.asked, 0, 0), 0);
    held_pause_t first;
    begin_pause(&first, f, "held");
    const char *const tags[] = {"second"};
    tms_selection_t selection = {
        .tags = tags, .tag_count = 1, .interrupted = ask_once_and_end_the_other, .interrupt_context = &turns};
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    join_pause(&first);
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

/* Only a deferred free is left: a call would wait for its device, and the capture would break. */
static void the_callers_stream_is_queried_even_if_only_a_free_waits(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_driver_table_t *driver = (tms_driver_table_t *)(uintptr_t)f->cuda; /* the next setup loads another */
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuCtxSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_false(tms_saver_has_segments(&f->saver));
    simulator()->clear_counts();
    driver->cuStreamIsCapturing = say_capturing;
    tms_selection_t selection = {.has_stream = 1};
    assert_int_equal(pause_selected(f, &selection, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(resume_selected(f, &selection, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
    assert_int_equal(physical_bytes(0), 2 * MIB);
    selection.has_stream = 0;
    ASSERT_OK(pause_selected(f, &selection, &error), error);
    assert_int_equal(physical_bytes(0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_capture_that_began_while_a_pause_waited_for_its_turn),
        TEST(a_call_waiting_for_its_turn_hides_no_callback),
        TEST(a_callback_of_a_call_that_waits_for_its_turn_does_not_count),
        TEST(the_callers_stream_is_queried_even_if_only_a_free_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
