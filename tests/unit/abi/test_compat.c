/* Guards compat.c: the functions that programs call through ctypes. */

#include "support.h"

#include <stdlib.h>
#include <string.h>

#include "abi/compat.h"
#include "abi/interface.h"
#include "abi/start.h"

static int reset(void **state) {
    (void)state;
    simulator()->reset(1, 64 * MIB);
    return 0;
}

static void the_backend_may_be_chosen_before_and_after_the_backup(void **state) {
    (void)state;
    assert_false(tms_get_enable_cpu_backup());
    assert_string_equal(tms_get_cpu_backup_backend(), "pinned");
    tms_set_cpu_backup_backend("mmap");
    assert_false(tms_get_enable_cpu_backup()); /* stored, not enabled */
    tms_set_enable_cpu_backup(true);
    assert_true(tms_get_enable_cpu_backup());
    assert_string_equal(tms_get_cpu_backup_backend(), "mmap");
    tms_set_cpu_backup_backend("pinned");
    assert_true(tms_get_enable_cpu_backup());
    assert_string_equal(tms_get_cpu_backup_backend(), "pinned");
    tms_set_cpu_backup_backend(NULL);
    tms_set_cpu_backup_backend("disk");
    assert_string_equal(tms_get_cpu_backup_backend(), "pinned");
    tms_set_enable_cpu_backup(false);
    assert_false(tms_get_enable_cpu_backup());
}

static void the_last_of_two_backups_counts(void **state) {
    (void)state;
    tms_set_enable_cpu_backup(true);
    tms_set_enable_disk_backup(true);
    assert_true(tms_get_enable_disk_backup());
    assert_false(tms_get_enable_cpu_backup());
    tms_set_enable_cpu_backup(false); /* it is not on: the other stays */
    assert_true(tms_get_enable_disk_backup());
    tms_set_enable_disk_backup(false);
    assert_false(tms_get_enable_disk_backup());
}

static void bad_arguments_change_nothing(void **state) {
    (void)state;
    tms_set_current_tag("weights");
    tms_set_current_tag("");
    tms_set_current_tag(NULL);
    assert_string_equal(tms_get_current_tag(), "weights");
    tms_set_current_tag("default");
    char *before = strdup(tms_state(NULL)->saver.stores.disk.path);
    tms_set_disk_backup_dir("");
    tms_set_disk_backup_dir("/dev/null/below");
    assert_string_equal(tms_state(NULL)->saver.stores.disk.path, before);
    free(before);
    assert_null(tms_get_cpu_backup_pointer((const uint8_t *)(uintptr_t)4096, 1));
}

static void the_process_s_settings_are_kept(void **state) {
    (void)state;
    tms_set_retain_cpu_backup(true);
    assert_true(tms_get_retain_cpu_backup());
    tms_set_retain_cpu_backup(false);
    assert_false(tms_get_retain_cpu_backup());
    set_memory_margin_bytes(3 * MIB);
    assert_int_equal(atomic_load(&tms_state(NULL)->saver.memory_margin_bytes), 3 * MIB);
    set_memory_margin_bytes(0);
}

static void contents_come_back(void **state) {
    (void)state;
    tms_set_interesting_region(true);
    tms_set_current_tag("weights");
    tms_set_enable_cpu_backup(true);
    void *address = tms_torch_malloc((ssize_t)(3 * MIB), 0, NULL);
    assert_non_null(address);
    fill((uintptr_t)address, 3 * MIB, 5);
    assert_int_equal(tms_pause("weights"), TMS_CUDA_SUCCESS);
    assert_int_equal(tms_resume(""), TMS_CUDA_SUCCESS); /* every tag */
    assert_filled((uintptr_t)address, 3 * MIB, 5);
    assert_int_equal(tms_pause(""), TMS_CUDA_SUCCESS);
    assert_int_equal(physical_bytes(0), 0);
    const uint8_t *copy = tms_get_cpu_backup_pointer(address, 3 * MIB);
    assert_non_null(copy);
    assert_filled((uintptr_t)copy, 3 * MIB, 5);
    assert_int_equal(tms_resume("weights"), TMS_CUDA_SUCCESS);
    assert_filled((uintptr_t)address, 3 * MIB, 5);
    simulator()->fail_after("cuMemcpyDtoHAsync", 0, 1, CUDA_ERROR_OPERATING_SYSTEM);
    assert_int_equal(tms_pause(NULL), CUDA_ERROR_OPERATING_SYSTEM);
    assert_filled((uintptr_t)address, 3 * MIB, 5); /* as before: active */
    assert_int_equal(tms_pause(NULL), TMS_CUDA_SUCCESS);
    tms_torch_free(address, (ssize_t)(3 * MIB), 0, NULL);
    assert_int_equal(physical_bytes(0), 0);
    tms_set_enable_cpu_backup(false);
    tms_set_current_tag("default");
    tms_set_interesting_region(false);
}

