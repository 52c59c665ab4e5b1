/* Guards programs with contexts of cuCtxCreate: which of their work a call waits for. */

#include "support.h"

#include <dlfcn.h>
#include <string.h>

#include "captured_stderr.h"
#include "device/synchronize.h"

enum { GATE = 5, TEXT_BYTES = 1 << 14 };

static const tms_error_context_t CONTEXT = {.operation = "test", .device = TMS_NO_DEVICE};

/* Functions of the driver that the library itself does not use. */
static CUcontext create_context(int device) {
    CUresult (*create)(CUcontext *, unsigned, CUdevice);
    CUcontext context = NULL;
    *(void **)&create = dlsym(RTLD_DEFAULT, "cuCtxCreate_v2");
    assert_non_null(create);
    assert_int_equal(create(&context, 0, device), CUDA_SUCCESS);
    return context;
}

static void destroy_context(CUcontext context) {
    CUresult (*destroy)(CUcontext);
    *(void **)&destroy = dlsym(RTLD_DEFAULT, "cuCtxDestroy_v2");
    assert_non_null(destroy);
    assert_int_equal(destroy(context), CUDA_SUCCESS);
}

typedef struct call {
    fixture_t *fixture;
    CUcontext current; /* on the thread of the call */
    uint64_t address;  /* 0: a pause; else the address to free */
    tms_selection_t selection;
    tms_status_t status;
} call_t;

static void *run(void *argument) {
    call_t *call = argument;
    tms_error_t error;
    assert_int_equal(call->fixture->cuda->cuCtxPushCurrent(call->current), CUDA_SUCCESS);
    call->status = call->address ? tms_free_address(&call->fixture->saver, call->address, &error)
                                 : pause_selected(call->fixture, &call->selection, &error);
    return NULL;
}

static int32_t never_stop(void *context) {
    (void)context;
    return 0;
}

/* The call unmaps one segment that a kernel of the context uses. The waits for both contexts were counted before, so a
 * library that waits for only one does not get here. */
static void assert_waits_for_a_kernel(call_t *call, uint64_t address) {
    pthread_t thread;
    CUcontext popped = NULL;
    fixture_t *f = call->fixture;
    assert_int_equal(simulator()->launch_add(NULL, address, 2 * MIB, 1, GATE), CUDA_SUCCESS);
    simulator()->clear_counts();
    assert_int_equal(pthread_create(&thread, NULL, run, call), 0);
    simulator()->wait_until_synchronizing();
    assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
    simulator()->open_gate(GATE);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(call->status, TMS_OK);
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    assert_int_equal(f->cuda->cuCtxSynchronize(), CUDA_SUCCESS); /* the kernel found its memory */
    assert_int_equal(f->cuda->cuCtxPopCurrent(&popped), CUDA_SUCCESS);
    destroy_context(popped);
}

/* ---- the current context ---- */

static void a_pause_waits_for_the_current_context(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    call_t call = {.fixture = f, .current = create_context(0)};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->clear_counts();
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
    ASSERT_OK(resume_all(f, &error), error);
    assert_waits_for_a_kernel(&call, address);
}

