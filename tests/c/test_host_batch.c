/* Batches of the host store: memory becomes usable in order, on threads or without them, and what fails leaves nothing. */

#include "host_fixture.h"

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "captured_stderr.h"
#include "host_block.h"
#include "own_process.h"
#include "temporary.h"

enum { TEXT_BYTES = 8192 };

static const tms_error_context_t CONTEXT = {.operation = "pause", .device = 0, .tag = "weights"};

static struct tms_host_batch *create(host_fixture_t *f) {
    struct tms_host_batch *batch = NULL;
    tms_error_t error;
    ASSERT_OK(tms_host_batch_create(&batch, &f->store, &CONTEXT, &error), error);
    return batch;
}

static tms_host_buffer_t *add(struct tms_host_batch *batch, uint64_t bytes, int device, const void *group) {
    const tms_host_request_t request = {.bytes = bytes, .device = device, .kind = TMS_BACKUP_PINNED, .group = group};
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    ASSERT_OK(tms_host_batch_add(batch, &request, &buffer, &CONTEXT, &error), error);
    return buffer;
}

static void drop_all(tms_host_buffer_t **buffers, size_t count) {
    for (size_t i = 0; i < count; i++) tms_host_buffer_drop(buffers[i]);
}

/* ---- what a batch is ---- */

