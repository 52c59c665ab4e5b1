/* Guards resume with a timeout: it waits for memory until it is free, until the timeout, or until another failure. */

#include "support/resume_wait_fixture.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { TAKEN = 200 };

static void take(uint64_t mebibytes) { assert_int_equal(simulator()->take_memory(0, (int64_t)(mebibytes * MIB)), 0); }

static void it_continues_when_the_memory_is_free(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t a = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB), b = allocate(f, "b", TMS_BACKUP_DISK, 40 * MIB);
    fill(a, 40 * MIB, 1);
    fill(b, 40 * MIB, 2);
    ASSERT_OK(pause_all(f, &error), error);
    take(TAKEN);
    simulator()->clear_counts();
    others_t others = {.fixture = f, .give_back = TAKEN * MIB};
    tms_selection_t selection = waiting(&others, LONG_SECONDS);
    ASSERT_OK(resume_selected_with_report(f, &selection, &report, &error), error);
    /* One attempt that failed at its second allocation, none while it could not succeed, and one that succeeded. */
    assert_int_equal(others.creates_when_asked, 2);
    assert_int_equal(simulator()->calls("cuMemCreate"), 4);
    assert_int_equal(report.allocations, 2);
    assert_int_equal(report.bytes, 80 * MIB);
    assert_int_equal(report.copied_bytes, 80 * MIB); /* of the attempt that counts */
    assert_filled(a, 40 * MIB, 1);
    assert_filled(b, 40 * MIB, 2);
    tms_counters_t counters;
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.failures_total, 0);
    assert_int_equal(counters.resumes_total, 1);
}

static void a_timeout_reports_the_missing_memory(void **state) {
    fixture_t *f = *state;
    const double timeouts[] = {0, 0.001};
    for (int i = 0; i < 2; i++) {
        tms_error_t error;
        uint64_t a = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB), b = allocate(f, "b", TMS_BACKUP_NONE, 40 * MIB);
        fill(a, 40 * MIB, 1);
        ASSERT_OK(pause_all(f, &error), error);
        take(TAKEN);
        tms_selection_t selection = {.timeout_seconds = timeouts[i]};
        assert_int_equal(resume_selected(f, &selection, &error), TMS_OUT_OF_DEVICE_MEMORY);
        assert_int_equal(error.status, TMS_OUT_OF_DEVICE_MEMORY);
        assert_string_equal(error.call, "cuMemCreate");
        const char *expected = "resume: device 0 needs 80.0 MiB and has 56.0 MiB free: 24.0 MiB are missing";
        assert_memory_equal(error.message, expected, strlen(expected));
        assert_non_null(strstr(error.message, "\n- Everything stays paused"));
        assert_non_null(
            strstr(error.message, "\n- cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2) for 40.0 MiB of tag '"));
        assert_int_equal(strstr(error.message, " seconds.\n") != NULL, timeouts[i] > 0);
        assert_int_equal(state_of(f, a), TMS_SEGMENT_PAUSED);
        assert_int_equal(state_of(f, b), TMS_SEGMENT_PAUSED);
        assert_int_equal(physical_bytes(0), 0);
        assert_int_equal(simulator()->take_memory(0, -(int64_t)(TAKEN * MIB)), 0);
        ASSERT_OK(resume_all(f, &error), error);
        assert_filled(a, 40 * MIB, 1);
        assert_int_equal(tms_free_address(&f->saver, a, &error), TMS_OK);
        assert_int_equal(tms_free_address(&f->saver, b, &error), TMS_OK);
    }
}

/* The driver has no memory for a stream, which belongs to no allocation. */
static void a_refused_stream_has_neither_bytes_nor_a_tag(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 1);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuStreamCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    const char *last = strrchr(error.message, '\n');
    assert_non_null(last);
    assert_string_equal(last, "\n- cuStreamCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2).");
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, 2 * MIB, 1);
}

static void memory_freed_meanwhile_is_no_longer_needed(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t a = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB), b = allocate(f, "b", TMS_BACKUP_PINNED, 40 * MIB);
    fill(a, 40 * MIB, 1);
    ASSERT_OK(pause_all(f, &error), error);
    take(TAKEN);
    simulator()->clear_counts();
    others_t others = {.fixture = f, .free_address = b};
    tms_selection_t selection = waiting(&others, LONG_SECONDS);
    ASSERT_OK(resume_selected_with_report(f, &selection, &report, &error), error);
    assert_int_equal(report.allocations, 1);
    assert_filled(a, 40 * MIB, 1);
    assert_false(is_managed(f, b));
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(TAKEN * MIB)), 0);
}

/* Too small for the free memory to show it: the driver fails although there is enough. */
static void a_refusal_without_a_shortage_is_retried(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 1);
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->fail_after("cuMemCreate", 0, 3, CUDA_ERROR_OUT_OF_MEMORY);
    simulator()->clear_counts();
    tms_selection_t selection = {.timeout_seconds = INFINITY};
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_int_equal(simulator()->calls("cuMemCreate"), 4);
    assert_filled(address, 2 * MIB, 1);
}

