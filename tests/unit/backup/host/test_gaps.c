/* Guards the gaps of the pool: which memory they cover, which of them a buffer gets, and what a search for one costs,
 * counted in gaps compared. The cost of planning a batch with many groups is here as well. */
#include "support/host_pool_fixture.h"

#include "backup/host/gaps.h"
#include "backup/host/work.h"

#define PAGE ((uint64_t)4096)

/* ---- what they cover ---- */

static bool is_available(const tms_host_chunk_t *chunk) { return chunk->open && chunk->state == TMS_HOST_CHUNK_USABLE; }

static bool has_buffer(const struct tms_host_block *block, uint64_t offset) {
    for (const tms_host_buffer_t *buffer = block->first; buffer; buffer = buffer->next) {
        if (offset >= buffer->offset && offset < buffer->offset + tms_host_buffer_extent(buffer)) return true;
    }
    return false;
}

/* Asserts that the gaps are the available memory without buffers, and returns its pages. */
static uint64_t check_block(const tms_host_store_t *store, const struct tms_host_block *block) {
    const tms_registry_node_t *last = NULL;
    uint64_t pages = 0;
    for (uint64_t offset = 0; offset < block->bytes; offset += PAGE) {
        const bool available = is_available(&block->chunks[offset / CHUNK]) && !has_buffer(block, offset);
        const tms_registry_node_t *node = tms_registry_find(&store->gaps, (uintptr_t)block->memory + offset);
        /* Another block may have the addresses of chunks that are gone. */
        const bool found = node && ((const tms_host_gap_t *)node)->block == block;
        assert_int_equal(found, available);
        if (found) {
            assert_true(node == last || !last || last->end < node->begin); /* each is as long as possible */
            last = node;
            pages++;
        }
    }
    return pages;
}

static uint64_t count_listed(const tms_host_gap_lists_t *lists, uint64_t *pages) {
    uint64_t count = 0;
    for (int i = 0; i < TMS_HOST_GAP_CLASSES; i++) {
        assert_int_equal(lists->used >> i & 1, lists->by_class[i] != NULL);
        for (const tms_host_gap_t *gap = lists->by_class[i]; gap; gap = gap->next) {
            const uint64_t bytes = gap->node.end - gap->node.begin;
            assert_int_equal(bytes >> i, 1);
            *pages += bytes / PAGE;
            count++;
        }
    }
    return count;
}

