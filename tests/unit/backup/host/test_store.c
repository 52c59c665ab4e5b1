/* Guards the host store: how memory is released after its buffers, at exit, after a fork, and with many threads. */
#include "support/host_store_fixture.h"

static uint64_t pooled(const host_fixture_t *f) { return atomic_load(&((host_fixture_t *)f)->store.pooled_bytes); }

/* Waits until the threads that release memory, or retry it, have ended. */
static void await_thread(host_fixture_t *f) {
    pthread_mutex_lock(&f->store.lock);
    while (f->store.threads > 0) pthread_cond_wait(&f->store.changed, &f->store.lock);
    pthread_mutex_unlock(&f->store.lock);
}

/* ---- release ---- */

static uint64_t resident_pages(void) {
    unsigned long long size = 0, pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%llu %llu", &size, &pages), 2);
    fclose(file);
    return pages;
}

static void dropped_memory_is_returned_to_the_system(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 64 * MIB, page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t before = resident_pages();
    tms_host_buffer_t *buffer = pinned(f, bytes, TMS_HOST_RELEASE);
    char *memory = buffer->memory;
    assert_true(resident_pages() - before >= bytes / page);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
    for (uint64_t i = 0; i < bytes; i += CHUNK) assert_false(is_mapped(memory + i));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(resident_pages() < before + 16 * MIB / page);
#endif
}

/* Dropping makes no driver call of its own: none happens before the releasing thread is unblocked. */
static void another_thread_releases_memory(void **state) {
    host_fixture_t *f = *state;
    tms_host_buffer_t *buffer = pinned(f, 4 * CHUNK, TMS_HOST_RELEASE);
    char *memory = buffer->memory;
    hold_unregistering();
    tms_host_buffer_drop(buffer); /* returns */
    await_held(1);
    assert_int_equal(atomic_load(&f->store.buffer_bytes), 0);
    assert_int_equal(resident(f), 4 * CHUNK);
    assert_true(is_mapped(memory));
    release_unregistering();
    await_thread(f); /* the thread ends by itself */
    assert_false(is_mapped(memory));
    assert_int_equal(registrations().unregistered, 4);
    assert_false(f->store.release_thread);
    assert_empty(f);
}

/* Each chunk is released exactly when it holds no buffer any more. */
static void a_chunk_is_released_with_its_last_buffer(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {3 * CHUNK / 2, CHUNK / 4, 9 * CHUNK / 4};
    tms_host_buffer_t *buffers[3];
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 3, TMS_HOST_RELEASE, buffers);
    for (int i = 0; i < 3; i++) await_all(buffers[i]);
    tms_host_batch_destroy(batch);
    char *memory = buffers[0]->memory;
    memset(buffers[1]->memory, 42, bytes[1]);
    tms_host_buffer_drop(buffers[0]);
    tms_host_store_settle(&f->store);
    assert_int_equal(resident(f), 3 * CHUNK);
    assert_false(is_mapped(memory));
    assert_true(is_mapped(memory + CHUNK));
    tms_host_buffer_drop(buffers[2]);
    tms_host_store_settle(&f->store);
    assert_int_equal(resident(f), CHUNK);
    assert_bytes((CUdeviceptr)buffers[1]->memory, bytes[1], 42);
    tms_host_buffer_drop(buffers[1]);
    assert_empty(f);
}

static void memory_of_kind_mmap_can_be_released_at_once(void **state) {
    host_fixture_t *f = *state;
    tms_host_buffer_t *mmapped = make_buffer(f, TMS_BACKUP_MMAP, 4 * CHUNK, TMS_HOST_RELEASE);
    char *memory = mmapped->memory;
    assert_int_equal(pinned_bytes(), 4 * CHUNK); /* otherwise the same memory */
    fail_call(CALL_THREAD, 0, 1);                /* no other thread does it */
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    tms_host_buffer_drop(mmapped);
    assert_true(is_mapped(memory));
    tms_host_store_release_now(&f->store);
    for (uint64_t i = 0; i < 4 * CHUNK; i += CHUNK) assert_false(is_mapped(memory + i));
    assert_empty(f);
}

