/* The pool of the host store: what is kept and used again, and where buffers are placed in it. */
#include "support/host_pool_fixture.h"

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

/* Where it is not known how much more may be used, the pool keeps what it has: without it that is not known either. */
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
