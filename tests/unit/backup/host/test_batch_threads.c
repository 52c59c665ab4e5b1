/* Guards batches of the host store: work without threads and with waiters, memory exhaustion, and forks. */
#include "support/host_batch_fixture.h"

/* ---- threads ---- */

/* All of them fail to start, only the first, or all but the first. */
static void without_threads_the_waiter_does_the_work(void **state) {
    host_fixture_t *f = *state;
    const struct {
        int succeed, fail, lines;
    } cases[] = {{0, 1000, 1}, {0, 1, 1}, {1, 1000, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint64_t bytes[] = {3 * CHUNK, 5 * CHUNK};
        char text[TEXT_BYTES];
        tms_host_buffer_t *buffers[2];
        captured_stderr_t captured = capture_begin();
        atomic_store(&f->store.warned_no_threads, false);
        fail_call(CALL_THREAD, cases[i].succeed, cases[i].fail);
        struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_RELEASE, buffers);
        await_all(buffers[1]);
        await_all(buffers[0]);
        assert_int_equal(pinned_bytes(), 8 * CHUNK);
        memset(buffers[0]->memory, 1, bytes[0]);
        memset(buffers[1]->memory, 1, bytes[1]);
        tms_host_batch_destroy(batch);
        drop_all(buffers, 2);
        fail_call(CALL_THREAD, 0, 0);
        capture_end(captured, text, sizeof text);
        assert_int_equal(count_lines(text), cases[i].lines);
        assert_non_null(strstr(text, "pthread_create"));
        assert_empty(f);
    }
}

static int32_t stop(void *asked) {
    ++*(int *)asked;
    return 1;
}

static _Atomic bool touching_is_held;
static void hold_touching(int count) {
    (void)count;
    while (atomic_load(&touching_is_held)) sched_yield();
}

static void a_waiter_can_be_interrupted(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 4 * CHUNK;
    tms_host_buffer_t *buffer;
    tms_error_t error;
    tms_wait_t wait;
    uint64_t part = 0;
    int asked = 0;
    atomic_store(&touching_is_held, true);
    on_touch(hold_touching);
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &buffer);
    tms_wait_begin(&wait, stop, &asked, 1);
    assert_int_equal(tms_host_buffer_await(buffer, 0, &wait, &part, &CONTEXT, &error), TMS_INTERRUPTED);
    assert_int_equal(asked, 1);
    atomic_store(&touching_is_held, false);
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

static void a_batch_destroyed_early_is_no_longer_waited_for(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 32 * CHUNK;
    for (int i = 0; i < 8; i++) {
        tms_host_buffer_t *buffer;
        tms_error_t error;
        uint64_t part = 0;
        struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_POOL, &buffer);
        if (i % 2) ASSERT_OK(tms_host_buffer_await(buffer, 0, NULL, &part, &CONTEXT, &error), error);
        tms_host_batch_destroy(batch);
        tms_status_t status = tms_host_buffer_await(buffer, bytes - 1, NULL, &part, &CONTEXT, &error);
        assert_true(status == TMS_OK || status == TMS_INVALID_STATE);
        tms_host_buffer_drop(buffer);
        assert_empty(f);
    }
    struct tms_host_batch *batch = create(f); /* never started */
    tms_host_buffer_t *buffer = add(batch, CHUNK, 0, NULL);
    tms_error_t error;
    uint64_t part = 0;
    assert_null(buffer->memory);
    assert_int_equal(tms_host_buffer_await(buffer, 0, NULL, &part, &CONTEXT, &error), TMS_INVALID_STATE);
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(buffer);
    tms_host_batch_destroy(NULL);
    assert_empty(f);
}

/* A capture in flight on another thread does not affect the store's calls. */
static void a_stream_capture_is_not_broken(void **state) {
    host_fixture_t *f = *state;
    CUstream stream = NULL;
    CUgraph graph = NULL;
    CUcontext context = NULL;
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, context));
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 4 * CHUNK, TMS_HOST_RELEASE);
    assert_int_equal(pinned_bytes(), 4 * CHUNK);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
    fail_call(CALL_THREAD, 0, 1000); /* and on the thread that captures */
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    buffer = make_buffer(f, TMS_BACKUP_PINNED, 4 * CHUNK, TMS_HOST_RELEASE);
    assert_int_equal(pinned_bytes(), 4 * CHUNK);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
    fail_call(CALL_THREAD, 0, 0);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    ASSERT_CUDA(CALL(cuThreadExchangeStreamCaptureMode, &mode));
    assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_GLOBAL); /* as before */
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    assert_non_null(graph);
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, &context));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRelease_v2, 0));
}

/* ---- headroom ---- */