/* It waits for what another thread has begun with, but not for PINNED memory. */
static void releasing_now_waits_for_memory_of_kind_mmap_only(void **state) {
    host_fixture_t *f = *state;
    tms_host_buffer_t *mmapped = make_buffer(f, TMS_BACKUP_MMAP, 2 * CHUNK, TMS_HOST_RELEASE);
    tms_host_buffer_t *other = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    char *memory = mmapped->memory;
    hold_unregistering();
    tms_host_buffer_drop(other);
    await_held(1);                         /* the thread is working on one of its chunks, and keeps it */
    tms_host_store_release_now(&f->store); /* returns: there is nothing of kind MMAP */
    release_unregistering();
    tms_host_buffer_drop(mmapped);
    tms_host_store_release_now(&f->store);
    assert_false(is_mapped(memory));
    assert_false(is_mapped(memory + CHUNK));
    assert_empty(f);
}

static void without_a_thread_memory_waits_for_the_next_call(void **state) {
    host_fixture_t *f = *state;
    char text[TEXT_BYTES];
    tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    captured_stderr_t captured = capture_begin();
    fail_call(CALL_THREAD, 0, 1);
    tms_host_buffer_drop(buffer);
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_int_equal(resident(f), 2 * CHUNK);
    /* The start of the next batch is one. */
    buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    await_thread(f);
    assert_int_equal(resident(f), 2 * CHUNK);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

static void a_view_keeps_its_memory(void **state) {
    host_fixture_t *f = *state;
    const tms_host_policy_t policies[] = {TMS_HOST_RELEASE, TMS_HOST_POOL};
    tms_host_store_set_pool_limit(&f->store, 64 * CHUNK);
    for (int i = 0; i < 2; i++) {
        tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, policies[i]);
        memset(buffer->memory, 7, 2 * CHUNK);
        tms_host_buffer_acquire(buffer);
        tms_host_buffer_drop(buffer);
        tms_host_store_settle(&f->store);
        assert_int_equal(resident(f), 2 * CHUNK);
        assert_int_equal(pooled(f), 0);
        assert_bytes((CUdeviceptr)buffer->memory, 2 * CHUNK, 7);
        tms_host_buffer_t *next = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
        assert_ptr_not_equal(next->memory, buffer->memory);
        tms_host_buffer_drop(next);
        tms_host_buffer_drop(buffer);
        tms_host_store_settle(&f->store);
        assert_int_equal(pooled(f), policies[i] == TMS_HOST_POOL ? 2 * CHUNK : 0);
    }
    tms_host_buffer_drop(NULL);
}

/* ---- the device, exit and fork ---- */

/* Unpinning waits for the device, on a thread of the store: a thread that drops a buffer or begins another pause does not
 * wait. */
static void dropping_does_not_wait_for_the_device(void **state) {
    host_fixture_t *f = *state;
    tms_error_t error;
    CUstream stream = NULL;
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
    block_t block = make_block(0, GRANULE);
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    char *memory = buffer->memory;
    ASSERT_CUDA(CALL(launch_add, stream, block.address, GRANULE, 1, GATE));
    tms_host_buffer_drop(buffer);
    CALL(wait_until_synchronizing);
    assert_true(is_mapped(memory));
    assert_int_equal(pinned_bytes(), 2 * CHUNK);
    buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    memset(buffer->memory, 1, 2 * CHUNK);
    CALL(open_gate, GATE);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
    tms_devices_leave(&f->devices, 0);
}

/* As tms_host_store_retry does: a retry waits for the device as well, and runs on a thread. */
static void a_retry_does_not_wait_for_the_device(void **state) {
    host_fixture_t *f = *state;
    tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    char *memory = buffer->memory;
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    int started = calls_made(CALL_THREAD);
    tms_host_store_retry(&f->store); /* nothing to do */
    assert_int_equal(calls_made(CALL_THREAD), started);
    CALL(fail_after, "cuMemHostUnregister", 0, 2, CUDA_ERROR_UNKNOWN);
    tms_host_buffer_drop(buffer);
    tms_host_store_settle(&f->store);
    await_thread(f);
    assert_int_equal(quarantined(f), 2);

    fail_call(CALL_THREAD, 0, 1);
    tms_host_store_retry(&f->store);
    assert_int_equal(f->store.threads, 0);
    assert_int_equal(quarantined(f), 2); /* the next call retries */
    started = calls_made(CALL_THREAD);

    hold_unregistering();
    tms_host_store_retry(&f->store);
    await_held(1);
    tms_host_store_retry(&f->store); /* one thread does it */
    assert_int_equal(calls_made(CALL_THREAD), started + 1);
    assert_int_equal(f->store.threads, 1);
    assert_true(is_mapped(memory));
    release_unregistering();
    await_thread(f);
    assert_int_equal(quarantined(f), 0);
    assert_false(is_mapped(memory));
    assert_empty(f);
}

