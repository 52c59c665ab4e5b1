/* Shared by the tests of guard mode. */
#ifndef TMS_TESTS_GUARD_FIXTURE_H
#define TMS_TESTS_GUARD_FIXTURE_H

#include "support.h"

#include <string.h>

enum { PAGE = TMS_SIM_GRANULARITY, TRACE_BYTES = 1 << 16 };

static inline void turn_guard_on(fixture_t *f) { atomic_store(&f->saver.guard.on, true); }
static inline void turn_guard_off(fixture_t *f) { atomic_store(&f->saver.guard.on, false); }

static tms_counters_t counters_of(fixture_t *f) {
    tms_counters_t counters;
    tms_inspect_counters(&f->saver, &counters);
    return counters;
}

static inline void assert_bytes(uint64_t address, uint64_t bytes, uint8_t expected) {
    const uint8_t *memory = (const uint8_t *)address;
    for (uint64_t i = 0; i < bytes; i++) {
        if (memory[i] != expected) fail_msg("byte %llu is 0x%02x, not 0x%02x", (unsigned long long)i, memory[i], expected);
    }
}

static inline void assert_guard_bytes(uint64_t address, uint64_t bytes) { assert_bytes(address, bytes, TMS_GUARD_BYTE); }

static int setup_guarded_device(void **state) {
    int status = setup_one_device(state);
    turn_guard_on(*state);
    return status;
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_guarded_device, teardown)

#endif
