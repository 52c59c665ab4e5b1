/* Guards the pool of the host store: which memory is kept and reused, and where buffers are placed in it. */
#include "support/host_pool_fixture.h"

static void pooled_memory_is_reused_without_pinning(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {3 * CHUNK, 4 * CHUNK, CHUNK};
    tms_host_buffer_t *buffers[3];
    void *memory[3];
    tms_host_store_set_pool_limit(&f->store, 8 * CHUNK);
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
        assert_int_equal(pooled(f), 8 * CHUNK);
        assert_int_equal(registrations().count, 8);
        assert_int_equal(calls_made(CALL_MMAP), 1);
    }
    assert_int_equal(CALL(calls, "cuMemHostUnregister"), 0);
    tms_host_store_set_pool_limit(&f->store, 0);
    assert_empty(f);
}

static void buffers_of_other_sizes_find_gaps(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 8 * CHUNK);
    tms_host_buffer_drop(pinned(f, 8 * CHUNK, TMS_HOST_POOL));
    tms_host_buffer_t *first = pinned(f, 2 * CHUNK + 1, TMS_HOST_POOL);
    char *memory = first->memory;
    tms_host_buffer_t *second = pinned(f, 3 * CHUNK, TMS_HOST_POOL);
    assert_ptr_equal(second->memory, memory + 2 * CHUNK + 4096); /* behind the first, across chunks */
    tms_host_buffer_t *third = pinned(f, 2 * CHUNK, TMS_HOST_POOL);
    assert_ptr_equal(third->memory, memory + 5 * CHUNK + 4096);
    assert_int_equal(pooled(f), 0);
    tms_host_buffer_drop(first);
    assert_int_equal(pooled(f), 2 * CHUNK);
    tms_host_buffer_t *fourth = pinned(f, 2 * CHUNK, TMS_HOST_POOL); /* the rest behind the third is too small */
    assert_ptr_equal(fourth->memory, memory);
    assert_int_equal(registrations().count, 8);
    tms_host_buffer_t *fifth = pinned(f, 2 * CHUNK, TMS_HOST_POOL); /* nothing fits any more */
    assert_int_equal(registrations().count, 10);
    tms_host_buffer_t *all[] = {second, third, fourth, fifth};
    for (int i = 0; i < 4; i++) {
        memset(all[i]->memory, i, all[i]->bytes);
        for (int j = 0; j <= i; j++) assert_bytes((CUdeviceptr)all[j]->memory, all[j]->bytes, (uint8_t)j);
    }
    for (int i = 0; i < 4; i++) tms_host_buffer_drop(all[i]);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 8 * CHUNK); /* not more than the limit */
    assert_int_equal(resident(f), 8 * CHUNK);
}

/* Nothing is placed among the buffers of a block that is to be released. */
static void gaps_outside_the_pool_stay_empty(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {CHUNK / 2, CHUNK / 2, CHUNK};
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
    tms_host_buffer_drop(pinned(f, 4 * CHUNK, TMS_HOST_POOL)); /* the limit is 0 */
    assert_empty(f);
    tms_host_store_set_pool_limit(&f->store, 3 * CHUNK);
    tms_host_buffer_drop(pinned(f, 4 * CHUNK, TMS_HOST_POOL));
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 3 * CHUNK);
    assert_int_equal(resident(f), 3 * CHUNK);
    tms_host_store_set_pool_limit(&f->store, CHUNK + 1);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), CHUNK);
    /* Memory in use is not idle. */
    tms_host_buffer_t *buffer = pinned(f, CHUNK, TMS_HOST_POOL);
    tms_host_store_set_pool_limit(&f->store, 0);
    tms_host_store_settle(&f->store);
    assert_int_equal(resident(f), CHUNK);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

static void the_pool_can_be_emptied(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_trim(&f->store); /* there is none */
    assert_int_equal(calls_made(CALL_THREAD), 0);
    tms_host_store_set_pool_limit(&f->store, 8 * CHUNK);
    tms_host_buffer_drop(pinned(f, 8 * CHUNK, TMS_HOST_POOL));
    tms_host_buffer_t *buffer = pinned(f, 3 * CHUNK, TMS_HOST_POOL); /* the rest of the block is idle */
    assert_int_equal(pooled(f), 5 * CHUNK);
    tms_host_store_trim(&f->store);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 0);
    assert_int_equal(resident(f), 3 * CHUNK);
    assert_int_equal(pinned_bytes(), 3 * CHUNK);
    assert_bytes((CUdeviceptr)memset(buffer->memory, 7, 3 * CHUNK), 3 * CHUNK, 7);
    tms_host_buffer_drop(buffer); /* the limit is unchanged */
    assert_int_equal(pooled(f), 3 * CHUNK);
    tms_host_store_trim(&f->store);
    assert_empty(f);
}

/* A released buffer removes its memory from the pool. */
static void the_last_buffer_decides_about_pooled_memory(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 64 * CHUNK);
    tms_host_buffer_drop(pinned(f, 4 * CHUNK, TMS_HOST_POOL));
    tms_host_buffer_t *half = pinned(f, CHUNK / 2, TMS_HOST_RELEASE), *more = pinned(f, CHUNK, TMS_HOST_POOL);
    assert_int_equal(registrations().count, 4);
    tms_host_buffer_drop(half);
    tms_host_buffer_drop(more);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 4 * CHUNK);
    tms_host_buffer_drop(pinned(f, 2 * CHUNK, TMS_HOST_RELEASE));
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 2 * CHUNK);
    assert_int_equal(resident(f), 2 * CHUNK);
    /* The rest of the block is still usable. */
    tms_host_buffer_drop(pinned(f, 2 * CHUNK, TMS_HOST_POOL));
    assert_int_equal(registrations().count, 4);
}

