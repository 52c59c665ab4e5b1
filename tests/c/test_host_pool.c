/* The pool of the host store: what is kept and used again, where buffers are placed in it, and reservations. */

#include "host_fixture.h"

#include <errno.h>

#include "captured_stderr.h"
#include "descriptors.h"

enum { TEXT_BYTES = 8192 };

static const tms_error_context_t CONTEXT = {.operation = "pause", .device = 0};

static tms_host_buffer_t *pinned(host_fixture_t *f, uint64_t bytes, tms_host_policy_t policy) {
    return make_buffer(f, TMS_BACKUP_PINNED, bytes, policy);
}

static uint64_t resident(const host_fixture_t *f) { return atomic_load(&((host_fixture_t *)f)->store.resident_bytes); }
static uint64_t pooled(const host_fixture_t *f) { return atomic_load(&((host_fixture_t *)f)->store.pooled_bytes); }

static void reserve(host_fixture_t *f, int device, uint64_t bytes) {
    tms_error_t error;
    ASSERT_OK(tms_host_store_reserve(&f->store, device, bytes, &error), error);
}

/* Until what is being reserved is in the pool. */
static void await_reserved(host_fixture_t *f) {
    pthread_mutex_lock(&f->store.lock);
    while (f->store.threads > 0) pthread_cond_wait(&f->store.changed, &f->store.lock);
    pthread_mutex_unlock(&f->store.lock);
}

static void the_pool_is_used_again_without_page_locking(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {3 * PIECE, 4 * PIECE, PIECE};
    tms_host_buffer_t *buffers[3];
    void *memory[3];
    tms_host_store_set_pool_limit(&f->store, 8 * PIECE);
    for (int round = 0; round < 3; round++) {
        struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 3, TMS_HOST_POOL, buffers);
        for (int i = 0; i < 3; i++) await_all(buffers[i]);
        tms_host_batch_destroy(batch);
        assert_int_equal(pooled(f), 0);
        for (int i = 0; i < 3; i++) {
            if (round) assert_ptr_equal(buffers[i]->memory, memory[i]);
            memory[i] = buffers[i]->memory;
            tms_host_buffer_drop(buffers[i]);
        }
        assert_int_equal(pooled(f), 8 * PIECE);
        assert_int_equal(registrations().count, 8);
        assert_int_equal(calls_made(CALL_MMAP), 1);
    }
    assert_int_equal(CALL(calls, "cuMemHostUnregister"), 0);
    tms_host_store_set_pool_limit(&f->store, 0);
    assert_empty(f);
}

static void buffers_of_other_sizes_find_gaps(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 8 * PIECE);
    tms_host_buffer_drop(pinned(f, 8 * PIECE, TMS_HOST_POOL));
    tms_host_buffer_t *first = pinned(f, 2 * PIECE + 1, TMS_HOST_POOL);
    char *memory = first->memory;
    tms_host_buffer_t *second = pinned(f, 3 * PIECE, TMS_HOST_POOL);
    assert_ptr_equal(second->memory, memory + 2 * PIECE + 4096); /* behind the first, across pieces */
    tms_host_buffer_t *third = pinned(f, 2 * PIECE, TMS_HOST_POOL);
    assert_ptr_equal(third->memory, memory + 5 * PIECE + 4096);
    assert_int_equal(pooled(f), 0);
    tms_host_buffer_drop(first);
    assert_int_equal(pooled(f), 2 * PIECE);
    tms_host_buffer_t *fourth = pinned(f, 2 * PIECE, TMS_HOST_POOL); /* what is left behind the third is too small */
    assert_ptr_equal(fourth->memory, memory);
    assert_int_equal(registrations().count, 8);
    tms_host_buffer_t *fifth = pinned(f, 2 * PIECE, TMS_HOST_POOL); /* nothing fits any more */
    assert_int_equal(registrations().count, 10);
    tms_host_buffer_t *all[] = {second, third, fourth, fifth};
    for (int i = 0; i < 4; i++) {
        memset(all[i]->memory, i, all[i]->bytes);
        for (int j = 0; j <= i; j++) assert_bytes((CUdeviceptr)all[j]->memory, all[j]->bytes, (uint8_t)j);
    }
    for (int i = 0; i < 4; i++) tms_host_buffer_drop(all[i]);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 8 * PIECE); /* not more than the limit */
    assert_int_equal(resident(f), 8 * PIECE);
}

