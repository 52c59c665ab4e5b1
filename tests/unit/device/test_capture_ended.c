/* Guards captures whose end was not reported: the stream is queried before a call is refused, unless it may be destroyed. */

#include "support.h"

#include <pthread.h>

#include "simulated_cuda.h"

/* Device 0's primary context, current on the test's thread, and a stream of it. */
/* The call that was to destroy the stream has failed, or it has succeeded. */
enum { STILL_THERE = false, GONE = true };

static CUstream enter(void) {
    CUcontext context = NULL;
    CUstream stream = NULL;
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, context));
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

static void leave(void) {
    CUcontext context = NULL;
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, &context));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRelease_v2, 0));
}

static uint64_t begin(fixture_t *f, CUstream stream) {
    tms_capture_start_t begun;
    tms_error_t error;
    ASSERT_OK(tms_capture_table_begin_on(&f->saver, stream, &begun, &error), error);
    assert_false(begun.must_not_begin);
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    tms_capture_table_begun(&f->saver, begun.identity);
    return begun.identity;
}

static void end_by_driver(CUstream stream) {
    CUgraph graph = NULL;
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
}

static void an_end_through_the_driver_is_detected(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = enter();
    uint64_t identity = begin(f, stream);
    assert_int_equal(pause_all(f, &error), TMS_CAPTURE_IN_PROGRESS); /* it continues */
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    end_by_driver(stream);
    assert_int_equal(tms_capture_visible(&f->saver.capture), 1);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(tms_capture_visible(&f->saver.capture), 0);
    assert_false(tms_capture_end_of(&f->saver, identity)); /* a late end ends no other capture */
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    leave();
}

/* The one that continues counts. */
static void each_stream_is_queried(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream one = enter(), other = NULL;
    ASSERT_CUDA(CALL(cuStreamCreate, &other, CU_STREAM_NON_BLOCKING));
    begin(f, one);
    uint64_t identity = begin(f, other);
    end_by_driver(one);
    assert_int_equal(pause_all(f, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(tms_capture_visible(&f->saver.capture), 1);
    end_by_driver(other);
    assert_true(tms_capture_end_of(&f->saver, identity));
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, one));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, other));
    leave();
}

/* This thread is about to begin a capture, and another thread pauses and frees before it has begun. */
typedef struct beside {
    fixture_t *fixture;
    uint64_t freed;
    tms_status_t status;
} beside_t;

static void *free_and_pause(void *argument) {
    beside_t *beside = argument;
    tms_error_t error;
    beside->status = tms_free_address(&beside->fixture->saver, beside->freed, &error);
    if (beside->status == TMS_OK) beside->status = pause_all(beside->fixture, &error);
    return NULL;
}

static tms_status_t free_and_pause_on_another_thread(fixture_t *f) {
    beside_t beside = {.fixture = f, .freed = allocate(f, "freed", TMS_BACKUP_NONE, 2 * MIB)};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, free_and_pause, &beside), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    return beside.status;
}

static void a_stream_is_not_queried_before_its_capture_has_begun(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_capture_start_t begun;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = enter();
    for (int again = 0; again < 2; again++) { /* the second time the end of the first was not seen */
        ASSERT_OK(tms_capture_table_begin_on(&f->saver, stream, &begun, &error), error);
        assert_int_equal(begun.known, again);
        assert_int_equal(free_and_pause_on_another_thread(f), TMS_CAPTURE_IN_PROGRESS);
        assert_int_equal(tms_capture_visible(&f->saver.capture), 1);
        ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        assert_int_equal(free_and_pause_on_another_thread(f), TMS_CAPTURE_IN_PROGRESS);
        tms_capture_table_begun(&f->saver, begun.identity);
        assert_int_equal(free_and_pause_on_another_thread(f), TMS_CAPTURE_IN_PROGRESS);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        end_by_driver(stream);
    }
    assert_int_equal(free_and_pause_on_another_thread(f), TMS_OK);
    assert_int_equal(physical_bytes(0), 0);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    leave();
}

/* As if an exception had left the call. */
static void an_abandoned_begin_is_detected_by_its_thread(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_capture_start_t begun;
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = enter();
    ASSERT_OK(tms_capture_table_begin_on(&f->saver, stream, &begun, &error), error);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(tms_capture_visible(&f->saver.capture), 0);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    leave();
}

static void a_deferred_free_need_not_wait_for_it(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t first = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), second = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = enter();
    begin(f, stream);
    assert_int_equal(tms_free_address(&f->saver, first, &error), TMS_OK);
    assert_int_equal(physical_bytes(0), 4 * MIB);
    end_by_driver(stream);
    assert_int_equal(tms_free_address(&f->saver, second, &error), TMS_OK);
    assert_int_equal(physical_bytes(0), 2 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(physical_bytes(0), 0);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    leave();
}

