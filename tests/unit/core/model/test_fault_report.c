/* Guards the error of a lost device: it names the memory that was paused, because an access to paused memory is the usual
 * cause. */

#include "support.h"

#include <string.h>

static void assert_said(const tms_error_t *error, const char *text) {
    if (strstr(error->message, text)) return;
    fail_msg("'%s' is missing in: %s", text, error->message);
}

static void assert_ends_with(const tms_error_t *error, const char *text) {
    size_t length = strlen(error->message), expected = strlen(text);
    if (length >= expected && strcmp(error->message + length - expected, text) == 0) return;
    fail_msg("'%s' is not the end of: %s", text, error->message);
}

/* A kernel that accesses paused memory. */
static void lose_the_device(void) { simulator()->lose_device(0, CUDA_ERROR_ILLEGAL_ADDRESS); }

/* Allocations of the tags, the first `paused` of which are paused. */
static void allocate_tags(fixture_t *f, const char *const *tags, size_t count, size_t paused) {
    tms_error_t error;
    const tms_selection_t selection = {.tags = tags, .tag_count = paused};
    for (size_t i = 0; i < count; i++) allocate(f, tags[i], TMS_BACKUP_NONE, 2 * MIB * (i + 1));
    ASSERT_OK(pause_selected(f, &selection, &error), error);
}

static void a_pause_and_a_resume_name_the_paused_memory(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t zeroed = {.zero = 1};
    allocate_tags(f, (const char *[]){"kv_cache", "weights", "resident"}, 3, 2);
    allocate(f, "kv_cache", TMS_BACKUP_NONE, 2 * MIB); /* resident although others of its tag are paused */
    lose_the_device();
    assert_int_equal(pause_tag(f, "resident", &error), TMS_DEVICE_LOST);
    assert_int_equal(error.driver_result, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_said(&error, "CUDA_LAUNCH_BLOCKING=1");
    assert_said(&error, " 6.0 MiB of managed memory were paused when this was found");
    assert_said(&error, "is_paused(tensor)");
    assert_ends_with(&error, "'kv_cache' 2.0 MiB, 'weights' 4.0 MiB.");
    assert_int_equal(resume_selected(f, &zeroed, &error), TMS_DEVICE_LOST);
    assert_ends_with(&error, "'kv_cache' 2.0 MiB, 'weights' 4.0 MiB.");
    assert_int_equal(pause_tag(f, "resident", NULL), TMS_DEVICE_LOST);
}

static void an_allocation_names_the_paused_memory(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = 0;
    tms_region_t region = tms_saver_settings(&f->saver);
    allocate_tags(f, (const char *[]){"kv_cache"}, 1, 1);
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(tms_allocation_create(&f->saver, &region, MIB, 0, &address, &error), TMS_DEVICE_LOST);
    assert_ends_with(&error, "'kv_cache' 2.0 MiB.");
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(tms_allocation_create(&f->saver, &region, MIB, 0, &address, &error), TMS_DRIVER);
    assert_null(strstr(error.message, "were paused")); /* the device is not lost */
}

static void a_pending_resume_names_the_paused_memory(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    tms_pending_t *pending = NULL;
    const tms_selection_t all = {.zero = 1};
    allocate_tags(f, (const char *[]){"kv_cache"}, 1, 1);
    lose_the_device();
    ASSERT_OK(tms_resume_begin(&f->saver, &all, &pending, &error), error);
    assert_int_equal(tms_pending_wait(pending, NULL, NULL, &report, &error), TMS_DEVICE_LOST);
    assert_ends_with(&error, "'kv_cache' 2.0 MiB.");
    tms_pending_release(pending);
}

static void only_some_tags_are_named(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    allocate_tags(f, (const char *[]){"a", "b", "c", "d", "e", "f", "resident"}, 7, 6);
    allocate_tags(f, (const char *[]){"a"}, 1, 1); /* counts for a tag that is named */
    lose_the_device();
    assert_int_equal(pause_tag(f, "resident", &error), TMS_DEVICE_LOST);
    assert_said(&error, " 44.0 MiB of managed memory");
    assert_said(&error, "'a' 4.0 MiB, 'b' 4.0 MiB, ");
    assert_ends_with(&error, "'d' 8.0 MiB, others 22.0 MiB.");
}

static void nothing_was_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    allocate_tags(f, (const char *[]){"resident"}, 1, 0);
    lose_the_device();
    assert_int_equal(pause_all(f, &error), TMS_DEVICE_LOST);
    assert_ends_with(&error, " No managed memory was paused when this was found.");
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_pause_and_a_resume_name_the_paused_memory),
        ONE(an_allocation_names_the_paused_memory),
        ONE(a_pending_resume_names_the_paused_memory),
        ONE(only_some_tags_are_named),
        ONE(nothing_was_paused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