/* Not the first gap: the one behind what was placed last. */
static void places_are_looked_for_behind_the_last_one(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 8 * PIECE);
    tms_host_buffer_drop(pinned(f, 8 * PIECE, TMS_HOST_POOL));
    tms_host_buffer_t *first = pinned(f, 2 * PIECE, TMS_HOST_POOL), *second = pinned(f, 2 * PIECE, TMS_HOST_POOL);
    char *memory = first->memory;
    assert_ptr_equal(second->memory, memory + 2 * PIECE);
    tms_host_buffer_drop(first);
    first = pinned(f, 2 * PIECE, TMS_HOST_POOL);
    assert_ptr_equal(first->memory, memory + 4 * PIECE);
    tms_host_buffer_drop(second);
    tms_host_buffer_drop(first); /* of nothing that is left */
    first = pinned(f, 8 * PIECE, TMS_HOST_POOL);
    assert_ptr_equal(first->memory, memory);
    tms_host_buffer_drop(first);
}

/* Nothing is placed among the buffers of a block that is to be given back. */
static void gaps_outside_the_pool_stay_empty(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {PIECE / 2, PIECE / 2, PIECE};
    tms_host_buffer_t *buffers[3];
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 3, TMS_HOST_RELEASE, buffers);
    for (int i = 0; i < 3; i++) await_all(buffers[i]);
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(buffers[1]);
    tms_host_buffer_t *other = pinned(f, 4096, TMS_HOST_RELEASE);
    assert_ptr_not_equal(other->block, buffers[0]->block);
    tms_host_buffer_drop(other);
    tms_host_buffer_drop(buffers[0]);
    tms_host_buffer_drop(buffers[2]);
    assert_empty(f);
}

static void the_pool_keeps_to_its_limit(void **state) {
    host_fixture_t *f = *state;
    tms_host_buffer_drop(pinned(f, 4 * PIECE, TMS_HOST_POOL)); /* the limit is 0 */
    assert_empty(f);
    tms_host_store_set_pool_limit(&f->store, 3 * PIECE);
    tms_host_buffer_drop(pinned(f, 4 * PIECE, TMS_HOST_POOL));
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 3 * PIECE);
    assert_int_equal(resident(f), 3 * PIECE);
    tms_host_store_set_pool_limit(&f->store, PIECE + 1);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), PIECE);
    /* Memory in use is no idle memory. */
    tms_host_buffer_t *buffer = pinned(f, PIECE, TMS_HOST_POOL);
    tms_host_store_set_pool_limit(&f->store, 0);
    tms_host_store_settle(&f->store);
    assert_int_equal(resident(f), PIECE);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

static void the_pool_can_be_emptied(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_trim(&f->store); /* there is none */
    assert_int_equal(calls_made(CALL_THREAD), 0);
    tms_host_store_set_pool_limit(&f->store, 8 * PIECE);
    tms_host_buffer_drop(pinned(f, 8 * PIECE, TMS_HOST_POOL));
    tms_host_buffer_t *buffer = pinned(f, 3 * PIECE, TMS_HOST_POOL); /* the rest of the block is idle */
    assert_int_equal(pooled(f), 5 * PIECE);
    tms_host_store_trim(&f->store);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 0);
    assert_int_equal(resident(f), 3 * PIECE);
    assert_int_equal(locked_bytes(), 3 * PIECE);
    assert_bytes((CUdeviceptr)memset(buffer->memory, 7, 3 * PIECE), 3 * PIECE, 7);
    tms_host_buffer_drop(buffer); /* the limit has stayed */
    assert_int_equal(pooled(f), 3 * PIECE);
    tms_host_store_trim(&f->store);
    assert_empty(f);
}

