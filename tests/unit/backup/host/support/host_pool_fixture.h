/* Shared by the tests of the pool of the host store. */
#ifndef TMS_TESTS_HOST_POOL_FIXTURE_H
#define TMS_TESTS_HOST_POOL_FIXTURE_H

#include "host_fixture.h"

#include <errno.h>

#include "captured_stderr.h"
#include "descriptors.h"

static const tms_error_context_t CONTEXT = {.operation = "pause", .device = 0};

static tms_host_buffer_t *pinned(host_fixture_t *f, uint64_t bytes, tms_host_policy_t policy) {
    return make_buffer(f, TMS_BACKUP_PINNED, bytes, policy);
}

UNUSED static uint64_t resident(const host_fixture_t *f) {
    return atomic_load(&((host_fixture_t *)f)->store.resident_bytes);
}
static uint64_t pooled(const host_fixture_t *f) { return atomic_load(&((host_fixture_t *)f)->store.pooled_bytes); }

UNUSED static void reserve(host_fixture_t *f, int device, uint64_t bytes) {
    tms_error_t error;
    ASSERT_OK(tms_host_store_reserve(&f->store, device, bytes, &error), error);
}

/* Waits until the memory being reserved is in the pool. */
UNUSED static void await_reserved(host_fixture_t *f) {
    pthread_mutex_lock(&f->store.lock);
    while (f->store.threads > 0) pthread_cond_wait(&f->store.changed, &f->store.lock);
    pthread_mutex_unlock(&f->store.lock);
}

/* ---- reservations ---- */

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_host, teardown_host)

#endif
