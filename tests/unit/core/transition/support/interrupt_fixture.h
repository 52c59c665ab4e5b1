/* Shared by the tests of cancellable calls. */
#ifndef TMS_TESTS_INTERRUPT_FIXTURE_H
#define TMS_TESTS_INTERRUPT_FIXTURE_H

#include "support.h"

#include <math.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "copies.h"
#include "own_process.h"

enum { GATE = 1 };

/* What `interrupted` does when it is called, and what it returns. */
typedef struct asker {
    fixture_t *fixture;
    const char *after; /* does nothing before this call of the driver was made; NULL: at once */
    int asked;         /* how often since then */
    bool stop;
    int gate;         /* to open, or 0 */
    uint64_t address; /* to free, or 0 */
    bool nested;      /* calls pause and resume */
    tms_status_t results[2];
    tms_error_t error;
} asker_t;

/* Counts a call of `interrupted`. False: it is to do nothing yet. */
static bool begins(asker_t *asker) {
    if (asker->after && simulator()->calls(asker->after) == 0) return false;
    asker->asked++;
    return true;
}

static int32_t ask(void *context) {
    asker_t *asker = context;
    if (!begins(asker)) return false;
    if (asker->nested) {
        assert_true(tms_turn_is_inside());
        asker->results[0] = pause_all(asker->fixture, &asker->error);
        asker->results[1] = resume_all(asker->fixture, &asker->error);
    }
    if (asker->address && asker->asked == 1)
        asker->results[0] = tms_free_address(&asker->fixture->saver, asker->address, NULL);
    if (asker->gate) simulator()->open_gate(asker->gate);
    return asker->stop;
}

static tms_selection_t asking(asker_t *asker) { return (tms_selection_t){.interrupted = ask, .interrupt_context = asker}; }

/* The next call releases what a cancelled call has left until the device is idle. */
static void assert_nothing_held(fixture_t *f) {
    tms_sim_usage_t usage;
    tms_reclaim_all(&f->saver);
    settle_host_memory(&f->saver);
    tms_host_store_settle(&f->saver.stores.host);
    simulator()->usage(0, &usage);
    assert_int_equal(usage.host_bytes, 0);
    assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes), 0);
    assert_int_equal(atomic_load(&f->saver.stores.disk.total), 0);
}

/* ---- while it copies ---- */

enum { COPIED = 8 };

/* ---- while it waits for memory ---- */

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

#endif
