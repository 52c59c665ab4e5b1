/* Guards late_devices.c and the allocator for devices that are not in use yet, through the entry points and the table. */

#include "abi/interface.h"
#include "support.h"

#include <cuda.h>

#include "abi/late_devices.h"
#include "abi/start.h"
#include "device/wait.h"

enum { OWNER, LATE, DEVICES };

/* What the listener saw. */
typedef struct heard {
    int count, device;
    bool refuses; /* the listener cannot take note of the device */
} heard_t;

static const tms_api_t *api;
static heard_t heard;

static int32_t listener(void *context, int32_t device) {
    heard_t *here = context;
    here->count++;
    here->device = device;
    return !here->refuses;
}

static void listen_to(tms_device_mask_t mask) {
    tms_error_t error;
    heard = (heard_t){0};
    ASSERT_OK(api->listen_devices(listener, &heard, mask, &error), error);
}

static int close_listener(void **state) {
    (void)state;
    tms_error_t error;
    return api->listen_devices(NULL, NULL, 0, &error);
}

static int start(void **state) {
    (void)state;
    simulator()->reset(DEVICES, 64 * MIB);
    api = tms_get_api(tms_interface());
    return api ? 0 : -1;
}

static bool late_device_has_access(uint64_t address) {
    tms_error_t error;
    const tms_driver_table_t *driver = NULL;
    const tms_error_context_t context = {.operation = "test", .device = TMS_NO_DEVICE};
    unsigned long long flags = 0;
    const CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = LATE};
    ASSERT_OK(tms_driver_load(&tms_state(NULL)->driver, &driver, &context, &error), error);
    assert_int_equal(driver->cuMemGetAccess(&flags, &location, address), CUDA_SUCCESS);
    return flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

static void the_first_allocation_gives_access_and_is_ordinary(void **state) {
    (void)state;
    tms_error_t error;
    tms_segment_info_t row;
    uint64_t managed = 0;
    ASSERT_OK(api->allocate(2 * MIB, OWNER, &managed, &error), error);
    assert_false(late_device_has_access(managed));
    void *ordinary = tms_torch_ordinary_malloc((ssize_t)(3 * MIB), LATE, NULL);
    assert_non_null(ordinary);
    assert_true(late_device_has_access(managed));
    assert_int_equal(api->find((uintptr_t)ordinary, 1, &row), TMS_NOT_MANAGED);
    tms_torch_default_free(ordinary, (ssize_t)(3 * MIB), LATE, NULL);
    assert_int_equal(physical_bytes(LATE), 0);
    ASSERT_OK(api->free(managed, &error), error);
}

static void the_listener_is_called_once_for_each_device(void **state) {
    (void)state;
    listen_to(1 << LATE);
    void *first = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL);
    assert_int_equal(heard.count, 1);
    assert_int_equal(heard.device, LATE);
    void *second = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL),
         *owners = tms_torch_malloc((ssize_t)MIB, OWNER, NULL);
    assert_int_equal(heard.count, 1);
    tms_torch_default_free(first, (ssize_t)MIB, LATE, NULL);
    tms_torch_default_free(second, (ssize_t)MIB, LATE, NULL);
    tms_torch_free(owners, (ssize_t)MIB, OWNER, NULL);
}

static void a_listener_that_takes_no_note_is_called_again(void **state) {
    (void)state;
    listen_to(1 << LATE);
    heard.refuses = true;
    void *first = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL);
    heard.refuses = false;
    void *second = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL),
         *third = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL);
    assert_int_equal(heard.count, 2);
    tms_torch_default_free(first, (ssize_t)MIB, LATE, NULL);
    tms_torch_default_free(second, (ssize_t)MIB, LATE, NULL);
    tms_torch_default_free(third, (ssize_t)MIB, LATE, NULL);
}

static void a_managed_allocation_tells_as_well(void **state) {
    (void)state;
    listen_to(1 << LATE);
    void *managed = tms_torch_malloc((ssize_t)MIB, LATE, NULL);
    assert_int_equal(heard.count, 1);
    tms_torch_free(managed, (ssize_t)MIB, LATE, NULL);
}

