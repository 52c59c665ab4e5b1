/* Guards reservations of the host store: memory that is prepared for its pool before a pause needs it. */
#include "support/host_pool_fixture.h"

enum { TEXT_BYTES = 8192 };

/* ---- reservations ---- */

static void a_reservation_fills_the_pool_in_the_background(void **state) {
    host_fixture_t *f = *state;
    hold_registering();
    reserve(f, 0, 6 * CHUNK); /* returns */
    await_held(1);
    assert_int_equal(pooled(f), 0);
    assert_int_equal(f->store.pool_limit_bytes, 6 * CHUNK);
    reserve(f, 0, 4 * CHUNK); /* that much is in flight already */
    release_registering();
    await_reserved(f);
    assert_int_equal(pooled(f), 6 * CHUNK);
    assert_int_equal(registrations().count, 6);
    reserve(f, 0, 8 * CHUNK);
    await_reserved(f);
    assert_int_equal(pooled(f), 8 * CHUNK);
    assert_int_equal(registrations().count, 8);
    tms_host_buffer_drop(pinned(f, 6 * CHUNK, TMS_HOST_POOL));
    assert_int_equal(registrations().count, 8);
    reserve(f, 0, 0);
    assert_int_equal(pooled(f), 8 * CHUNK);
}

/* A pause right after the reservation uses the memory in flight, and does not allocate it twice. */
static void a_batch_waits_for_the_reservation_in_flight(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {5 * CHUNK, 3 * CHUNK};
    tms_host_buffer_t *buffers[2];
    hold_registering();
    reserve(f, 0, 8 * CHUNK);
    await_held(1);
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_POOL, buffers);
    release_registering();
    await_all(buffers[0]);
    await_all(buffers[1]);
    tms_host_batch_destroy(batch);
    await_reserved(f);
    assert_int_equal(registrations().count, 8);
    assert_int_equal(pooled(f), 0);
    tms_host_buffer_drop(buffers[0]);
    tms_host_buffer_drop(buffers[1]);
    assert_int_equal(pooled(f), 8 * CHUNK);
}

/* Together they would exceed the pool's limit. */
static void returned_memory_leaves_room_for_the_reservation_in_flight(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 8 * CHUNK);
    tms_host_buffer_t *buffer = pinned(f, 4 * CHUNK, TMS_HOST_POOL);
    hold_registering();
    reserve(f, 0, 6 * CHUNK);
    await_held(1);
    tms_host_buffer_drop(buffer);
    assert_int_equal(pooled(f), 2 * CHUNK);
    release_registering();
    await_reserved(f);
    assert_int_equal(pooled(f), 8 * CHUNK);
    tms_host_store_settle(&f->store);
    assert_int_equal(resident(f), 8 * CHUNK);
}

static void an_impossible_reservation_changes_nothing(void **state) {
    host_fixture_t *f = *state;
    const uint64_t sizes[] = {(uint64_t)1 << 60, UINT64_MAX, (uint64_t)1 << 46};
    tms_error_t error;
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(tms_host_store_reserve(&f->store, 0, sizes[i], &error), TMS_OUT_OF_HOST_MEMORY);
        assert_int_equal(f->store.pool_limit_bytes, 0);
        assert_empty(f);
    }
    assert_int_equal(tms_host_store_reserve(&f->store, 2, CHUNK, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_host_store_reserve(&f->store, -1, CHUNK, &error), TMS_INVALID_ARGUMENT);
    fail_call(CALL_MMAP, 0, 1);
    assert_int_equal(tms_host_store_reserve(&f->store, 0, 4 * CHUNK, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(f->store.pool_limit_bytes, 0);
    assert_empty(f);
}

static void a_reservation_that_fails_later_is_logged_and_keeps_its_memory(void **state) {
    host_fixture_t *f = *state;
    char text[TEXT_BYTES];
    tms_error_t error;
    uint64_t part = 0;
    captured_stderr_t captured = capture_begin();
    CALL(fail_after, "cuMemHostRegister", 2, 1, CUDA_ERROR_DEINITIALIZED);
    hold_registering();
    reserve(f, 0, 6 * CHUNK);
    await_held(1);
    const uint64_t bytes = 6 * CHUNK;
    tms_host_buffer_t *buffer;
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &buffer);
    release_registering();
    assert_int_equal(tms_host_buffer_await(buffer, 5 * CHUNK, NULL, &part, &CONTEXT, &error), TMS_DRIVER_UNAVAILABLE);
    tms_host_batch_destroy(batch);
    await_reserved(f);
    capture_end(captured, text, sizeof text);
    assert_non_null(strstr(text, "reserve host memory"));
    assert_int_equal(count_lines(text), 1);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

/* If pthread_create fails. */
static void without_a_thread_the_caller_reserves(void **state) {
    host_fixture_t *f = *state;
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    fail_call(CALL_THREAD, 0, 1000);
    reserve(f, 0, 4 * CHUNK);
    assert_int_equal(pooled(f), 4 * CHUNK);
    assert_int_equal(pinned_bytes(), 4 * CHUNK);
    fail_call(CALL_THREAD, 0, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_reservation_fills_the_pool_in_the_background),
        TEST(a_batch_waits_for_the_reservation_in_flight),
        TEST(returned_memory_leaves_room_for_the_reservation_in_flight),
        TEST(an_impossible_reservation_changes_nothing),
        TEST(a_reservation_that_fails_later_is_logged_and_keeps_its_memory),
        TEST(without_a_thread_the_caller_reserves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
