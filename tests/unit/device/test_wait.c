/* Guards waits and their cancellation callback. A test that needs time to pass moves the clock of the wait. */

#include "support.h"

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>

#define LONG_SECONDS 1e6

static const tms_error_context_t CONTEXT = {.operation = "pause", .device = TMS_NO_DEVICE};

/* ---- threads: counted, and refused on request ---- */

static _Atomic int threads_started;
static _Atomic bool refuse_threads;

typedef int (*create_t)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

__attribute__((visibility("default"))) int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                                                          void *(*start)(void *), void *argument) {
    create_t next;
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
    if (atomic_load(&refuse_threads)) return EAGAIN;
    atomic_fetch_add(&threads_started, 1);
    return next(thread, attributes, start, argument);
}

/* ---- the callback ---- */

typedef struct asker {
    int asked;
    int stop_at; /* the call that returns "cancel"; 0: none */
    int gate;    /* opened at the first call, if not 0 */
    pthread_t thread;
} asker_t;

static int32_t ask(void *context) {
    asker_t *asker = context;
    asker->asked++;
    asker->thread = pthread_self();
    if (asker->gate) simulator()->open_gate(asker->gate);
    return asker->stop_at && asker->asked >= asker->stop_at;
}

static void make_due(tms_wait_t *wait) { wait->polled -= 2 * TMS_WAIT_POLL_SECONDS; }

/* ---- the clock ---- */

static void a_deadline_is_now_or_later_or_never(void **state) {
    (void)state;
    tms_wait_t wait;
    tms_wait_begin(&wait, NULL, NULL, 0);
    assert_true(tms_wait_remaining(&wait) == 0);
    tms_wait_begin(&wait, NULL, NULL, -1);
    assert_true(tms_wait_remaining(&wait) == 0);
    tms_wait_begin(&wait, NULL, NULL, LONG_SECONDS);
    assert_true(tms_wait_remaining(&wait) > 0 && tms_wait_remaining(&wait) <= LONG_SECONDS);
    tms_wait_begin(&wait, NULL, NULL, INFINITY);
    assert_true(isinf(tms_wait_remaining(&wait)));
    assert_true(tms_wait_elapsed(&wait) >= 0);
    assert_true(isinf(tms_wait_remaining(NULL)));
}

/* ---- calls of the callback ---- */

static void the_callback_is_called_once_an_interval(void **state) {
    (void)state;
    asker_t asker = {0};
    tms_wait_t wait;
    tms_wait_begin(&wait, ask, &asker, 0);
    wait.polled = tms_wait_now() + LONG_SECONDS; /* as if it had just been called, however slow this machine is */
    assert_false(tms_wait_interrupted(&wait));
    assert_int_equal(asker.asked, 0);
    for (int i = 1; i <= 3; i++) {
        wait.polled = tms_wait_now();
        make_due(&wait);
        assert_false(tms_wait_interrupted(&wait));
        assert_int_equal(asker.asked, i);
    }
}

static void the_callback_is_not_called_after_it_has_cancelled(void **state) {
    (void)state;
    tms_error_t error;
    asker_t asker = {.stop_at = 1};
    tms_wait_t wait;
    tms_wait_begin(&wait, ask, &asker, 0);
    make_due(&wait);
    for (int i = 0; i < 3; i++) {
        make_due(&wait);
        assert_int_equal(tms_wait_check(&wait, &CONTEXT, &error), TMS_INTERRUPTED);
    }
    assert_int_equal(asker.asked, 1);
    assert_string_equal(error.message, "pause: the call was interrupted; nothing has changed.");
}

static void a_wait_without_a_callback_is_allowed(void **state) {
    (void)state;
    tms_wait_t wait;
    tms_wait_begin(&wait, NULL, NULL, 0);
    make_due(&wait);
    assert_false(tms_wait_is_interruptible(&wait));
    assert_false(tms_wait_is_interruptible(NULL));
    assert_int_equal(tms_wait_check(&wait, &CONTEXT, NULL), TMS_OK);
    assert_int_equal(tms_wait_check(NULL, &CONTEXT, NULL), TMS_OK);
}

static void a_call_in_a_child_forked_by_a_handler_is_cancelled(void **state) {
    (void)state;
    tms_error_t error;
    asker_t asker = {0};
    tms_wait_t wait;
    tms_wait_begin(&wait, ask, &asker, 0);
    make_due(&wait);
    wait.process++;
    assert_int_equal(tms_wait_check(&wait, &CONTEXT, &error), TMS_FORKED);
}