static void buffers_lie_back_to_back_and_end_at_pieces(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {5 * PIECE / 2, 5000, 3 * PIECE};
    tms_host_buffer_t *buffers[3];
    tms_error_t error;
    uint64_t part = 0;
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 3, TMS_HOST_RELEASE, buffers);
    for (int i = 0; i < 3; i++) await_all(buffers[i]);
    char *first = buffers[0]->memory;
    assert_int_equal((uintptr_t)first % (2 * MIB), 0);
    assert_ptr_equal(buffers[1]->memory, first + 5 * PIECE / 2);
    assert_ptr_equal(buffers[2]->memory, first + 5 * PIECE / 2 + 8192);
    assert_int_equal(atomic_load(&f->store.buffer_bytes), 5 * PIECE / 2 + 5000 + 3 * PIECE);
    assert_int_equal(atomic_load(&f->store.resident_bytes), 6 * PIECE);
    /* A copy goes to the end of its piece, or of its buffer. */
    ASSERT_OK(tms_host_buffer_await(buffers[0], 0, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, PIECE);
    ASSERT_OK(tms_host_buffer_await(buffers[0], PIECE + 100, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, PIECE - 100);
    ASSERT_OK(tms_host_buffer_await(buffers[0], 2 * PIECE, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, PIECE / 2);
    ASSERT_OK(tms_host_buffer_await(buffers[1], 4999, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, 1);
    ASSERT_OK(tms_host_buffer_await(buffers[2], 0, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, PIECE / 2 - 8192);
    tms_host_batch_destroy(batch);
    drop_all(buffers, 3);
    assert_empty(f);
}

static void pieces_are_page_locked_once_each_and_in_order(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {7 * PIECE, 9 * PIECE};
    tms_host_buffer_t *buffers[2];
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_RELEASE, buffers);
    await_all(buffers[0]);
    await_all(buffers[1]);
    registrations_t seen = registrations();
    assert_int_equal(seen.count, 16);
    for (int i = 0; i < 16; i++) {
        assert_ptr_equal(seen.addresses[i], (char *)buffers[0]->memory + (uint64_t)i * PIECE);
        assert_int_equal(seen.bytes[i], PIECE);
    }
    assert_int_equal(locked_bytes(), 16 * PIECE);
    tms_host_batch_destroy(batch);
    drop_all(buffers, 2);
    assert_empty(f);
    assert_int_equal(registrations().unregistered, 16);
}

static uint8_t pattern(uint64_t position) { return (uint8_t)((position * 2654435761u) >> 13); }

/* There and back, each copy as long as await allows. */
static void contents_come_back(void **state) {
    host_fixture_t *f = *state;
    const uint64_t size = 6 * MIB, at = 3 * PIECE / 2;
    const uint64_t bytes[] = {at, size};
    tms_host_buffer_t *buffers[2];
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
    block_t block = make_block(0, size);
    CUstream stream = NULL;
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    for (uint64_t i = 0; i < size; i++) ((uint8_t *)block.address)[i] = pattern(i);
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_RELEASE, buffers);
    for (uint64_t part = 0, done = 0; done < size; done += part) {
        ASSERT_OK(tms_host_buffer_await(buffers[1], done, NULL, &part, &CONTEXT, &error), error);
        ASSERT_CUDA(CALL(cuMemcpyDtoHAsync_v2, (char *)buffers[1]->memory + done, block.address + done, part, stream));
    }
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    tms_host_batch_destroy(batch);
    memset((void *)block.address, 0, size);
    for (uint64_t part = 0, done = 0; done < size; done += part) {
        ASSERT_OK(tms_host_buffer_await(buffers[1], done, NULL, &part, &CONTEXT, &error), error);
        ASSERT_CUDA(CALL(cuMemcpyHtoDAsync_v2, block.address + done, (char *)buffers[1]->memory + done, part, stream));
    }
    ASSERT_CUDA(CALL(cuStreamSynchronize, stream));
    for (uint64_t i = 0; i < size; i++) {
        if (((uint8_t *)block.address)[i] != pattern(i)) fail_msg("byte %llu differs", (unsigned long long)i);
    }
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    drop_block(&block);
    tms_devices_leave(&f->devices, 0);
    drop_all(buffers, 2);
    assert_empty(f);
}

static void await_touched(int parts) {
    while (calls_made(CALL_MINCORE) < parts) sched_yield();
}

/* All is touched without it, and nothing page-locked that nobody waits for. */
static void whoever_waits_page_locks(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 8 * PIECE;
    tms_host_buffer_t *buffer;
    tms_error_t error;
    uint64_t part = 0;
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &buffer);
    await_touched(8);
    assert_int_equal(registrations().count, 0);
    for (int i = 0; i < 2; i++) {
        ASSERT_OK(tms_host_buffer_await(buffer, 5 * PIECE + 7, NULL, &part, &CONTEXT, &error), error);
        assert_int_equal(registrations().count, 1);
        assert_ptr_equal(registrations().addresses[0], (char *)buffer->memory + 5 * PIECE);
    }
    await_all(buffer);
    assert_int_equal(registrations().count, 8);
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

/* Until every piece of the buffer is prefaulted. That comes a moment after the last mincore: the thread still has to say so.
 */
static void await_prefaulted(host_fixture_t *f, const tms_host_buffer_t *buffer) {
    pthread_mutex_lock(&f->store.lock);
    for (uint64_t at = buffer->offset; at < buffer->offset + buffer->bytes; at += PIECE) {
        while (tms_host_piece_at(buffer->block, at)->state < TMS_PIECE_TOUCHED)
            pthread_cond_wait(&f->store.changed, &f->store.lock);
    }
    pthread_mutex_unlock(&f->store.lock);
}

/* The thread that prefaults the first piece is the last to say so. */
static void hold_the_first(int count) {
    while (count == 1 && calls_made(CALL_MINCORE) < 6) sched_yield();
}

/* In order, and of its device only. */
static void who_has_time_page_locks_what_is_next(void **state) {
    host_fixture_t *f = *state;
    struct tms_host_batch *batch = create(f);
    tms_host_buffer_t *buffers[] = {add(batch, 2 * MIB, 0, NULL), add(batch, 2 * MIB, 1, NULL),
                                    add(batch, 2 * MIB, 0, NULL)};
    const tms_host_buffer_t *expected[] = {buffers[0], buffers[0], buffers[2], buffers[2], buffers[1], buffers[1]};
    tms_error_t error;
    assert_false(tms_host_batch_help(batch, 0)); /* it has not begun */
    on_touch(hold_the_first);
    ASSERT_OK(tms_host_batch_start(batch, &CONTEXT, &error), error);
    for (int i = 0; i < 3; i++) await_prefaulted(f, buffers[i]);
    for (int i = 0; i < 6; i++) {
        assert_true(tms_host_batch_help(batch, i < 4 ? 0 : 1));
        assert_int_equal(registrations().count, i + 1);
        assert_ptr_equal(registrations().addresses[i], (char *)expected[i]->memory + (uint64_t)(i % 2) * PIECE);
    }
    for (int device = 0; device < 2; device++) assert_false(tms_host_batch_help(batch, device));
    for (int i = 0; i < 3; i++) await_all(buffers[i]);
    assert_int_equal(registrations().count, 6);
    tms_host_batch_destroy(batch);
    drop_all(buffers, 3);
    assert_empty(f);
}

static void groups_kinds_and_devices_do_not_share_blocks(void **state) {
    host_fixture_t *f = *state;
    const char group = 0, other = 0;
    struct tms_host_batch *batch = create(f);
    tms_host_buffer_t *buffers[] = {add(batch, 2 * MIB, 0, &group), add(batch, 2 * MIB, 0, &other),
                                    add(batch, 2 * MIB, 1, &group), add(batch, 2 * MIB, 0, &group)};
    tms_error_t error;
    ASSERT_OK(tms_host_batch_start(batch, &CONTEXT, &error), error);
    for (int i = 0; i < 4; i++) await_all(buffers[i]);
    assert_ptr_equal(buffers[0]->block, buffers[3]->block);
    assert_ptr_not_equal(buffers[0]->block, buffers[1]->block);
    assert_ptr_not_equal(buffers[0]->block, buffers[2]->block);
    assert_ptr_not_equal(buffers[1]->block, buffers[2]->block);
    assert_ptr_equal(buffers[3]->memory, (char *)buffers[0]->memory + 2 * MIB);
    tms_host_batch_destroy(batch);
    drop_all(buffers, 4);
    assert_empty(f);
}

/* ---- what is refused ---- */

static void memory_that_cannot_be_page_locked_serves_all_the_same(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 8 * PIECE;
    char text[TEXT_BYTES];
    tms_host_buffer_t *buffer;
    captured_stderr_t captured = capture_begin();
    CALL(fail_after, "cuMemHostRegister", 2, 6, CUDA_ERROR_OUT_OF_MEMORY);
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &buffer);
    await_all(buffer);
    tms_host_batch_destroy(batch);
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "cuMemHostRegister"));
    assert_non_null(strstr(text, "ulimit -l"));
    assert_int_equal(locked_bytes(), 2 * PIECE);
    memset(buffer->memory, 7, bytes);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
    assert_int_equal(CALL(calls, "cuMemHostUnregister"), 2);
}

