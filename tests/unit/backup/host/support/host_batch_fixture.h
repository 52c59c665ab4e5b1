/* Shared by the tests of batches of the host store. */
#ifndef TMS_TESTS_HOST_BATCH_FIXTURE_H
#define TMS_TESTS_HOST_BATCH_FIXTURE_H

#include "host_fixture.h"

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "backup/host/block.h"
#include "captured_stderr.h"
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

/* ---- contents of a batch ---- */

static void await_prefaulted_parts(int parts) {
    while (calls_made(CALL_MINCORE) < parts) sched_yield();
}

/* ---- fork ---- */

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_host, teardown_host)

#endif