static void an_interruptible_pause_waits_for_its_threads_context(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    call_t call = {.fixture = f, .current = create_context(0), .selection = {.interrupted = never_stop}};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->clear_counts();
    ASSERT_OK(pause_selected(f, &call.selection, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
    ASSERT_OK(resume_all(f, &error), error);
    assert_waits_for_a_kernel(&call, address);
}

static void a_free_waits_for_the_current_context(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    call_t call = {.fixture = f, .current = create_context(0)};
    uint64_t idle = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    call.address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->clear_counts();
    ASSERT_OK(tms_free_address(&f->saver, idle, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
    assert_waits_for_a_kernel(&call, call.address);
}

static void its_device_may_have_no_primary_context(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_current_context_t current;
    CUcontext own = create_context(1);
    unsigned flags = 0;
    int active = -1;
    ASSERT_OK(tms_devices_current_context(&f->devices, &current, &CONTEXT, &error), error);
    simulator()->clear_counts();
    ASSERT_OK(tms_devices_synchronize(&f->devices, 3, &current, NULL, &CONTEXT, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
    assert_int_equal(f->cuda->cuDevicePrimaryCtxGetState(1, &flags, &active), CUDA_SUCCESS);
    assert_int_equal(active, 0);
    destroy_context(own);
}

/* ---- contexts that are not waited for ---- */

static void a_primary_context_is_waited_for_once(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &CONTEXT, &error), error);
    (void)allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->clear_counts();
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 1);
    tms_devices_leave(&f->devices, 0);
}

static void a_context_of_a_device_without_access_is_left_alone(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    CUcontext own = create_context(1);
    (void)allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->clear_counts();
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 1);
    destroy_context(own);
}

static void *destroy_elsewhere(void *context) {
    destroy_context(context);
    return NULL;
}

static void a_destroyed_context_runs_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    pthread_t thread;
    CUcontext popped = NULL;
    (void)allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(pthread_create(&thread, NULL, destroy_elsewhere, create_context(0)), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    simulator()->clear_counts();
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 1);
    assert_int_equal(f->cuda->cuCtxPopCurrent(&popped), CUDA_SUCCESS);
}

static void a_context_destroyed_meanwhile_runs_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_device_mask_t idle = 0;
    CUcontext own = create_context(0);
    tms_current_context_t current = {.context = own, .device = 0};
    destroy_context(own);
    ASSERT_OK(tms_devices_synchronize(&f->devices, 1, &current, &idle, &CONTEXT, &error), error);
    assert_int_equal(idle, 1);
}

/* ---- failures ---- */

static void a_failed_wait_for_a_context_fails_the_pause(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuCtxSynchronize", "cuCtxPushCurrent", "cuCtxGetDevice"};
    const uint64_t before[] = {1, 1, 0}; /* those for the primary context */
    CUcontext own = create_context(0);
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        tms_error_t error;
        CUcontext now = NULL;
        simulator()->clear_counts();
        simulator()->fail_after(calls[i], before[i], 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
        assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
        assert_int_equal(f->cuda->cuCtxGetCurrent(&now), CUDA_SUCCESS);
        assert_ptr_equal(now, own);
    }
    destroy_context(own);
}

static void a_lost_context_is_reported_as_a_lost_device(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_device_mask_t idle = 0;
    CUcontext own = create_context(0);
    tms_current_context_t current = {.context = own, .device = 0};
    simulator()->fail_after("cuCtxSynchronize", 1, 1, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(tms_devices_synchronize(&f->devices, 1, &current, &idle, &CONTEXT, &error), TMS_DEVICE_LOST);
    assert_int_equal(idle, 1);
    destroy_context(own);
}

static void the_limit_is_reported_once(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    static char text[TEXT_BYTES];
    CUcontext own = create_context(0);
    (void)allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    captured_stderr_t captured = capture_begin();
    for (int i = 0; i < 2; i++) {
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_all(f, &error), error);
    }
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, "warning: pause: "));
    assert_non_null(strstr(text, "cuCtxCreate"));
    destroy_context(own);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_pause_waits_for_the_current_context),
        TEST(an_interruptible_pause_waits_for_its_threads_context),
        TEST(a_free_waits_for_the_current_context),
        TEST(its_device_may_have_no_primary_context),
        TEST(a_primary_context_is_waited_for_once),
        TEST(a_context_of_a_device_without_access_is_left_alone),
        TEST(a_destroyed_context_runs_nothing),
        TEST(a_context_destroyed_meanwhile_runs_nothing),
        TEST(a_failed_wait_for_a_context_fails_the_pause),
        TEST(a_lost_context_is_reported_as_a_lost_device),
        TEST(the_limit_is_reported_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