static void closing_leaves_quarantined_memory(void **state) {
    host_fixture_t *f = *state;
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    CALL(fail_after, "cuMemHostUnregister", 0, 1, CUDA_ERROR_UNKNOWN);
    tms_host_buffer_drop(pinned(f, CHUNK, TMS_HOST_RELEASE));
    tms_host_store_settle(&f->store);
    await_thread(f);
    tms_host_store_close(&f->store, INFINITY);
    int started = calls_made(CALL_THREAD);
    tms_host_store_retry(&f->store);
    assert_int_equal(calls_made(CALL_THREAD), started);
    assert_int_equal(registrations().unregistered, 0);
    assert_int_equal(quarantined(f), 1);
}

static _Atomic bool closed;

static void *close_store(void *store) {
    tms_host_store_close(store, INFINITY);
    atomic_store(&closed, true);
    return NULL;
}

static void closing_waits_for_the_call_in_flight_and_allows_no_other(void **state) {
    host_fixture_t *f = *state;
    pthread_t thread;
    tms_error_t error;
    uint64_t part = 0;
    tms_host_buffer_t *buffer = pinned(f, 4 * CHUNK, TMS_HOST_RELEASE), *other = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    const uint64_t bytes = 2 * CHUNK;
    hold_unregistering();
    tms_host_buffer_drop(buffer);
    await_held(1);
    assert_int_equal(pthread_create(&thread, NULL, close_store, &f->store), 0);
    pthread_mutex_lock(&f->store.lock);
    while (!f->store.closing) pthread_cond_wait(&f->store.changed, &f->store.lock);
    assert_int_equal(f->store.calls, 1);
    pthread_mutex_unlock(&f->store.lock);
    for (int i = 0; i < 1000; i++) sched_yield(); /* one that does not wait has returned by now, most likely */
    assert_false(atomic_load(&closed));
    release_unregistering();
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(registrations().unregistered, 1);
    tms_host_buffer_drop(other); /* as the interpreter does, later still */
    tms_host_store_release_now(&f->store);
    tms_host_store_settle(&f->store);
    await_thread(f);
    assert_int_equal(registrations().unregistered, 1);
    tms_host_buffer_t *late;
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &late);
    assert_int_equal(tms_host_buffer_await(late, 0, NULL, &part, &CONTEXT, &error), TMS_INVALID_STATE);
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(late);
    assert_int_equal(CALL(calls, "cuMemHostRegister"), 6);
}

/* As if a kernel never ended, for which the driver's call waits. */
static void closing_gives_up_on_a_call_that_does_not_return(void **state) {
    host_fixture_t *f = *state;
    tms_host_buffer_t *buffer = pinned(f, 2 * CHUNK, TMS_HOST_RELEASE);
    hold_unregistering();
    tms_host_buffer_drop(buffer);
    await_held(1);
    tms_host_store_close(&f->store, tms_wait_now());
    pthread_mutex_lock(&f->store.lock);
    assert_true(f->store.closing);
    assert_int_equal(f->store.calls, 1);
    assert_int_equal(f->store.abandoned_calls, 1);
    pthread_mutex_unlock(&f->store.lock);
    tms_host_store_close(&f->store, INFINITY); /* it has been abandoned for good */
    release_unregistering();
    await_thread(f);
    assert_int_equal(registrations().unregistered, 1); /* and no other call is begun */
    assert_int_equal(f->store.calls, 0);
    assert_int_equal(f->store.abandoned_calls, 0);
    tms_host_store_close(&f->store, INFINITY);
}

static struct {
    host_fixture_t *f;
    tms_host_buffer_t *buffer;
} in_child;

