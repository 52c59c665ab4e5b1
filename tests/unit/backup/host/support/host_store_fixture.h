/* Shared by the tests of the host store. */
#ifndef TMS_TESTS_HOST_STORE_FIXTURE_H
#define TMS_TESTS_HOST_STORE_FIXTURE_H

#include "host_fixture.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "captured_stderr.h"
#include "descriptors.h"
#include "own_process.h"

enum { TEXT_BYTES = 8192, GATE = 1 };

static const tms_error_context_t CONTEXT = {.operation = "pause", .device = 0};

static tms_host_buffer_t *pinned(host_fixture_t *f, uint64_t bytes, tms_host_policy_t policy) {
    return make_buffer(f, TMS_BACKUP_PINNED, bytes, policy);
}

static uint64_t resident(const host_fixture_t *f) { return atomic_load(&((host_fixture_t *)f)->store.resident_bytes); }
static uint64_t quarantined(const host_fixture_t *f) { return tms_quarantine_held(&f->quarantine, TMS_QUARANTINE_HOST); }

/* ---- many threads ---- */

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_host, teardown_host)

#endif