/* The store has settled: no thread of it changes gaps. */
static void check_gaps(host_fixture_t *f) {
    const tms_host_store_t *store = &f->store;
    uint64_t available = 0, pages = 0, listed = 0;
    for (const struct tms_host_block *block = store->blocks; block; block = block->next)
        available += check_block(store, block);
    for (int device = 0; device < TMS_MAX_DEVICES; device++) listed += count_listed(&store->gap_lists[device], &pages);
    assert_int_equal(listed, store->gaps.count);
    assert_int_equal(pages, available);
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void gaps_are_the_memory_of_the_pool_without_buffers(void **state) {
    host_fixture_t *f = *state;
    enum { STEPS = 120, BUFFERS = 12 };
    const tms_host_policy_t policies[] = {TMS_HOST_POOL, TMS_HOST_POOL, TMS_HOST_RELEASE};
    tms_host_buffer_t *buffers[BUFFERS] = {NULL};
    uint32_t random = 1;
    tms_host_store_set_pool_limit(&f->store, 16 * CHUNK);
    for (int step = 0; step < STEPS; step++) {
        const uint32_t i = next_random(&random) % BUFFERS;
        if (buffers[i]) {
            tms_host_buffer_drop(buffers[i]);
            buffers[i] = NULL;
        } else {
            const uint64_t bytes = next_random(&random) % 4 == 0 ? CHUNK * (1 + next_random(&random) % 2)
                                                                 : 1 + next_random(&random) % (3 * CHUNK / 2);
            buffers[i] = pinned(f, bytes, policies[next_random(&random) % 3]);
            memset(buffers[i]->memory, (int)i, buffers[i]->bytes);
        }
        if (next_random(&random) % 50 == 0) tms_host_store_trim(&f->store);
        tms_host_store_settle(&f->store);
        check_gaps(f);
        for (uint32_t k = 0; k < BUFFERS; k++) {
            if (buffers[k]) assert_bytes((CUdeviceptr)buffers[k]->memory, buffers[k]->bytes, (uint8_t)k);
        }
    }
    for (int i = 0; i < BUFFERS; i++) tms_host_buffer_drop(buffers[i]);
    check_gaps(f);
}

static void a_buffer_gets_the_smallest_gap_that_fits(void **state) {
    host_fixture_t *f = *state;
    const uint64_t sizes[] = {3 * CHUNK, CHUNK, 2 * CHUNK, CHUNK};
    const uint64_t offsets[] = {0, 3 * CHUNK, 4 * CHUNK, 6 * CHUNK};
    tms_host_buffer_t *buffers[4];
    tms_host_store_set_pool_limit(&f->store, 8 * CHUNK);
    tms_host_buffer_drop(pinned(f, 8 * CHUNK, TMS_HOST_POOL));
    for (int i = 0; i < 4; i++) buffers[i] = pinned(f, sizes[i], TMS_HOST_POOL);
    char *memory = buffers[0]->memory;
    for (int i = 0; i < 4; i++) assert_ptr_equal(buffers[i]->memory, memory + offsets[i]); /* the rest is one gap */
    tms_host_buffer_drop(buffers[2]);
    tms_host_buffer_drop(buffers[0]); /* the latest gap */
    buffers[2] = pinned(f, 2 * CHUNK, TMS_HOST_POOL);
    assert_ptr_equal(buffers[2]->memory, memory + 4 * CHUNK);
    buffers[0] = pinned(f, 3 * CHUNK / 2, TMS_HOST_POOL); /* more than what is behind the last buffer */
    assert_ptr_equal(buffers[0]->memory, memory);
    for (int i = 0; i < 4; i++) tms_host_buffer_drop(buffers[i]);
    tms_host_buffer_t *whole = pinned(f, 8 * CHUNK, TMS_HOST_POOL); /* the gaps have become one */
    assert_ptr_equal(whole->memory, memory);
    tms_host_buffer_drop(whole);
}

/* ---- what planning costs ---- */

enum { MANY = 2000 };

static tms_host_buffer_t *plan(struct tms_host_batch *batch, uint64_t bytes, const void *group) {
    const tms_host_request_t request = {.bytes = bytes, .device = 0, .kind = TMS_BACKUP_PINNED, .group = group};
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    ASSERT_OK(tms_host_batch_add(batch, &request, &buffer, &CONTEXT, &error), error);
    atomic_store(&buffer->policy, TMS_HOST_POOL);
    return buffer;
}

/* Plans MANY buffers of a group, makes them usable, and adds the steps of that to *steps. */
static void plan_many(host_fixture_t *f, uint64_t bytes, const void *group, tms_host_buffer_t **buffers, uint64_t *steps) {
    struct tms_host_batch *batch = NULL;
    tms_error_t error;
    const uint64_t before = f->store.steps;
    ASSERT_OK(tms_host_batch_create(&batch, &f->store, &CONTEXT, &error), error);
    for (int i = 0; i < MANY; i++) buffers[i] = plan(batch, bytes, group);
    *steps += f->store.steps - before + batch->steps;
    ASSERT_OK(tms_host_batch_start(batch, &CONTEXT, &error), error);
    for (int i = 0; i < MANY; i++) await_all(buffers[i]);
    tms_host_batch_destroy(batch);
}

static void drop_many(tms_host_buffer_t **buffers, int from, int by) {
    for (int i = from; i < MANY; i += by) tms_host_buffer_drop(buffers[i]);
}

static void a_plan_does_not_visit_the_buffers_of_other_groups(void **state) {
    host_fixture_t *f = *state;
    static tms_host_buffer_t *buffers[2][MANY];
    uint64_t steps = 0;
    plan_many(f, 4 * PAGE, &buffers[0], buffers[0], &steps);
    steps = 0;
    plan_many(f, PAGE, &buffers[1], buffers[1], &steps);
    assert_true(steps >= MANY && steps <= 2 * MANY);
    drop_many(buffers[0], 0, 1);
    drop_many(buffers[1], 0, 1);
}

static void a_pool_that_is_too_small_is_searched_in_a_few_steps(void **state) {
    host_fixture_t *f = *state;
    static tms_host_buffer_t *buffers[MANY];
    tms_host_store_set_pool_limit(&f->store, MANY * PAGE / 4 / CHUNK * CHUNK);
    for (int cycle = 0; cycle < 3; cycle++) {
        uint64_t steps = 0;
        plan_many(f, PAGE, NULL, buffers, &steps);
        assert_true(steps <= 4 * MANY);
        drop_many(buffers, 0, 1);
        tms_host_store_settle(&f->store);
        assert_true(pooled(f) > 0);
    }
}

/* Each gap is too small, and has the number of bits of what is wanted. */
static void a_search_compares_a_limited_number_of_gaps(void **state) {
    host_fixture_t *f = *state;
    static tms_host_buffer_t *buffers[MANY], *larger[MANY];
    enum { COMPARED = 64 };
    uint64_t steps = 0;
    tms_host_store_set_pool_limit(&f->store, 64 * CHUNK);
    tms_host_buffer_drop(pinned(f, 2 * MANY * PAGE, TMS_HOST_POOL));
    plan_many(f, 2 * PAGE, NULL, buffers, &steps);
    drop_many(buffers, 0, 2);
    assert_true(f->store.gaps.count >= MANY / 2 - 1);
    steps = 0;
    plan_many(f, 3 * PAGE, NULL, larger, &steps);
    assert_true(steps >= MANY && steps <= (COMPARED + 2) * MANY);
    drop_many(buffers, 1, 2);
    drop_many(larger, 0, 1);
}

static void each_group_is_found_in_a_few_steps(void **state) {
    host_fixture_t *f = *state;
    static tms_host_buffer_t *buffers[2 * MANY];
    static const char tags[MANY];
    struct tms_host_batch *batch = NULL;
    tms_error_t error;
    ASSERT_OK(tms_host_batch_create(&batch, &f->store, &CONTEXT, &error), error);
    for (int i = 0; i < 2 * MANY; i++) buffers[i] = plan(batch, PAGE, &tags[i % MANY]);
    assert_int_equal(batch->block_count, MANY);
    for (int i = 0; i < MANY; i++) assert_ptr_equal(buffers[i]->block, buffers[MANY + i]->block);
    assert_true(batch->steps >= 2 * MANY && batch->steps <= 16 * MANY);
    tms_host_batch_destroy(batch);
    for (int i = 0; i < 2 * MANY; i++) tms_host_buffer_drop(buffers[i]);
}

/* A copier asks for help whenever it waits. */
static void help_does_not_begin_at_the_first_chunk_each_time(void **state) {
    host_fixture_t *f = *state;
    static tms_host_buffer_t *buffers[MANY];
    static const char tags[MANY];
    struct tms_host_batch *batch = NULL;
    tms_error_t error;
    ASSERT_OK(tms_host_batch_create(&batch, &f->store, &CONTEXT, &error), error);
    for (int i = 0; i < MANY; i++) buffers[i] = plan(batch, PAGE, &tags[i]);
    ASSERT_OK(tms_host_batch_start(batch, &CONTEXT, &error), error);
    pthread_mutex_lock(&f->store.lock);
    while (batch->blocks[MANY - 1]->chunks[0].state != TMS_HOST_CHUNK_PREFAULTED)
        pthread_cond_wait(&f->store.changed, &f->store.lock);
    pthread_mutex_unlock(&f->store.lock);
    const uint64_t before = f->store.steps;
    int helped = 0;
    while (helped < 2 * MANY && tms_host_batch_help(batch, 0)) helped++;
    assert_true(helped >= MANY - TMS_HOST_PREFAULTING_THREADS && helped <= MANY);
    assert_true(f->store.steps - before <= 4 * MANY);
    for (int i = 0; i < MANY; i++) await_all(buffers[i]);
    tms_host_batch_destroy(batch);
    drop_many(buffers, 0, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(gaps_are_the_memory_of_the_pool_without_buffers),   TEST(a_buffer_gets_the_smallest_gap_that_fits),
        TEST(a_plan_does_not_visit_the_buffers_of_other_groups), TEST(a_pool_that_is_too_small_is_searched_in_a_few_steps),
        TEST(a_search_compares_a_limited_number_of_gaps),        TEST(each_group_is_found_in_a_few_steps),
        TEST(help_does_not_begin_at_the_first_chunk_each_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
