/* Guards the log line of each pause and resume at level info: what moved, where contents went, and what is left. */

#include "support.h"

#include <string.h>

#include "captured_stderr.h"
#include "temporary.h"

static char output[1 << 14];

/* The call's one line, without the parts that vary between runs. */
static void assert_logged(captured_stderr_t captured, const char *before_seconds, const char *after_seconds) {
    capture_end(captured, output, sizeof output);
    assert_int_equal(count_lines(output), 1);
    const char *begin = strstr(output, before_seconds), *seconds = strstr(output, " seconds");
    if (!begin || !seconds || strcmp(seconds + strlen(" seconds"), after_seconds) != 0)
        fail_msg("not '%s...%s' but: %s", before_seconds, after_seconds, output);
}

static void each_call_is_one_line(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_log_init(&f->log, TMS_LOG_INFO);
    allocate(f, "weights", TMS_BACKUP_PINNED, 2 * MIB);
    allocate(f, "weights", TMS_BACKUP_MMAP, 2 * MIB);
    allocate(f, "optimizer", TMS_BACKUP_DISK, 4 * MIB);
    allocate(f, "kv_cache", TMS_BACKUP_NONE, 8 * MIB - 1);
    allocate(f, "other", TMS_BACKUP_NONE, 2 * MIB);
    const tms_selection_t some = {.tags = (const char *[]){"weights", "optimizer", "kv_cache"}, .tag_count = 3};

    captured_stderr_t captured = capture_begin();
    tms_status_t status = pause_selected(f, &some, &error);
    assert_logged(captured, " info: pause: 4 allocations, 16.0 MiB, in ",
                  ", 4.0 MiB of contents to host memory, 4.0 MiB of contents to disk, "
                  "8.0 MiB of contents dropped; now 2.0 MiB are resident and 16.0 MiB "
                  "paused; by tag: 'weights' 4.0 MiB, 'optimizer' 4.0 MiB, "
                  "'kv_cache' 8.0 MiB\n");
    ASSERT_OK(status, error);

    captured = capture_begin();
    status = pause_selected(f, &some, &error);
    assert_logged(captured, " info: pause: 0 allocations, 0 bytes, in ", "; now 2.0 MiB are resident and 16.0 MiB paused\n");
    ASSERT_OK(status, error);

    captured = capture_begin();
    status = resume_tag(f, "weights", &error);
    assert_logged(captured, " info: resume: 2 allocations, 4.0 MiB, in ",
                  ", 4.0 MiB of contents from backups; now 6.0 MiB are resident and 12.0 MiB "
                  "paused; by tag: 'weights' 4.0 MiB\n");
    ASSERT_OK(status, error);
}

static void a_failure_and_lower_levels_are_silent(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    captured_stderr_t captured = capture_begin();
    tms_status_t quiet = pause_all(f, &error);
    tms_log_init(&f->log, TMS_LOG_INFO);
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    tms_status_t failed = resume_all(f, &error);
    capture_end(captured, output, sizeof output);
    assert_int_equal(quiet, TMS_OK);
    assert_int_equal(failed, TMS_OUT_OF_DEVICE_MEMORY);
    assert_string_equal(output, "");
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(each_call_is_one_line),
        ONE(a_failure_and_lower_levels_are_silent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