/* No context of the device can be had either. */
static void a_device_that_cannot_be_entered_leaves_ordinary_memory(void **state) {
    host_fixture_t *f = *state;
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    CALL(fail_after, "cuDevicePrimaryCtxRetain", 0, 2, CUDA_ERROR_UNKNOWN);
    tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 2 * PIECE, TMS_HOST_RELEASE);
    assert_int_equal(locked_bytes(), 0);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

static void a_driver_that_has_gone_fails_the_batch(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 4 * PIECE;
    tms_host_buffer_t *buffer;
    tms_error_t error;
    uint64_t part = 0;
    CALL(fail_after, "cuMemHostRegister", 1, 1, CUDA_ERROR_DEINITIALIZED);
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &buffer);
    ASSERT_OK(tms_host_buffer_await(buffer, 0, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(tms_host_buffer_await(buffer, 2 * PIECE, NULL, &part, &CONTEXT, &error), TMS_DRIVER_UNAVAILABLE);
    assert_string_equal(error.call, "cuMemHostRegister");
    ASSERT_OK(tms_host_buffer_await(buffer, 0, NULL, &part, &CONTEXT, &error), error);
    tms_host_batch_destroy(batch);
    assert_int_equal(tms_host_buffer_await(buffer, 2 * PIECE, NULL, &part, &CONTEXT, &error), TMS_DRIVER_UNAVAILABLE);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

static void a_mapping_that_fails_leaves_nothing(void **state) {
    host_fixture_t *f = *state;
    const char groups[2] = {0};
    for (int succeed = 0; succeed < 2; succeed++) {
        struct tms_host_batch *batch = create(f);
        tms_host_buffer_t *buffers[] = {add(batch, 2 * MIB, 0, &groups[0]), add(batch, 2 * MIB, 0, &groups[1])};
        tms_error_t error;
        fail_call(CALL_MMAP, succeed, 1);
        assert_int_equal(tms_host_batch_start(batch, &CONTEXT, &error), TMS_OUT_OF_HOST_MEMORY);
        assert_string_equal(error.call, "mmap");
        assert_string_equal(error.tag, "weights");
        tms_host_batch_destroy(batch);
        drop_all(buffers, 2);
        assert_empty(f);
        assert_int_equal(CALL(calls, "cuMemHostRegister"), 0);
    }
}

static void absurd_sizes_are_refused_at_once(void **state) {
    host_fixture_t *f = *state;
    const uint64_t sizes[] = {UINT64_MAX, (uint64_t)1 << 62, ((uint64_t)1 << 47) + 1};
    struct tms_host_batch *batch = create(f);
    tms_host_buffer_t *buffer = NULL;
    tms_error_t error;
    for (size_t i = 0; i < 3; i++) {
        const tms_host_request_t request = {.bytes = sizes[i], .device = 0, .kind = TMS_BACKUP_PINNED};
        assert_int_equal(tms_host_batch_add(batch, &request, &buffer, &CONTEXT, &error), TMS_OUT_OF_HOST_MEMORY);
        assert_null(buffer);
    }
    tms_host_batch_destroy(batch);
    assert_empty(f);
}

static void without_an_answer_of_mincore_every_page_is_touched(void **state) {
    host_fixture_t *f = *state;
    unsigned char resident[4 * PIECE / 4096];
    fail_call(CALL_MINCORE, 0, 100);
    tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 4 * PIECE, TMS_HOST_RELEASE);
    assert_int_equal(calls_made(CALL_MINCORE), 4);
    assert_int_equal(REAL(mincore)(buffer->memory, 4 * PIECE, resident), 0);
    for (size_t i = 0; i < sizeof resident; i++) assert_int_equal(resident[i] & 1, 1);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

/* Huge pages or not, and also in a block too small for one. */
static void every_page_is_resident_before_it_is_page_locked(void **state) {
    host_fixture_t *f = *state;
    const uint64_t sizes[] = {4 * PIECE, 20000};
    unsigned char resident[4 * PIECE / 4096];
    CALL(fail_after, "cuMemHostRegister", 0, 100, CUDA_ERROR_OUT_OF_MEMORY); /* which would find the pages itself */
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    for (size_t i = 0; i < 2; i++) {
        tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, sizes[i], TMS_HOST_RELEASE);
        size_t pages = (sizes[i] + 4095) / 4096;
        assert_int_equal(REAL(mincore)(buffer->memory, pages * 4096, resident), 0);
        for (size_t page = 0; page < pages; page++) assert_int_equal(resident[page] & 1, 1);
        tms_host_buffer_drop(buffer);
        assert_empty(f);
    }
}

/* ---- threads ---- */

/* All of them are refused, only the first, or all but the first. */
static void without_threads_whoever_waits_does_the_work(void **state) {
    host_fixture_t *f = *state;
    const struct {
        int succeed, fail, lines;
    } cases[] = {{0, 1000, 1}, {0, 1, 1}, {1, 1000, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint64_t bytes[] = {3 * PIECE, 5 * PIECE};
        char text[TEXT_BYTES];
        tms_host_buffer_t *buffers[2];
        captured_stderr_t captured = capture_begin();
        atomic_store(&f->store.said_no_threads, false);
        fail_call(CALL_THREAD, cases[i].succeed, cases[i].fail);
        struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_RELEASE, buffers);
        await_all(buffers[1]);
        await_all(buffers[0]);
        assert_int_equal(locked_bytes(), 8 * PIECE);
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

static void whoever_waits_can_be_interrupted(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 4 * PIECE;
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

static void a_batch_that_is_destroyed_early_is_waited_for_no_more(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 32 * PIECE;
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
    tms_host_buffer_t *buffer = add(batch, PIECE, 0, NULL);
    tms_error_t error;
    uint64_t part = 0;
    assert_null(buffer->memory);
    assert_int_equal(tms_host_buffer_await(buffer, 0, NULL, &part, &CONTEXT, &error), TMS_INVALID_STATE);
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(buffer);
    tms_host_batch_destroy(NULL);
    assert_empty(f);
}

/* The store's calls have nothing to do with a capture that is under way on another thread. */
static void a_stream_capture_is_not_broken(void **state) {
    host_fixture_t *f = *state;
    CUstream stream = NULL;
    CUgraph graph = NULL;
    CUcontext context = NULL;
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRetain, &context, 0));
    ASSERT_CUDA(CALL(cuCtxPushCurrent_v2, context));
    ASSERT_CUDA(CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    ASSERT_CUDA(CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 4 * PIECE, TMS_HOST_RELEASE);
    assert_int_equal(locked_bytes(), 4 * PIECE);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
    fail_call(CALL_THREAD, 0, 1000); /* and on the thread that captures */
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    buffer = make_buffer(f, TMS_BACKUP_PINNED, 4 * PIECE, TMS_HOST_RELEASE);
    assert_int_equal(locked_bytes(), 4 * PIECE);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
    fail_call(CALL_THREAD, 0, 0);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    ASSERT_CUDA(CALL(cuThreadExchangeStreamCaptureMode, &mode));
    assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_GLOBAL); /* as it was */
    ASSERT_CUDA(CALL(cuStreamEndCapture, stream, &graph));
    assert_non_null(graph);
    ASSERT_CUDA(CALL(cuGraphDestroy, graph));
    ASSERT_CUDA(CALL(cuStreamDestroy_v2, stream));
    ASSERT_CUDA(CALL(cuCtxPopCurrent_v2, &context));
    ASSERT_CUDA(CALL(cuDevicePrimaryCtxRelease_v2, 0));
}

/* ---- headroom ---- */

static void a_batch_that_does_not_fit_is_refused_before_anything_is_touched(void **state) {
    host_fixture_t *f = *state;
    struct tms_host_batch *batch = create(f);
    tms_host_buffer_t *buffers[] = {add(batch, 3 * PIECE, 0, NULL), add(batch, 3 * PIECE, 0, NULL)};
    tms_error_t error;
    f->store.limits.cap_bytes = 6 * PIECE - 1;
    assert_int_equal(tms_host_batch_start(batch, &CONTEXT, &error), TMS_OUT_OF_HOST_MEMORY);
    assert_int_equal(error.bytes, 6 * PIECE);
    assert_non_null(strstr(error.message, "TMS_HOST_MEMORY_LIMIT_MB"));
    assert_int_equal(calls_made(CALL_MMAP), 0);
    assert_int_equal(CALL(calls, "*"), 0); /* nothing of the GPU either */
    tms_host_batch_destroy(batch);
    drop_all(buffers, 2);
    assert_empty(f);
}

/* What is in flight counts once: a cap that is just large enough is. */
static void a_batch_that_fits_exactly_fits(void **state) {
    host_fixture_t *f = *state;
    f->store.limits.cap_bytes = 32 * PIECE;
    for (int i = 0; i < 8; i++) {
        tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 32 * PIECE, TMS_HOST_RELEASE);
        assert_int_equal(atomic_load(&f->store.resident_bytes), 32 * PIECE);
        tms_host_buffer_drop(buffer);
        assert_empty(f);
    }
}

static struct {
    char root[TEMPORARY_BYTES];
    int at; /* touches, after which nothing is available any more */
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

/* Nobody touches more before it is so. */
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

/* Memory runs short while a batch is under way: pieces that were touched before can be used, the others never. */
static void memory_that_runs_short_midway_fails_the_batch(void **state) {
    host_fixture_t *f = *state;
    const int threads[] = {1, 3, 15};
    for (size_t i = 0; i < 3; i++) {
        const uint64_t bytes[] = {20 * PIECE, 12 * PIECE};
        tms_host_buffer_t *buffers[2];
        tms_error_t error;
        uint64_t part = 0;
        use_fake_system(f);
        fake.at = calls_made(CALL_MINCORE) + 4;
        atomic_store(&fake.exhausted, false);
        f->store.touching_threads = threads[i];
        on_touch(exhaust);
        struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_RELEASE, buffers);
        assert_int_equal(tms_host_buffer_await(buffers[1], 11 * PIECE, NULL, &part, &CONTEXT, &error),
                         TMS_OUT_OF_HOST_MEMORY);
        assert_non_null(strstr(error.message, "MemAvailable"));
        /* Those before, those that each thread was at, and those that were allowed ahead. */
        assert_true(atomic_load(&f->store.resident_bytes) <= (uint64_t)(4 + threads[i] + 3) * PIECE);
        if (threads[i] == 1) assert_int_equal(calls_made(CALL_MINCORE), fake.at + 1);
        on_touch(NULL);
        tms_host_batch_destroy(batch);
        assert_int_equal(f->store.planned_bytes + f->store.in_flight_bytes, 0);
        drop_all(buffers, 2);
        assert_empty(f);
        put("meminfo", "MemAvailable: 99999999 kB\n"); /* the next finds memory again */
        tms_host_buffer_drop(make_buffer(f, TMS_BACKUP_PINNED, 4 * PIECE, TMS_HOST_RELEASE));
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
    tms_host_batch_destroy(in_child.batch); /* joins nobody */
    tms_host_buffer_drop(in_child.buffer);
    tms_host_store_release_now(&f->store);
    tms_host_store_settle(&f->store);
    bool empty = atomic_load(&f->store.buffer_bytes) == 0 && atomic_load(&f->store.resident_bytes) == 0 && !f->store.blocks;
    end_child(empty && f->store.threads == 0 ? 0 : 3);
}

static void a_child_that_is_forked_meanwhile_forgets_the_batch(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 16 * PIECE;
    atomic_store(&touching_is_held, true);
    on_touch(hold_touching);
    in_child.f = f;
    in_child.batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &in_child.buffer);
    await_touched(1);
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

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_host, teardown_host)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(buffers_lie_back_to_back_and_end_at_pieces),
        TEST(pieces_are_page_locked_once_each_and_in_order),
        TEST(contents_come_back),
        TEST(whoever_waits_page_locks),
        TEST(who_has_time_page_locks_what_is_next),
        TEST(groups_kinds_and_devices_do_not_share_blocks),
        TEST(memory_that_cannot_be_page_locked_serves_all_the_same),
        TEST(a_device_that_cannot_be_entered_leaves_ordinary_memory),
        TEST(a_driver_that_has_gone_fails_the_batch),
        TEST(a_mapping_that_fails_leaves_nothing),
        TEST(absurd_sizes_are_refused_at_once),
        TEST(without_an_answer_of_mincore_every_page_is_touched),
        TEST(every_page_is_resident_before_it_is_page_locked),
        TEST(without_threads_whoever_waits_does_the_work),
        TEST(whoever_waits_can_be_interrupted),
        TEST(a_batch_that_is_destroyed_early_is_waited_for_no_more),
        TEST(a_stream_capture_is_not_broken),
        TEST(a_batch_that_does_not_fit_is_refused_before_anything_is_touched),
        TEST(a_batch_that_fits_exactly_fits),
        TEST(memory_that_runs_short_midway_fails_the_batch),
        TEST(a_child_that_is_forked_meanwhile_forgets_the_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