static void after_a_close_no_listener_is_called(void **state) {
    (void)state;
    listen_to(1 << LATE);
    api->close();
    void *ordinary = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL);
    assert_int_equal(heard.count, 0);
    tms_torch_default_free(ordinary, (ssize_t)MIB, LATE, NULL);
}

static void failures_leave_nothing(void **state) {
    (void)state;
    listen_to(1 << LATE);
    assert_null(tms_torch_ordinary_malloc(0, LATE, NULL));
    assert_null(tms_torch_ordinary_malloc(-1, LATE, NULL));
    assert_null(tms_torch_ordinary_malloc((ssize_t)MIB, DEVICES, NULL));
    assert_null(tms_torch_ordinary_malloc((ssize_t)1 << 50, LATE, NULL));
    simulator()->fail_after("cuDevicePrimaryCtxRetain", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_null(tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL));
    assert_int_equal(simulator()->failures_fired(), 1);
    assert_int_equal(heard.count, 0);
    assert_int_equal(physical_bytes(LATE), 0);
    tms_torch_default_free(NULL, 0, LATE, NULL);
}

/* The copy that follows fails with the driver's error, and the next look grants the access. */
static void an_allocation_succeeds_without_access(void **state) {
    (void)state;
    tms_error_t error;
    uint64_t managed = 0;
    void *ordinary = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL); /* in use before what follows */
    ASSERT_OK(api->allocate(2 * MIB, OWNER, &managed, &error), error);
    assert_true(late_device_has_access(managed));
    simulator()->fail_after("cuDevicePrimaryCtxGetState", 1, 1000, CUDA_ERROR_UNKNOWN);
    void *without = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL);
    simulator()->fail_after("cuDevicePrimaryCtxGetState", 0, 0, 0);
    assert_non_null(without);
    tms_torch_default_free(without, (ssize_t)MIB, LATE, NULL);
    tms_torch_default_free(ordinary, (ssize_t)MIB, LATE, NULL);
    ASSERT_OK(api->free(managed, &error), error);
}

/* Each call of an allocation and its free fails in turn. What is not freed at once is freed by a later call. */
static void every_failing_call_leaks_nothing(void **state) {
    (void)state;
    static const char *const calls[] = {"cuDevicePrimaryCtxGetState",
                                        "cuDevicePrimaryCtxRetain",
                                        "cuCtxPushCurrent",
                                        "cuMemAlloc",
                                        "cuMemFree",
                                        "cuCtxPopCurrent",
                                        "cuDevicePrimaryCtxRelease"};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        bool fired = true;
        for (uint64_t succeed = 0; fired; succeed++) {
            uint64_t before = simulator()->failures_fired();
            simulator()->fail_after(calls[i], succeed, 1, CUDA_ERROR_OPERATING_SYSTEM);
            void *address = tms_torch_ordinary_malloc((ssize_t)MIB, LATE, NULL);
            tms_torch_default_free(address, (ssize_t)MIB, LATE, NULL);
            fired = simulator()->failures_fired() > before;
            simulator()->fail_after(calls[i], 0, 0, 0);
            tms_reclaim_all(&tms_state(NULL)->saver);
            assert_int_equal(physical_bytes(LATE), 0);
            assert_true(tms_quarantine_is_empty(&tms_state(NULL)->saver.quarantine));
            assert_int_equal(tms_devices_unreleased(&tms_state(NULL)->devices), 0);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(the_first_allocation_gives_access_and_is_ordinary, close_listener),
        cmocka_unit_test_teardown(the_listener_is_called_once_for_each_device, close_listener),
        cmocka_unit_test_teardown(a_managed_allocation_tells_as_well, close_listener),
        cmocka_unit_test_teardown(a_listener_that_takes_no_note_is_called_again, close_listener),
        cmocka_unit_test_teardown(after_a_close_no_listener_is_called, close_listener),
        cmocka_unit_test_teardown(failures_leave_nothing, close_listener),
        cmocka_unit_test_teardown(an_allocation_succeeds_without_access, close_listener),
        cmocka_unit_test_teardown(every_failing_call_leaks_nothing, close_listener),
    };
    return cmocka_run_group_tests(tests, start, NULL);
}
