/* Guards a pass over two devices: its failures. The tests of pauses that copy only what has changed guard its results. */

#include "support.h"

#include <string.h>

#include "backup/pass.h"

enum { DEVICES = 2, ALL_CALLS = 1000 };
static const uint64_t BYTES = 2 * MIB;
static const tms_backup_content_t CONTENT = {.kind = TMS_BACKUP_PINNED, .bytes = 2 * MIB};

/* Contents on each device, and a pass over them. */
typedef struct contents {
    tms_wait_t wait;
    tms_pass_t pass;
    uint64_t address[DEVICES];
    tms_backup_t backups[DEVICES];
} contents_t;

static void start(fixture_t *f, contents_t *contents) {
    *contents = (contents_t){.pass = {.stores = &f->saver.stores, .wait = &contents->wait, .operation = "test"}};
    tms_wait_begin(&contents->wait, NULL, NULL, 0);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    for (int device = 0; device < DEVICES; device++) {
        contents->address[device] = allocate_on(f, device, "a", TMS_BACKUP_PINNED, BYTES);
        tms_pass_add(&contents->pass, &contents->backups[device], &CONTENT, contents->address[device], device);
    }
    tms_pass_start(&contents->pass);
    simulator()->clear_counts();
}

/* Asserts which devices' contents have fingerprints, as a mask, and frees everything. */
static void end(fixture_t *f, contents_t *contents, unsigned with_fingerprints) {
    tms_error_t error;
    for (int device = 0; device < DEVICES; device++) {
        assert_int_equal(contents->backups[device].fingerprints.fresh != NULL, with_fingerprints >> device & 1);
        tms_fingerprints_forget(&contents->backups[device].fingerprints);
        ASSERT_OK(tms_free_address(&f->saver, contents->address[device], &error), error);
    }
}

static void each_device_gives_fingerprints(void **state) {
    fixture_t *f = *state;
    contents_t contents;
    tms_error_t error;
    start(f, &contents);
    ASSERT_OK(tms_pass_finish(&contents.pass, &error), error);
    end(f, &contents, 3);
}

/* The kernel of the first device may still be running. Its stream is waited for once more before its buffer is released. */
static void a_device_that_can_be_waited_for_does_not_hide_another(void **state) {
    fixture_t *f = *state;
    contents_t contents;
    tms_error_t error;
    start(f, &contents);
    simulator()->fail_after("cuStreamSynchronize", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_pass_finish(&contents.pass, &error), TMS_DRIVER);
    assert_int_equal(error.device, 0);
    assert_string_equal(error.call, "cuStreamSynchronize");
    assert_int_equal(simulator()->calls("cuStreamSynchronize"), 3);
    end(f, &contents, 2);
}

static void the_first_of_several_failures_is_reported(void **state) {
    fixture_t *f = *state;
    contents_t contents;
    tms_error_t error;
    start(f, &contents);
    simulator()->fail_after("cuCtxPushCurrent", 0, ALL_CALLS, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_pass_finish(&contents.pass, &error), TMS_DRIVER);
    simulator()->fail_after("cuCtxPushCurrent", 0, 0, CUDA_SUCCESS);
    assert_int_equal(error.device, 0);
    end(f, &contents, 0);
}

#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TWO(each_device_gives_fingerprints),
        TWO(a_device_that_can_be_waited_for_does_not_hide_another),
        TWO(the_first_of_several_failures_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