static void a_batch_that_does_not_fit_is_refused_before_prefaulting(void **state) {
    host_fixture_t *f = *state;
    struct tms_host_batch *batch = create(f);
    tms_host_buffer_t *buffers[] = {add(batch, 3 * CHUNK, 0, NULL), add(batch, 3 * CHUNK, 0, NULL)};
    tms_error_t error;
    f->store.limits.cap_bytes = 6 * CHUNK - 1;
    assert_int_equal(tms_host_batch_start(batch, &CONTEXT, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(error.bytes, 6 * CHUNK);
    assert_non_null(strstr(error.message, "TMS_HOST_MEMORY_LIMIT_MB"));
    assert_int_equal(calls_made(CALL_MMAP), 0);
    assert_int_equal(CALL(calls, "*"), 0); /* and no GPU memory */
    tms_host_batch_destroy(batch);
    drop_all(buffers, 2);
    assert_empty(f);
}

/* Memory in flight counts once: a cap of exactly this size suffices. */
static void a_batch_that_fits_exactly_fits(void **state) {
    host_fixture_t *f = *state;
    f->store.limits.cap_bytes = 32 * CHUNK;
    for (int i = 0; i < 8; i++) {
        tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 32 * CHUNK, TMS_HOST_RELEASE);
        assert_int_equal(atomic_load(&f->store.resident_bytes), 32 * CHUNK);
        tms_host_buffer_drop(buffer);
        assert_empty(f);
    }
}

static struct {
    char root[TEMPORARY_BYTES];
    int at; /* prefaulted parts, after which no more is available */
    _Atomic bool exhausted;
} fake;

static void put(const char *path, const char *text) {
    char name[2 * TEMPORARY_BYTES];
    (void)snprintf(name, sizeof name, "%s/proc/%s", fake.root, path);
    FILE *file = fopen(name, "w");
    if (!file) abort();
    fputs(text, file);
    fclose(file);
}

/* Nothing more is prefaulted before that. */
static void exhaust(int count) {
    if (count == fake.at) {
        put("meminfo", "MemAvailable: 0 kB\n");
        atomic_store(&fake.exhausted, true);
    }
    while (count > fake.at && !atomic_load(&fake.exhausted)) sched_yield();
}

static void use_fake_system(host_fixture_t *f) {
    char name[2 * TEMPORARY_BYTES];
    tms_error_t error;
    assert_non_null(make_temporary_directory(fake.root, "host-batch"));
    (void)snprintf(name, sizeof name, "mkdir %s/proc", fake.root);
    assert_int_equal(system(name), 0);
    put("meminfo", "MemAvailable: 99999999 kB\n");
    tms_host_limits_release(&f->store.limits);
    ASSERT_OK(tms_host_limits_init(&f->store.limits, fake.root, UINT64_MAX, &error), error);
}

/* Memory is exhausted during a batch: chunks prefaulted before are usable, the others never are. */
static void memory_exhausted_midway_fails_the_batch(void **state) {
    host_fixture_t *f = *state;
    const int threads[] = {1, 3, 15};
    for (size_t i = 0; i < 3; i++) {
        const uint64_t bytes[] = {20 * CHUNK, 12 * CHUNK};
        tms_host_buffer_t *buffers[2];
        tms_error_t error;
        uint64_t part = 0;
        use_fake_system(f);
        fake.at = calls_made(CALL_MINCORE) + 4;
        atomic_store(&fake.exhausted, false);
        f->store.prefaulting_threads = threads[i];
        on_touch(exhaust);
        struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_RELEASE, buffers);
        assert_int_equal(tms_host_buffer_await(buffers[1], 11 * CHUNK, NULL, &part, &CONTEXT, &error),
                         TMS_OUT_OF_HOST_MEMORY);
        assert_non_null(strstr(error.message, "MemAvailable"));
        /* Those before, those that each thread was working on, and those allowed ahead. */
        assert_true(atomic_load(&f->store.resident_bytes) <= (uint64_t)(4 + threads[i] + 3) * CHUNK);
        if (threads[i] == 1) assert_int_equal(calls_made(CALL_MINCORE), fake.at + 1);
        on_touch(NULL);
        tms_host_batch_destroy(batch);
        assert_int_equal(f->store.planned_bytes + f->store.in_flight_bytes, 0);
        drop_all(buffers, 2);
        assert_empty(f);
        put("meminfo", "MemAvailable: 99999999 kB\n"); /* the next one finds memory again */
        tms_host_buffer_drop(make_buffer(f, TMS_BACKUP_PINNED, 4 * CHUNK, TMS_HOST_RELEASE));
        assert_empty(f);
        assert_int_equal(remove_temporary_directory(fake.root), 0);
    }
}

/* ---- fork ---- */

static struct {
    host_fixture_t *f;
    struct tms_host_batch *batch;
    tms_host_buffer_t *buffer;
} in_child;

static void forget_and_go(void) {
    host_fixture_t *f = in_child.f;
    tms_host_store_after_fork_in_child(&f->store);
    tms_quarantine_after_fork_in_child(&f->quarantine);
    tms_host_batch_destroy(in_child.batch); /* joins no thread */
    tms_host_buffer_drop(in_child.buffer);
    tms_host_store_release_now(&f->store);
    tms_host_store_settle(&f->store);
    bool empty = atomic_load(&f->store.buffer_bytes) == 0 && atomic_load(&f->store.resident_bytes) == 0 && !f->store.blocks;
    end_child(empty && f->store.threads == 0 ? 0 : 3);
}

static void a_child_forked_meanwhile_forgets_the_batch(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 16 * CHUNK;
    atomic_store(&touching_is_held, true);
    on_touch(hold_touching);
    in_child.f = f;
    in_child.batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &in_child.buffer);
    await_prefaulted_parts(1);
    pthread_mutex_lock(&f->store.lock); /* as process.c does */
    int status = run_in_child(forget_and_go);
    pthread_mutex_unlock(&f->store.lock);
    assert_int_equal(status, 0);
    atomic_store(&touching_is_held, false);
    await_all(in_child.buffer);
    memset(in_child.buffer->memory, 1, bytes);
    tms_host_batch_destroy(in_child.batch);
    tms_host_buffer_drop(in_child.buffer);
    assert_empty(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(without_threads_the_waiter_does_the_work),
        TEST(a_waiter_can_be_interrupted),
        TEST(a_batch_destroyed_early_is_no_longer_waited_for),
        TEST(a_stream_capture_is_not_broken),
        TEST(a_batch_that_does_not_fit_is_refused_before_prefaulting),
        TEST(a_batch_that_fits_exactly_fits),
        TEST(memory_exhausted_midway_fails_the_batch),
        TEST(a_child_forked_meanwhile_forgets_the_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