static CUresult (*creates)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);

static CUresult refuse_on_device_1(CUmemGenericAllocationHandle *made, size_t bytes, const CUmemAllocationProp *properties,
                                   unsigned long long flags) {
    return properties->location.id == 1 ? CUDA_ERROR_OUT_OF_MEMORY : creates(made, bytes, properties, flags);
}

static void the_device_that_failed_is_named(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    for (int device = 0; device < 2; device++) allocate_on(f, device, "a", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    creates = f->cuda->cuMemCreate;
    writable(f)->cuMemCreate = refuse_on_device_1;
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    writable(f)->cuMemCreate = creates;
    assert_int_equal(error.device, 1);
    const char *expected = "resume: device 1 needs 2.0 MiB and has 256.0 MiB free now";
    assert_memory_equal(error.message, expected, strlen(expected));
    ASSERT_OK(resume_all(f, &error), error);
}

/* A free that fails at first holds the very memory that is missing. */
static int32_t free_and_be_refused(void *context) {
    enum { ENOUGH_QUESTIONS = 100 };
    others_t *others = context;
    if (simulator()->calls("cuMemGetInfo") == 0) return 0;
    if (others->asked++ > 0) return others->asked > ENOUGH_QUESTIONS;
    simulator()->fail_after("cuCtxSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_free_address(&others->fixture->saver, others->free_address, NULL), TMS_OK);
    return 0;
}

static void failed_frees_are_retried_during_the_wait(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_log_init(&f->log, TMS_LOG_SILENT);
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB), held = allocate(f, "b", TMS_BACKUP_NONE, 40 * MIB);
    fill(address, 40 * MIB, 1);
    ASSERT_OK(pause_tag(f, "a", &error), error);
    take(190);
    simulator()->clear_counts();
    others_t others = {.fixture = f, .free_address = held};
    tms_selection_t selection = {
        .interrupted = free_and_be_refused, .interrupt_context = &others, .timeout_seconds = LONG_SECONDS};
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_int_equal(simulator()->failures_fired(), 1);
    assert_filled(address, 40 * MIB, 1);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(190 * MIB)), 0);
}

/* Another attempt would skip it, and find enough memory for the rest. */
static void damage_during_undo_ends_the_wait(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_log_init(&f->log, TMS_LOG_SILENT);
    uint64_t a = allocate(f, "a", TMS_BACKUP_NONE, 40 * MIB), b = allocate(f, "b", TMS_BACKUP_NONE, 40 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    take(TAKEN);
    simulator()->clear_counts();
    simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
    others_t others = {.fixture = f, .give_back = TAKEN * MIB};
    tms_selection_t selection = waiting(&others, LONG_SECONDS);
    assert_int_equal(resume_selected(f, &selection, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(others.asked, 0); /* it has not waited */
    assert_int_equal(state_of(f, a), TMS_SEGMENT_DAMAGED);
    assert_int_equal(state_of(f, b), TMS_SEGMENT_PAUSED);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(TAKEN * MIB)), 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(state_of(f, a), TMS_SEGMENT_ACTIVE);
}

static void any_other_failure_ends_the_wait(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 100 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    take(TAKEN);
    simulator()->fail_after("cuMemGetInfo", 0, 1, CUDA_ERROR_UNKNOWN);
    tms_selection_t selection = {.timeout_seconds = INFINITY};
    assert_int_equal(resume_selected(f, &selection, &error), TMS_DRIVER);
    assert_string_equal(error.call, "cuMemGetInfo");
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(TAKEN * MIB)), 0);
}

static void with_enough_memory_it_does_not_wait(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    for (int copies = 0; copies < 2; copies++) {
        allocate(f, "a", copies ? TMS_BACKUP_PINNED : TMS_BACKUP_NONE, 2 * MIB);
        ASSERT_OK(pause_all(f, &error), error);
        simulator()->clear_counts();
        tms_selection_t selection = {.timeout_seconds = LONG_SECONDS};
        ASSERT_OK(resume_selected(f, &selection, &error), error);
        /* Whether memory and contents can be restored in turns is queried once. */
        assert_int_equal(simulator()->calls("cuMemGetInfo"), copies);
        assert_int_equal(simulator()->calls("cuEventCreate"), 0);
    }
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(it_continues_when_the_memory_is_free),
        ONE(a_timeout_reports_the_missing_memory),
        ONE(a_refused_stream_has_neither_bytes_nor_a_tag),
        ONE(memory_freed_meanwhile_is_no_longer_needed),
        ONE(a_refusal_without_a_shortage_is_retried),
        cmocka_unit_test_setup_teardown(the_device_that_failed_is_named, setup_two_devices, teardown),
        ONE(failed_frees_are_retried_during_the_wait),
        ONE(damage_during_undo_ends_the_wait),
        ONE(any_other_failure_ends_the_wait),
        ONE(with_enough_memory_it_does_not_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