/* The buffers are not in the child; something else may be at the same address. */
static void touch_nothing(void) {
    host_fixture_t *f = in_child.f;
    unsigned char *memory = in_child.buffer->memory;
    tms_host_store_after_fork_in_child(&f->store);
    tms_quarantine_after_fork_in_child(&f->quarantine);
    if (is_mapped(memory)) _exit(2);
    void *own = mmap(memory, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != memory) _exit(3);
    memory[0] = 42;
    tms_host_buffer_acquire(in_child.buffer);
    tms_host_buffer_drop(in_child.buffer);
    tms_host_buffer_drop(in_child.buffer);
    tms_host_store_settle(&f->store);
    if (!is_mapped(memory) || memory[0] != 42) _exit(4);
    if (pooled(f) || resident(f) || f->store.blocks || f->store.waiting) _exit(5);
    _exit(registrations().unregistered == 0 ? 0 : 6);
}

static void a_forked_child_changes_nothing(void **state) {
    host_fixture_t *f = *state;
    tms_host_store_set_pool_limit(&f->store, 4 * CHUNK);
    tms_host_buffer_drop(pinned(f, 2 * CHUNK, TMS_HOST_POOL));
    in_child.f = f;
    in_child.buffer = pinned(f, 4 * CHUNK, TMS_HOST_RELEASE);
    memset(in_child.buffer->memory, 1, 4 * CHUNK);
    pthread_mutex_lock(&f->store.lock); /* as process.c does */
    int status = run_in_child(touch_nothing);
    pthread_mutex_unlock(&f->store.lock);
    assert_int_equal(status, 0);
    assert_bytes((CUdeviceptr)in_child.buffer->memory, 4 * CHUNK, 1);
    tms_host_buffer_drop(in_child.buffer);
    tms_host_store_settle(&f->store);
    assert_int_equal(pooled(f), 2 * CHUNK);
}

/* ---- many threads ---- */

enum { THREADS = 4, ROUNDS = 30 };

static void *make_and_drop(void *argument) {
    host_fixture_t *f = argument;
    const uint64_t sizes[] = {CHUNK / 2, 3 * CHUNK, 5000, 2 * CHUNK};
    for (int i = 0; i < ROUNDS; i++) {
        tms_host_buffer_t *buffer = pinned(f, sizes[i % 4], i % 3 ? TMS_HOST_POOL : TMS_HOST_RELEASE);
        memset(buffer->memory, i, buffer->bytes);
        tms_host_buffer_acquire(buffer);
        tms_host_buffer_drop(buffer);
        if (i % 5 == 0) tms_host_store_set_pool_limit(&f->store, (uint64_t)(i % 7) * CHUNK);
        if (i % 7 == 0) tms_host_store_release_now(&f->store);
        for (uint64_t at = 0; at < buffer->bytes; at += 1000) {
            if (((uint8_t *)buffer->memory)[at] != i) return "another thread wrote to it";
        }
        tms_host_buffer_drop(buffer);
    }
    return NULL;
}

static void threads_do_not_disturb_each_other(void **state) {
    host_fixture_t *f = *state;
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, make_and_drop, f), 0);
    for (int i = 0; i < THREADS; i++) {
        void *complaint = NULL;
        pthread_join(threads[i], &complaint);
        assert_null(complaint);
    }
    tms_host_store_set_pool_limit(&f->store, 0);
    assert_empty(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(dropped_memory_is_returned_to_the_system),
        TEST(another_thread_releases_memory),
        TEST(a_chunk_is_released_with_its_last_buffer),
        TEST(memory_of_kind_mmap_can_be_released_at_once),
        TEST(releasing_now_waits_for_memory_of_kind_mmap_only),
        TEST(without_a_thread_memory_waits_for_the_next_call),
        TEST(a_view_keeps_its_memory),
        TEST(dropping_does_not_wait_for_the_device),
        TEST(a_retry_does_not_wait_for_the_device),
        TEST(closing_leaves_quarantined_memory),
        TEST(closing_waits_for_the_call_in_flight_and_allows_no_other),
        TEST(closing_gives_up_on_a_call_that_does_not_return),
        TEST(a_forked_child_changes_nothing),
        TEST(threads_do_not_disturb_each_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