/* Its own device's memory first, because it is on the right node. */
static void another_devices_pool_is_used_as_well(void **state) {
    host_fixture_t *f = *state;
    tms_error_t error;
    reserve(f, 1, 4 * CHUNK);
    await_reserved(f);
    reserve(f, 0, 6 * CHUNK);
    await_reserved(f);
    assert_int_equal(pooled(f), 6 * CHUNK);
    assert_int_equal(registrations().count, 6);
    const tms_host_request_t requests[] = {{.bytes = 2 * CHUNK, .device = 1, .kind = TMS_BACKUP_PINNED},
                                           {.bytes = 2 * CHUNK, .device = 0, .kind = TMS_BACKUP_PINNED},
                                           {.bytes = 2 * CHUNK, .device = 0, .kind = TMS_BACKUP_PINNED}};
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

static void idle_memory_is_released_if_a_batch_does_not_fit_otherwise(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 64 * CHUNK);
    f->store.limits.cap_bytes = 10 * CHUNK;
    tms_host_buffer_t *small = pinned(f, 2 * CHUNK, TMS_HOST_POOL);
    tms_host_buffer_drop(pinned(f, 6 * CHUNK, TMS_HOST_POOL));
    assert_int_equal(pooled(f), 6 * CHUNK);
    tms_host_buffer_t *large = pinned(f, 7 * CHUNK + 1, TMS_HOST_RELEASE); /* rounded up to 8 */
    assert_int_equal(resident(f), 10 * CHUNK);
    assert_int_equal(pooled(f), 0);
    tms_host_buffer_drop(large);
    tms_host_store_settle(&f->store);
    /* Not more than is missing. */
    tms_host_buffer_drop(pinned(f, 4 * CHUNK, TMS_HOST_POOL));
    large = pinned(f, 6 * CHUNK, TMS_HOST_RELEASE);
    assert_int_equal(pooled(f), 2 * CHUNK);
    tms_host_buffer_drop(large);
    tms_host_buffer_drop(small);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 4 * CHUNK);
}

/* If the remaining memory is unknown, the pool keeps its memory: releasing it would not make it known. */
/* Files in a file system in memory: the pool releases only what is missing. */
static void idle_memory_makes_room_for_claims(void **state) {
    host_fixture_t *f = *state;
    tms_error_t error;
    f->store.limits.cap_bytes = 10 * CHUNK;
    reserve(f, 0, 8 * CHUNK);
    await_reserved(f);
    ASSERT_OK(tms_host_store_claim(&f->store, 4 * CHUNK, &CONTEXT, &error), error);
    assert_int_equal(f->store.in_flight_bytes, 4 * CHUNK);
    assert_int_equal(resident(f), 10 * CHUNK);
    assert_int_equal(pooled(f), 6 * CHUNK);
    tms_host_store_claim_used(&f->store, 4 * CHUNK);
    tms_host_store_disclaim(&f->store, 4 * CHUNK);
    assert_int_equal(f->store.in_flight_bytes, 0);
    tms_host_store_set_pool_limit(&f->store, 0);
    assert_empty(f);
}

static void the_pool_stays_if_limits_cannot_be_read(void **state) {
    host_fixture_t *f = *state;
    const tms_host_request_t request = {.bytes = 6 * CHUNK, .kind = TMS_BACKUP_PINNED};
    struct tms_host_batch *batch = NULL;
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    tms_host_store_set_pool_limit(&f->store, 64 * CHUNK);
    tms_host_buffer_drop(pinned(f, 4 * CHUNK, TMS_HOST_POOL));
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
    assert_int_equal(pooled(f), 4 * CHUNK);
    tms_host_buffer_drop(pinned(f, 6 * CHUNK, TMS_HOST_RELEASE));
}

/* Also memory awaiting release. */
static void memory_awaiting_release_makes_room(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 2 * CHUNK);
    tms_host_buffer_drop(pinned(f, 2 * CHUNK, TMS_HOST_POOL));
    f->store.limits.cap_bytes = 8 * CHUNK;
    tms_host_buffer_t *buffer = pinned(f, 6 * CHUNK, TMS_HOST_RELEASE);
    fail_call(CALL_THREAD, 0, 1);
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    tms_host_buffer_drop(buffer);
    assert_int_equal(resident(f), 8 * CHUNK);
    fail_call(CALL_THREAD, 0, 1); /* the thread that would release it when the batch starts fails to start as well */
    buffer = pinned(f, 6 * CHUNK, TMS_HOST_RELEASE);
    assert_int_equal(resident(f), 8 * CHUNK);
    assert_int_equal(pooled(f), 2 * CHUNK); /* which is not released for it */
    tms_host_buffer_drop(buffer);
    tms_host_store_set_pool_limit(&f->store, 0);
    assert_empty(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(pooled_memory_is_reused_without_pinning),
        TEST(buffers_of_other_sizes_find_gaps),
        TEST(gaps_outside_the_pool_stay_empty),
        TEST(the_pool_keeps_to_its_limit),
        TEST(the_pool_can_be_emptied),
        TEST(the_last_buffer_decides_about_pooled_memory),
        TEST(another_devices_pool_is_used_as_well),
        TEST(idle_memory_is_released_if_a_batch_does_not_fit_otherwise),
        TEST(idle_memory_makes_room_for_claims),
        TEST(the_pool_stays_if_limits_cannot_be_read),
        TEST(memory_awaiting_release_makes_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