/* A released buffer takes what it lies in out of the pool. */
static void what_happens_to_pooled_memory_is_the_last_buffers_choice(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 64 * PIECE);
    tms_host_buffer_drop(pinned(f, 4 * PIECE, TMS_HOST_POOL));
    tms_host_buffer_t *half = pinned(f, PIECE / 2, TMS_HOST_RELEASE), *more = pinned(f, PIECE, TMS_HOST_POOL);
    assert_int_equal(registrations().count, 4);
    tms_host_buffer_drop(half);
    tms_host_buffer_drop(more);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 4 * PIECE);
    tms_host_buffer_drop(pinned(f, 2 * PIECE, TMS_HOST_RELEASE));
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 2 * PIECE);
    assert_int_equal(resident(f), 2 * PIECE);
    /* What is left of the block still serves. */
    tms_host_buffer_drop(pinned(f, 2 * PIECE, TMS_HOST_POOL));
    assert_int_equal(registrations().count, 4);
}

/* Its own device's memory first, because that is on the right node. */
static void another_devices_pool_serves_as_well(void **state) {
    host_fixture_t *f = *state;
    tms_error_t error;
    reserve(f, 1, 4 * PIECE);
    await_reserved(f);
    reserve(f, 0, 6 * PIECE);
    await_reserved(f);
    assert_int_equal(pooled(f), 6 * PIECE);
    assert_int_equal(registrations().count, 6);
    const tms_host_request_t requests[] = {{.bytes = 2 * PIECE, .device = 1, .kind = TMS_BACKUP_PINNED},
                                           {.bytes = 2 * PIECE, .device = 0, .kind = TMS_BACKUP_PINNED},
                                           {.bytes = 2 * PIECE, .device = 0, .kind = TMS_BACKUP_PINNED}};
    struct tms_host_batch *batch = NULL;
    tms_host_buffer_t *buffers[3];
    ASSERT_OK(tms_host_batch_create(&batch, &f->store, &CONTEXT, &error), error);
    for (int i = 0; i < 3; i++) ASSERT_OK(tms_host_batch_add(batch, &requests[i], &buffers[i], &CONTEXT, &error), error);
    ASSERT_OK(tms_host_batch_start(batch, &CONTEXT, &error), error);
    for (int i = 0; i < 3; i++) await_all(buffers[i]);
    tms_host_batch_destroy(batch);
    assert_int_equal(registrations().count, 6);
    assert_ptr_not_equal(buffers[0]->block, buffers[1]->block);
    assert_ptr_equal(buffers[0]->block, buffers[2]->block);
    for (int i = 0; i < 3; i++) tms_host_buffer_drop(buffers[i]);
}

static void idle_memory_makes_room_for_what_does_not_fit_otherwise(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 64 * PIECE);
    f->store.limits.cap_bytes = 10 * PIECE;
    tms_host_buffer_t *small = pinned(f, 2 * PIECE, TMS_HOST_POOL);
    tms_host_buffer_drop(pinned(f, 6 * PIECE, TMS_HOST_POOL));
    assert_int_equal(pooled(f), 6 * PIECE);
    tms_host_buffer_t *large = pinned(f, 7 * PIECE + 1, TMS_HOST_RELEASE); /* rounded up to 8 */
    assert_int_equal(resident(f), 10 * PIECE);
    assert_int_equal(pooled(f), 0);
    tms_host_buffer_drop(large);
    tms_host_store_settle(&f->store);
    /* Not more than is missing. */
    tms_host_buffer_drop(pinned(f, 4 * PIECE, TMS_HOST_POOL));
    large = pinned(f, 6 * PIECE, TMS_HOST_RELEASE);
    assert_int_equal(pooled(f), 2 * PIECE);
    tms_host_buffer_drop(large);
    tms_host_buffer_drop(small);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 4 * PIECE);
}

/* Where nobody knows how much more may be used, the pool keeps what it has: without it that is not known either. */
/* Files of a file system in memory: no more of the pool goes than what is missing. */
static void idle_memory_makes_room_for_claims(void **state) {
    host_fixture_t *f = *state;
    tms_error_t error;
    f->store.limits.cap_bytes = 10 * PIECE;
    reserve(f, 0, 8 * PIECE);
    await_reserved(f);
    ASSERT_OK(tms_host_store_claim(&f->store, 4 * PIECE, &CONTEXT, &error), error);
    assert_int_equal(f->store.in_flight_bytes, 4 * PIECE);
    assert_int_equal(resident(f), 10 * PIECE);
    assert_int_equal(pooled(f), 6 * PIECE);
    tms_host_store_claim_used(&f->store, 4 * PIECE);
    tms_host_store_disclaim(&f->store, 4 * PIECE);
    assert_int_equal(f->store.in_flight_bytes, 0);
    tms_host_store_set_pool_limit(&f->store, 0);
    assert_empty(f);
}