/* ---- sleeping ---- */

static void a_sleep_ends_at_the_deadline(void **state) {
    (void)state;
    tms_wait_t wait;
    tms_error_t error;
    tms_wait_begin(&wait, NULL, NULL, 0);
    ASSERT_OK(tms_wait_sleep(&wait, LONG_SECONDS, &CONTEXT, &error), error);
}

static void a_sleep_ends_when_cancelled(void **state) {
    (void)state;
    tms_error_t error;
    asker_t asker = {.stop_at = 2};
    tms_wait_t wait;
    tms_wait_begin(&wait, ask, &asker, INFINITY);
    assert_int_equal(tms_wait_sleep(&wait, LONG_SECONDS, &CONTEXT, &error), TMS_INTERRUPTED);
    assert_int_equal(asker.asked, 2);
    assert_true(pthread_equal(asker.thread, pthread_self()));
}

/* ---- the devices ---- */

static tms_status_t wait_for_device_0(fixture_t *f, tms_wait_t *wait, tms_error_t *error) {
    return tms_wait_for_devices(wait, &f->devices, 1, NULL, &f->log, &CONTEXT, error);
}

static void without_a_callback_there_is_no_thread(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_wait_t wait;
    int before = atomic_load(&threads_started);
    tms_wait_begin(&wait, NULL, NULL, 0);
    ASSERT_OK(wait_for_device_0(f, &wait, &error), error);
    ASSERT_OK(wait_for_device_0(f, NULL, &error), error);
    assert_int_equal(atomic_load(&threads_started), before);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
}

static void the_device_wait_continues_while_the_callback_runs(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.gate = 1};
    tms_wait_t wait;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, 1, address);
    int before = atomic_load(&threads_started);
    tms_wait_begin(&wait, ask, &asker, 0);
    ASSERT_OK(wait_for_device_0(f, &wait, &error), error); /* the callback opens the gate */
    assert_int_equal(atomic_load(&threads_started), before + 1);
    assert_true(asker.asked >= 1);
    assert_true(pthread_equal(asker.thread, pthread_self()));
    assert_int_equal(*(uint8_t *)address, (uint8_t)(TMS_SIM_POISON + 1)); /* and the work is done */
    destroy_stream(f, stream);
}

static void a_cancelled_device_wait_is_left(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.stop_at = 1};
    tms_wait_t wait;
    CUstream stream = launch_behind_gate(f, 1, allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB));
    tms_wait_begin(&wait, ask, &asker, 0);
    assert_int_equal(wait_for_device_0(f, &wait, &error), TMS_INTERRUPTED);
    assert_int_equal(error.status, TMS_INTERRUPTED);
    simulator()->open_gate(1);
    asker = (asker_t){0};
    tms_wait_begin(&wait, ask, &asker, 0);
    ASSERT_OK(wait_for_device_0(f, &wait, &error), error);
    destroy_stream(f, stream);
}

static void a_failure_on_the_helper_is_reported(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {0};
    tms_wait_t wait;
    tms_wait_begin(&wait, ask, &asker, 0);
    simulator()->fail_after("cuCtxSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(wait_for_device_0(f, &wait, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuCtxSynchronize");
    assert_string_equal(error.operation, "pause");
}

static void without_a_helper_the_caller_waits(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.stop_at = 1};
    tms_wait_t wait;
    tms_wait_begin(&wait, ask, &asker, 0);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    atomic_store(&refuse_threads, true);
    tms_status_t status = wait_for_device_0(f, &wait, &error);
    atomic_store(&refuse_threads, false);
    ASSERT_OK(status, error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 1);
    assert_int_equal(asker.asked, 0);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_deadline_is_now_or_later_or_never),
        cmocka_unit_test(the_callback_is_called_once_an_interval),
        cmocka_unit_test(the_callback_is_not_called_after_it_has_cancelled),
        cmocka_unit_test(a_wait_without_a_callback_is_allowed),
        cmocka_unit_test(a_call_in_a_child_forked_by_a_handler_is_cancelled),
        cmocka_unit_test(a_sleep_ends_at_the_deadline),
        cmocka_unit_test(a_sleep_ends_when_cancelled),
        ONE(without_a_callback_there_is_no_thread),
        ONE(the_device_wait_continues_while_the_callback_runs),
        ONE(a_cancelled_device_wait_is_left),
        ONE(a_failure_on_the_helper_is_reported),
        ONE(without_a_helper_the_caller_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
