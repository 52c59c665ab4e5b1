/* Guards the NVTX ranges of pauses and resumes: names, nesting, order and bytes, also of calls that fail or are cancelled
 * and of several devices. */
#include <stdio.h>
#include <string.h>

#include "nvtx_recorder.h"
#include "support.h"

enum { LONG_SECONDS = 600 };

int (*InitializeInjectionNvtx2_fnptr)(const void *(*)(uint32_t)) = InitializeInjectionNvtx2;

/* Skips where nothing can be recorded. The domain, which the first call makes, is in no other record. */
static void begin_recording(fixture_t *f) {
    if (!nvtx_recorder_can()) skip(); /* no nvtx3, or one in which a tool must be a library */
    (void)tms_nvtx_attach(&f->saver.nvtx);
    (void)nvtx_recorder_take();
}

static void number_of(const char *record, const char *what, size_t expected) {
    size_t count = 0;
    for (const char *found = strstr(record, what); found; found = strstr(found + 1, what)) count++;
    assert_int_equal(count, expected);
}

/* One call moves two handles of dropped contents and one with a backup. Memory that is made while contents are copied lies
 * inside the copy. */
static void a_cycle(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    begin_recording(f);
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB);
    fill(allocate(f, "weights", TMS_BACKUP_PINNED, 3 * MIB), 3 * MIB, 1);
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    assert_string_equal(nvtx_recorder_take(), "");
    ASSERT_OK(pause_all(f, &error), error);
    assert_string_equal(nvtx_recorder_take(), "push 10 - pause\n"
                                              "push 1 - *turn\npop\n"
                                              "push 2 10485760 *synchronize\npop\n"
                                              "push 3 10485760 *plan\npop\n"
                                              "push 6 3145728 *copy\npop\n"
                                              "push 7 10485760 *unmap\npop\n"
                                              "mark 10 10485760 moved\n"
                                              "pop\n");
    ASSERT_OK(resume_tag(f, "weights", &error), error);
    assert_string_equal(nvtx_recorder_take(), "push 10 - resume weights\n"
                                              "push 1 - *turn\npop\n"
                                              "push 6 3145728 *copy\n"
                                              "push 4 4194304 *create\npop\n"
                                              "push 5 4194304 *map\npop\n"
                                              "pop\n"
                                              "push 8 4194304 *discard\npop\n"
                                              "mark 10 4194304 moved\n"
                                              "pop\n");
    ASSERT_OK(resume_all(f, &error), error);
    assert_string_equal(nvtx_recorder_take(), "push 10 - resume\n"
                                              "push 1 - *turn\npop\n"
                                              "push 4 4194304 *create\npop\n"
                                              "push 5 4194304 *map\npop\n"
                                              "push 4 2097152 *create\npop\n"
                                              "push 5 2097152 *map\npop\n"
                                              "push 8 6291456 *discard\npop\n"
                                              "mark 10 6291456 moved\n"
                                              "pop\n");
}

static void devices_have_ranges_on_their_threads(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    begin_recording(f);
    for (int device = 0; device < 2; device++)
        fill(allocate_on(f, device, "weights", TMS_BACKUP_PINNED, (uint64_t)(2 + 2 * device) * MIB), 2 * MIB, 1);
    ASSERT_OK(pause_all(f, &error), error);
    const char *record = nvtx_recorder_take();
    assert_int_equal(nvtx_recorder_threads(), 2);
    number_of(record, "push 6 2097152 *copy\n", 1);
    number_of(record, "push 6 4194304 *copy\n", 1);
    number_of(record, "push", 7);
    number_of(record, "pop", 7);
    ASSERT_OK(resume_all(f, &error), error);
    record = nvtx_recorder_take();
    assert_int_equal(nvtx_recorder_threads(), 2);
    number_of(record, "push 4 2097152 *create\n", 1);
    number_of(record, "push 4 4194304 *create\n", 1);
    number_of(record, "push", 9);
    number_of(record, "pop", 9);
}

static void a_failed_call_says_so_in_its_range(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    begin_recording(f);
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    (void)nvtx_recorder_take();
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(nvtx_recorder_take(), "push 10 - resume\n"
                                              "push 1 - *turn\npop\n"
                                              "push 4 2097152 *create\npop\n"
                                              "push 7 2097152 *unmap\npop\n"
                                              "mark 10 - failed: OUT_OF_DEVICE_MEMORY\n"
                                              "pop\n");
}

static int32_t cancel(void *context) {
    (void)context;
    return 1;
}

/* Whatever driver call fails, and wherever a call is cancelled: each thread ends what it has begun. */
static void assert_balanced(const char *record) {
    int depth = 0;
    for (const char *line = record; *line; line = strchr(line, '\n') + 1) {
        if (strncmp(line, "push", 4) == 0) depth++;
        if (strncmp(line, "pop", 3) == 0) depth--;
        assert_true(depth >= 0);
    }
    assert_int_equal(depth, 0);
}

static void every_failure_is_balanced(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    size_t failures = 0;
    begin_recording(f);
    fill(allocate(f, "weights", TMS_BACKUP_PINNED, 3 * MIB), 3 * MIB, 1);
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    for (uint64_t succeed = 0, made = 1; succeed < made; succeed++) {
        simulator()->clear_counts();
        simulator()->fail_after("*", succeed, 1, CUDA_ERROR_UNKNOWN);
        failures += pause_all(f, &error) != TMS_OK;
        failures += resume_all(f, &error) != TMS_OK;
        made = simulator()->calls("*");
        simulator()->fail_after("*", 0, 0, CUDA_SUCCESS);
        assert_balanced(nvtx_recorder_take());
        ASSERT_OK(resume_all(f, &error), error);
        assert_balanced(nvtx_recorder_take());
    }
    assert_true(failures > 5);
}

static void a_cancelled_call_is_balanced(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t selection = {.interrupted = cancel, .timeout_seconds = LONG_SECONDS};
    begin_recording(f);
    (void)allocate(f, "kv", TMS_BACKUP_NONE, 128 * MIB);
    ASSERT_OK(pause_tag(f, "kv", &error), error);
    assert_int_equal(simulator()->take_memory(0, (int64_t)(200 * MIB)), 0);
    (void)nvtx_recorder_take();
    assert_int_equal(resume_selected(f, &selection, &error), TMS_INTERRUPTED);
    const char *record = nvtx_recorder_take();
    assert_balanced(record);
    number_of(record, "failed: INTERRUPTED\npop\n", 1);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(200 * MIB)), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_cycle, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(devices_have_ranges_on_their_threads, setup_two_devices, teardown),
        cmocka_unit_test_setup_teardown(a_failed_call_says_so_in_its_range, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(every_failure_is_balanced, setup_one_device, teardown),
        cmocka_unit_test_setup_teardown(a_cancelled_call_is_balanced, setup_one_device, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