static void the_pool_stays_where_limits_cannot_be_looked_at(void **state) {
    host_fixture_t *f = *state;
    const tms_host_request_t request = {.bytes = 6 * PIECE, .kind = TMS_BACKUP_PINNED};
    struct tms_host_batch *batch = NULL;
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    tms_host_store_set_pool_limit(&f->store, 64 * PIECE);
    tms_host_buffer_drop(pinned(f, 4 * PIECE, TMS_HOST_POOL));
    ASSERT_OK(tms_host_batch_create(&batch, &f->store, &CONTEXT, &error), error);
    ASSERT_OK(tms_host_batch_add(batch, &request, &buffer, &CONTEXT, &error), error);
    taken_descriptors_t taken = take_descriptors();
    tms_status_t status = tms_host_batch_start(batch, &CONTEXT, &error);
    give_descriptors_back(taken);
    assert_int_equal(status, TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(error.os_error, EMFILE);
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(buffer);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 4 * PIECE);
    tms_host_buffer_drop(pinned(f, 6 * PIECE, TMS_HOST_RELEASE));
}

/* Also what waits to be given back. */
static void what_waits_to_be_released_makes_room(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 2 * PIECE);
    tms_host_buffer_drop(pinned(f, 2 * PIECE, TMS_HOST_POOL));
    f->store.limits.cap_bytes = 8 * PIECE;
    tms_host_buffer_t *buffer = pinned(f, 6 * PIECE, TMS_HOST_RELEASE);
    fail_call(CALL_THREAD, 0, 1);
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    tms_host_buffer_drop(buffer);
    assert_int_equal(resident(f), 8 * PIECE);
    fail_call(CALL_THREAD, 0, 1); /* the thread that would do it when the batch starts is refused as well */
    buffer = pinned(f, 6 * PIECE, TMS_HOST_RELEASE);
    assert_int_equal(resident(f), 8 * PIECE);
    assert_int_equal(pooled(f), 2 * PIECE); /* which is not given up for it */
    tms_host_buffer_drop(buffer);
    tms_host_store_set_pool_limit(&f->store, 0);
    assert_empty(f);
}

/* ---- reservations ---- */

static void a_reservation_fills_the_pool_in_the_background(void **state) {
    host_fixture_t *f = *state;
    hold_registering(true);
    reserve(f, 0, 6 * PIECE); /* returns */
    await_held(1);
    assert_int_equal(pooled(f), 0);
    assert_int_equal(f->store.pool_limit_bytes, 6 * PIECE);
    reserve(f, 0, 4 * PIECE); /* that much is on its way already */
    hold_registering(false);
    await_reserved(f);
    assert_int_equal(pooled(f), 6 * PIECE);
    assert_int_equal(registrations().count, 6);
    reserve(f, 0, 8 * PIECE);
    await_reserved(f);
    assert_int_equal(pooled(f), 8 * PIECE);
    assert_int_equal(registrations().count, 8);
    tms_host_buffer_drop(pinned(f, 6 * PIECE, TMS_HOST_POOL));
    assert_int_equal(registrations().count, 8);
    reserve(f, 0, 0);
    assert_int_equal(pooled(f), 8 * PIECE);
}

/* A pause right after the reservation takes what is on its way, and not as much again. */
static void a_batch_waits_for_the_reservation_under_way(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {5 * PIECE, 3 * PIECE};
    tms_host_buffer_t *buffers[2];
    hold_registering(true);
    reserve(f, 0, 8 * PIECE);
    await_held(1);
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_POOL, buffers);
    hold_registering(false);
    await_all(buffers[0]);
    await_all(buffers[1]);
    tms_host_batch_destroy(batch);
    await_reserved(f);
    assert_int_equal(registrations().count, 8);
    assert_int_equal(pooled(f), 0);
    tms_host_buffer_drop(buffers[0]);
    tms_host_buffer_drop(buffers[1]);
    assert_int_equal(pooled(f), 8 * PIECE);
}

