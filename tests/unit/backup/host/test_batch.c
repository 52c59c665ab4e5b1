/* Guards batches of the host store: their contents, and refused ones. Memory becomes usable in order, and failures leave
 * nothing. */
#include "support/host_batch_fixture.h"

/* ---- contents of a batch ---- */

static void buffers_lie_back_to_back_and_end_at_chunks(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {5 * CHUNK / 2, 5000, 3 * CHUNK};
    tms_host_buffer_t *buffers[3];
    tms_error_t error;
    uint64_t part = 0;
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 3, TMS_HOST_RELEASE, buffers);
    for (int i = 0; i < 3; i++) await_all(buffers[i]);
    char *first = buffers[0]->memory;
    assert_int_equal((uintptr_t)first % (2 * MIB), 0);
    assert_ptr_equal(buffers[1]->memory, first + 5 * CHUNK / 2);
    assert_ptr_equal(buffers[2]->memory, first + 5 * CHUNK / 2 + 8192);
    assert_int_equal(atomic_load(&f->store.buffer_bytes), 5 * CHUNK / 2 + 5000 + 3 * CHUNK);
    assert_int_equal(atomic_load(&f->store.resident_bytes), 6 * CHUNK);
    /* A copy ends with its chunk, or with its buffer. */
    ASSERT_OK(tms_host_buffer_await(buffers[0], 0, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, CHUNK);
    ASSERT_OK(tms_host_buffer_await(buffers[0], CHUNK + 100, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, CHUNK - 100);
    ASSERT_OK(tms_host_buffer_await(buffers[0], 2 * CHUNK, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, CHUNK / 2);
    ASSERT_OK(tms_host_buffer_await(buffers[1], 4999, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, 1);
    ASSERT_OK(tms_host_buffer_await(buffers[2], 0, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(part, CHUNK / 2 - 8192);
    tms_host_batch_destroy(batch);
    drop_all(buffers, 3);
    assert_empty(f);
}

static void chunks_are_pinned_once_each_and_in_order(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes[] = {7 * CHUNK, 9 * CHUNK};
    tms_host_buffer_t *buffers[2];
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, bytes, 2, TMS_HOST_RELEASE, buffers);
    await_all(buffers[0]);
    await_all(buffers[1]);
    registrations_t seen = registrations();
    assert_int_equal(seen.count, 16);
    for (int i = 0; i < 16; i++) {
        assert_ptr_equal(seen.addresses[i], (char *)buffers[0]->memory + (uint64_t)i * CHUNK);
        assert_int_equal(seen.bytes[i], CHUNK);
    }
    assert_int_equal(pinned_bytes(), 16 * CHUNK);
    tms_host_batch_destroy(batch);
    drop_all(buffers, 2);
    assert_empty(f);
    assert_int_equal(registrations().unregistered, 16);
}

static uint8_t pattern(uint64_t position) { return (uint8_t)((position * 2654435761u) >> 13); }

/* Both directions, each copy as long as await allows. */
static void contents_come_back(void **state) {
    host_fixture_t *f = *state;
    const uint64_t size = 6 * MIB, at = 3 * CHUNK / 2;
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

/* Without the waiter everything is prefaulted, and only awaited chunks are pinned. */
static void a_waiter_pins(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 8 * CHUNK;
    tms_host_buffer_t *buffer;
    tms_error_t error;
    uint64_t part = 0;
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &buffer);
    await_prefaulted_parts(8);
    assert_int_equal(registrations().count, 0);
    for (int i = 0; i < 2; i++) {
        ASSERT_OK(tms_host_buffer_await(buffer, 5 * CHUNK + 7, NULL, &part, &CONTEXT, &error), error);
        assert_int_equal(registrations().count, 1);
        assert_ptr_equal(registrations().addresses[0], (char *)buffer->memory + 5 * CHUNK);
    }
    await_all(buffer);
    assert_int_equal(registrations().count, 8);
    tms_host_batch_destroy(batch);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

/* Waits until every chunk of the buffer is prefaulted. That is shortly after the last mincore: the thread still has to
 * report it. */
static void await_prefaulted(host_fixture_t *f, const tms_host_buffer_t *buffer) {
    pthread_mutex_lock(&f->store.lock);
    for (uint64_t at = buffer->offset; at < buffer->offset + buffer->bytes; at += CHUNK) {
        while (tms_host_chunk_at(buffer->block, at)->state < TMS_HOST_CHUNK_PREFAULTED)
            pthread_cond_wait(&f->store.changed, &f->store.lock);
    }
    pthread_mutex_unlock(&f->store.lock);
}

/* The thread that prefaults the first chunk is the last to report. */
static void hold_the_first(int count) {
    while (count == 1 && calls_made(CALL_MINCORE) < 6) sched_yield();
}

/* In order, and only chunks of its device. */
static void an_idle_thread_pins_the_next_chunk(void **state) {
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
        assert_ptr_equal(registrations().addresses[i], (char *)expected[i]->memory + (uint64_t)(i % 2) * CHUNK);
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

/* ---- failures ---- */

static void memory_that_cannot_be_pinned_is_used_unpinned(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 8 * CHUNK;
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
    assert_int_equal(pinned_bytes(), 2 * CHUNK);
    memset(buffer->memory, 7, bytes);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
    assert_int_equal(CALL(calls, "cuMemHostUnregister"), 2);
}

/* Nor is another context of the device available. */
static void a_device_that_cannot_be_entered_leaves_memory_unpinned(void **state) {
    host_fixture_t *f = *state;
    atomic_store(&f->log.level, TMS_LOG_SILENT);
    CALL(fail_after, "cuDevicePrimaryCtxRetain", 0, 2, CUDA_ERROR_UNKNOWN);
    tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 2 * CHUNK, TMS_HOST_RELEASE);
    assert_int_equal(pinned_bytes(), 0);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

static void a_deinitialized_driver_fails_the_batch(void **state) {
    host_fixture_t *f = *state;
    const uint64_t bytes = 4 * CHUNK;
    tms_host_buffer_t *buffer;
    tms_error_t error;
    uint64_t part = 0;
    CALL(fail_after, "cuMemHostRegister", 1, 1, CUDA_ERROR_DEINITIALIZED);
    struct tms_host_batch *batch = start_batch(f, TMS_BACKUP_PINNED, &bytes, 1, TMS_HOST_RELEASE, &buffer);
    ASSERT_OK(tms_host_buffer_await(buffer, 0, NULL, &part, &CONTEXT, &error), error);
    assert_int_equal(tms_host_buffer_await(buffer, 2 * CHUNK, NULL, &part, &CONTEXT, &error), TMS_DRIVER_UNAVAILABLE);
    assert_string_equal(error.call, "cuMemHostRegister");
    ASSERT_OK(tms_host_buffer_await(buffer, 0, NULL, &part, &CONTEXT, &error), error);
    tms_host_batch_destroy(batch);
    assert_int_equal(tms_host_buffer_await(buffer, 2 * CHUNK, NULL, &part, &CONTEXT, &error), TMS_DRIVER_UNAVAILABLE);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

static void a_failed_mapping_leaves_nothing(void **state) {
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

static void without_mincore_every_page_is_prefaulted(void **state) {
    host_fixture_t *f = *state;
    unsigned char resident[4 * CHUNK / 4096];
    fail_call(CALL_MINCORE, 0, 100);
    tms_host_buffer_t *buffer = make_buffer(f, TMS_BACKUP_PINNED, 4 * CHUNK, TMS_HOST_RELEASE);
    assert_int_equal(calls_made(CALL_MINCORE), 4);
    assert_int_equal(REAL(mincore)(buffer->memory, 4 * CHUNK, resident), 0);
    for (size_t i = 0; i < sizeof resident; i++) assert_int_equal(resident[i] & 1, 1);
    tms_host_buffer_drop(buffer);
    assert_empty(f);
}

/* With and without huge pages, and also in a block too small for one. */
static void every_page_is_resident_before_it_is_pinned(void **state) {
    host_fixture_t *f = *state;
    const uint64_t sizes[] = {4 * CHUNK, 20000};
    unsigned char resident[4 * CHUNK / 4096];
    CALL(fail_after, "cuMemHostRegister", 0, 100, CUDA_ERROR_OUT_OF_MEMORY); /* which would fault the pages in itself */
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

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(buffers_lie_back_to_back_and_end_at_chunks),
        TEST(chunks_are_pinned_once_each_and_in_order),
        TEST(contents_come_back),
        TEST(a_waiter_pins),
        TEST(an_idle_thread_pins_the_next_chunk),
        TEST(groups_kinds_and_devices_do_not_share_blocks),
        TEST(memory_that_cannot_be_pinned_is_used_unpinned),
        TEST(a_device_that_cannot_be_entered_leaves_memory_unpinned),
        TEST(a_deinitialized_driver_fails_the_batch),
        TEST(a_failed_mapping_leaves_nothing),
        TEST(absurd_sizes_are_refused_at_once),
        TEST(without_mincore_every_page_is_prefaulted),
        TEST(every_page_is_resident_before_it_is_pinned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