/* A stream destroyed with its context is not queried: a real driver would dereference its handle. */
static void a_stream_destroyed_with_its_context_is_not_queried(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    for (int again = 0; again < 2; again++) {
        uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
        begin(f, enter());
        ASSERT_CUDA(CALL(cuDevicePrimaryCtxReset_v2, 0));
        if (again) ASSERT_CUDA(CALL(cuStreamDestroy_v2, enter())); /* the handle of the context is the same again */
        simulator()->clear_counts();
        ASSERT_OK(pause_all(f, &error), error);
        assert_int_equal(simulator()->calls("cuStreamIsCapturing"), 0);
        assert_int_equal(tms_capture_visible(&f->saver.capture), 0);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        if (again) leave();
        CUcontext context = NULL;
        ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, &context));
    }
}

/* An entry removed for a call that destroys its stream is not queried meanwhile, and counts again if the call fails. */
static void a_stream_that_is_being_destroyed_is_not_queried(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_capture_stream_t taken[TMS_CAPTURE_MAX_NESTED];
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = enter();
    uint64_t identity = begin(f, stream);
    assert_int_equal(tms_capture_end_take(&f->saver, stream, TMS_NO_DEVICE, taken), 1);
    assert_int_equal(tms_capture_table_count(&f->saver), 0);
    tms_capture_end_taken(&f->saver, taken, 1, STILL_THERE);
    assert_int_equal(pause_all(f, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_false(tms_capture_end_of(&f->saver, identity));
    assert_int_equal(tms_capture_end_take(&f->saver, NULL, 1, taken), 0); /* of another device */
    assert_int_equal(tms_capture_end_take(&f->saver, NULL, 0, taken), 1);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    tms_capture_end_taken(&f->saver, taken, 1, GONE);
    ASSERT_OK(pause_all(f, &error), error);
    leave();
}

/* A capture that cannot be queried counts until its end is seen. */
static void a_capture_that_cannot_be_queried_counts(void **state) {
    static const char *const missing[] = {"cuStreamGetCtx", "cuCtxGetId", "cuDevicePrimaryCtxGetState"};
    fixture_t *f = *state;
    tms_error_t error;
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = enter();
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        simulator()->fail_after(missing[i], 0, 1, CUDA_ERROR_UNKNOWN);
        uint64_t identity = begin(f, stream);
        end_by_driver(stream);
        assert_int_equal(pause_all(f, &error), TMS_CAPTURE_IN_PROGRESS);
        assert_true(tms_capture_end_of(&f->saver, identity));
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_all(f, &error), error);
    }
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    leave();
}

/* A failed query is no end. */
static void a_stream_whose_query_fails_counts(void **state) {
    static const char *const refused[] = {"cuStreamIsCapturing", "cuCtxGetId", "cuCtxPushCurrent",
                                          "cuDevicePrimaryCtxGetState"};
    fixture_t *f = *state;
    tms_error_t error;
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = enter();
    uint64_t identity = begin(f, stream);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        simulator()->fail_after(refused[i], 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_CAPTURE_IN_PROGRESS);
        assert_int_equal(simulator()->failures_fired(), i + 1);
    }
    end_by_driver(stream);
    assert_true(tms_capture_end_of(&f->saver, identity));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    leave();
}

static void a_failed_end_is_verified(void **state) {
    fixture_t *f = *state;
    CUstream stream = enter();
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    uint64_t identity = begin(f, stream);
    assert_true(tms_capture_table_goes_on(&f->saver, identity));
    end_by_driver(stream);
    assert_false(tms_capture_table_goes_on(&f->saver, identity));
    assert_true(tms_capture_end_of(&f->saver, identity));
    assert_false(tms_capture_table_goes_on(&f->saver, identity));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    leave();
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(an_end_through_the_driver_is_detected),
        TEST(each_stream_is_queried),
        TEST(a_stream_is_not_queried_before_its_capture_has_begun),
        TEST(an_abandoned_begin_is_detected_by_its_thread),
        TEST(a_deferred_free_need_not_wait_for_it),
        TEST(a_stream_destroyed_with_its_context_is_not_queried),
        TEST(a_stream_that_is_being_destroyed_is_not_queried),
        TEST(a_capture_that_cannot_be_queried_counts),
        TEST(a_stream_whose_query_fails_counts),
        TEST(a_failed_end_is_verified),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