/* Together they would be more than the pool may hold. */
static void what_comes_back_leaves_room_for_the_reservation_under_way(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 8 * PIECE);
    tms_host_buffer_t *buffer = pinned(f, 4 * PIECE, TMS_HOST_POOL);
    hold_registering(true);
    reserve(f, 0, 6 * PIECE);
    await_held(1);
    tms_host_buffer_drop(buffer);
    assert_int_equal(pooled(f), 2 * PIECE);
    hold_registering(false);
    await_reserved(f);
    assert_int_equal(pooled(f), 8 * PIECE);
    tms_host_store_settle(&f->store);
    assert_int_equal(resident(f), 8 * PIECE);
}

static void reserving_what_cannot_be_had_changes_nothing(void **state) {
    host_fixture_t *f = *state;
    const uint64_t sizes[] = {(uint64_t)1 << 60, UINT64_MAX, (uint64_t)1 << 46};
    tms_error_t error;
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(tms_host_store_reserve(&f->store, 0, sizes[i], &error), TMS_OUT_OF_HOST_MEMORY);
        assert_int_equal(f->store.pool_limit_bytes, 0);
        assert_empty(f);
    }
    assert_int_equal(tms_host_store_reserve(&f->store, 2, PIECE, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_host_store_reserve(&f->store, -1, PIECE, &error), TMS_INVALID_ARGUMENT);
    fail_call(CALL_MMAP, 0, 1);
    assert_int_equal(tms_host_store_reserve(&f->store, 0, 4 * PIECE, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(f->store.pool_limit_bytes, 0);
    assert_empty(f);
}

static void a_reservation_that_fails_later_is_logged_and_keeps_what_it_has(void **state) {
    host_fixture_t *f = *state;
    char text[TEXT_BYTES];
    tms_error_t error;
    uint64_t part = 0;
    captured_stderr_t captured = capture_begin();
    CALL(fail_after, "cuMemHostRegister", 2, 1, CUDA_ERROR_DEINITIALIZED);
    hold_registering(true);
    reserve(f, 0, 6 * PIECE);
    await_held(1);
    const uint64_t bytes = 6 * PIECE;
    tms_host_buffer_t *buffer;
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &buffer);
    hold_registering(false);
    assert_int_equal(tms_host_buffer_await(buffer, 5 * PIECE, NULL, &part, &CONTEXT, &error), TMS_DRIVER_UNAVAILABLE);
    tms_host_batch_destroy(batch);
    await_reserved(f);
    capture_end(captured, text, sizeof text);
    assert_non_null(strstr(text, "reserve host memory"));
    assert_int_equal(count_lines(text), 1);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

/* Where pthread_create fails. */
static void without_a_thread_the_caller_reserves(void **state) {
    host_fixture_t *f = *state;
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    fail_call(CALL_THREAD, 0, 1000);
    reserve(f, 0, 4 * PIECE);
    assert_int_equal(pooled(f), 4 * PIECE);
    assert_int_equal(locked_bytes(), 4 * PIECE);
    fail_call(CALL_THREAD, 0, 0);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_host, teardown_host)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_pool_is_used_again_without_page_locking),
        TEST(buffers_of_other_sizes_find_gaps),
        TEST(places_are_looked_for_behind_the_last_one),
        TEST(gaps_outside_the_pool_stay_empty),
        TEST(the_pool_keeps_to_its_limit),
        TEST(the_pool_can_be_emptied),
        TEST(what_happens_to_pooled_memory_is_the_last_buffers_choice),
        TEST(another_devices_pool_serves_as_well),
        TEST(idle_memory_makes_room_for_what_does_not_fit_otherwise),
        TEST(idle_memory_makes_room_for_claims),
        TEST(the_pool_stays_where_limits_cannot_be_looked_at),
        TEST(what_waits_to_be_released_makes_room),
        TEST(a_reservation_fills_the_pool_in_the_background),
        TEST(a_batch_waits_for_the_reservation_under_way),
        TEST(what_comes_back_leaves_room_for_the_reservation_under_way),
        TEST(reserving_what_cannot_be_had_changes_nothing),
        TEST(a_reservation_that_fails_later_is_logged_and_keeps_what_it_has),
        TEST(without_a_thread_the_caller_reserves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