/* Every status has a cudaError_t, and those of the driver keep the driver's number. */
static void statuses_are_cuda_errors(void **state) {
    (void)state;
    enum { DRIVER_RESULT = 304, FAILED = 999 };
    static const struct {
        tms_status_t status;
        int without, with; /* a driver's result in the error */
    } expected[] = {
        {TMS_OK, TMS_CUDA_SUCCESS, TMS_CUDA_SUCCESS},
        {TMS_INVALID_ARGUMENT, TMS_CUDA_ERROR_INVALID_VALUE, TMS_CUDA_ERROR_INVALID_VALUE},
        {TMS_NOT_MANAGED, TMS_CUDA_ERROR_INVALID_VALUE, TMS_CUDA_ERROR_INVALID_VALUE},
        {TMS_OUT_OF_DEVICE_MEMORY, TMS_CUDA_ERROR_MEMORY_ALLOCATION, TMS_CUDA_ERROR_MEMORY_ALLOCATION},
        {TMS_OUT_OF_HOST_MEMORY, TMS_CUDA_ERROR_MEMORY_ALLOCATION, TMS_CUDA_ERROR_MEMORY_ALLOCATION},
        {TMS_CAPTURE_IN_PROGRESS, TMS_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, TMS_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED},
        {TMS_DRIVER_UNAVAILABLE, TMS_CUDA_ERROR_NO_DEVICE, DRIVER_RESULT},
        {TMS_FORKED, TMS_CUDA_ERROR_INITIALIZATION, TMS_CUDA_ERROR_INITIALIZATION},
        {TMS_DRIVER, FAILED, DRIVER_RESULT},
        {TMS_DEVICE_LOST, FAILED, DRIVER_RESULT},
        {TMS_INVALID_STATE, FAILED, FAILED},
        {TMS_BACKUP_IO, FAILED, FAILED},
        {TMS_INTERRUPTED, FAILED, FAILED},
        {TMS_DEVICE_LOCKED, FAILED, FAILED},
    };
    tms_error_t error = {.driver_result = DRIVER_RESULT};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        assert_int_equal(tms_compat_cuda_error(expected[i].status, NULL), expected[i].without);
        assert_int_equal(tms_compat_cuda_error(expected[i].status, &error), expected[i].with);
    }
}

static void the_allocator_for_torch_accepts_torchs_arguments(void **state) {
    (void)state;
    assert_null(tms_torch_malloc(0, 0, NULL));
    assert_null(tms_torch_malloc(-1, 0, NULL));
    assert_null(tms_torch_malloc((ssize_t)1 << 50, 0, NULL)); /* more than the device has */
    assert_null(tms_torch_malloc(1, 7, NULL));                /* no such device */
    tms_torch_free(NULL, 0, 0, NULL);
    tms_torch_free((void *)(uintptr_t)4096, 1, 0, NULL); /* not ours: ignored */
    void *address = tms_torch_malloc((ssize_t)(3 * MIB), 0, NULL);
    assert_non_null(address);
    tms_torch_free((char *)address + 1, 1, 0, NULL); /* inside an allocation */
    assert_true(physical_bytes(0) > 0);
    tms_torch_free(address, (ssize_t)(3 * MIB), 0, NULL);
    assert_int_equal(physical_bytes(0), 0);
}

/* One free takes both kinds of memory. */
static void the_default_allocator_manages_what_the_thread_s_region_does(void **state) {
    (void)state;
    tms_segment_info_t row;
    for (int managed = 0; managed < 2; managed++) {
        tms_set_interesting_region(managed);
        void *address = tms_torch_default_malloc((ssize_t)(3 * MIB), 0, NULL);
        assert_non_null(address);
        const tms_status_t found = tms_get_api(tms_interface())->find((uintptr_t)address, 1, &row);
        assert_int_equal(found, managed ? TMS_OK : TMS_NOT_MANAGED);
        tms_set_interesting_region(!managed);
        tms_torch_default_free(address, (ssize_t)(3 * MIB), 0, NULL);
        assert_int_equal(physical_bytes(0), 0);
    }
    for (int managed = 0; managed < 2; managed++) {
        tms_set_interesting_region(managed);
        assert_null(tms_torch_default_malloc(0, 0, NULL));
        assert_null(tms_torch_default_malloc((ssize_t)1 << 50, 0, NULL)); /* more than the device has */
        assert_null(tms_torch_default_malloc(1, 7, NULL));                /* no such device */
    }
    tms_set_interesting_region(false);
}

/* Takes the only line of the queue, and returns whether it has the level and the text. */
static bool has_one_line(tms_log_queue_t *queue, int32_t level, const char *text) {
    tms_log_line_t *line = tms_log_queue_take(queue);
    const bool found = line && !line->next && line->level == level && strstr(line->text, text) != NULL;
    for (tms_log_line_t *next; line; line = next) {
        next = line->next;
        free(line);
    }
    return found;
}

static void each_refusal_by_the_margin_is_logged_once(void **state) {
    (void)state;
    tms_state_t *made = tms_state(NULL);
    const int level = atomic_exchange(&made->log.level, TMS_LOG_INFO);
    set_memory_margin_bytes(64 * MIB);
    tms_log_queue_open(&made->log_queue);
    assert_null(tms_torch_malloc((ssize_t)(3 * MIB), 0, NULL));
    assert_true(has_one_line(&made->log_queue, TMS_LOG_WARNING, "(Logged once.)"));
    assert_null(tms_torch_malloc((ssize_t)(3 * MIB), 0, NULL));
    assert_true(has_one_line(&made->log_queue, TMS_LOG_INFO, "memory_margin_bytes"));
    tms_log_queue_close(&made->log_queue);
    set_memory_margin_bytes(0);
    atomic_store(&made->log.level, level);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_backend_may_be_chosen_before_and_after_the_backup),
        cmocka_unit_test(the_last_of_two_backups_counts),
        cmocka_unit_test(bad_arguments_change_nothing),
        cmocka_unit_test(the_process_s_settings_are_kept),
        cmocka_unit_test(contents_come_back),
        cmocka_unit_test(each_refusal_by_the_margin_is_logged_once),
        cmocka_unit_test(statuses_are_cuda_errors),
        cmocka_unit_test(the_allocator_for_torch_accepts_torchs_arguments),
        cmocka_unit_test(the_default_allocator_manages_what_the_thread_s_region_does),
    };
    return cmocka_run_group_tests(tests, reset, NULL);
}
