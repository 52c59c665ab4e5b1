/* Shared by the tests of the options of one call. */
#ifndef TMS_TESTS_CHOICE_FIXTURE_H
#define TMS_TESTS_CHOICE_FIXTURE_H

#include "support.h"

#include <string.h>

static tms_counters_t counters_of(fixture_t *f) {
    tms_counters_t counters;
    tms_host_store_settle(&f->saver.stores.host);
    tms_inspect_counters(&f->saver, &counters);
    return counters;
}

/* ---- progress, and several devices ---- */

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

#endif
