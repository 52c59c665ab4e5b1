/* Guards the function table of tms.h over the process's one state, as seen by a caller that knows only tms.h. */

#include "abi/interface.h"
#include "support.h"

#include <string.h>

static const tms_api_t *api;

static int reset(void **state) {
    (void)state;
    simulator(); /* fails with a clear message if there is none */
    return 0;
}

static void other_interfaces_get_no_table(void **state) {
    (void)state;
    assert_null(tms_get_api(tms_interface() + 1));
    assert_ptr_equal(tms_get_api(tms_interface()), api);
    assert_int_not_equal(tms_interface(), 0); /* the build has passed it */
}

static void queries_before_any_use_make_no_state(void **state) {
    (void)state;
    tms_counters_t counters;
    tms_tag_info_t info;
    tms_segment_info_t row;
    tms_tag_row_t tag;
    memset(&counters, 0xFF, sizeof counters);
    api->counters(&counters);
    assert_int_equal(counters.allocations_total, 0);
    api->tag_info("weights", &info);
    assert_int_equal(info.paused, 0);
    assert_int_equal(api->segments(&row, 1), 0);
    assert_int_equal(api->tags(&tag, 1), 0);
    assert_int_equal(api->find(4096, 1, &row), TMS_NOT_MANAGED);
    assert_int_equal(simulator()->calls("*"), 0);
}

static void a_region_gives_its_settings_to_allocations(void **state) {
    (void)state;
    tms_error_t error;
    tms_region_settings_t settings = {.managed = 1, .backup = TMS_BACKUP_PINNED, .tag = "weights"}, current;
    tms_segment_info_t rows[4];
    int32_t seen = -1;
    uint64_t address = 0, outside = 0, region = 0;
    ASSERT_OK(api->region_enter(&settings, 0, &region, &error), error);
    api->region_current(&current, &seen);
    assert_int_equal(seen, 1);
    assert_string_equal(current.tag, "weights");
    ASSERT_OK(api->allocate(3 * MIB, 0, &address, &error), error);
    settings = (tms_region_settings_t){.managed = 0, .backup = TMS_BACKUP_NONE, .tag = "other"};
    ASSERT_OK(api->region_set(&settings, &error), error);
    api->region_current(&current, NULL);
    assert_string_equal(current.tag, "other");
    assert_false(current.managed);
    assert_int_equal(api->region_leave(region), 0);
    ASSERT_OK(api->allocate(MIB, 0, &outside, &error), error);
    assert_int_equal(api->segments(rows, 4), 2);
    assert_string_equal(rows[0].tag, "weights");
    assert_int_equal(rows[0].backup, TMS_BACKUP_PINNED);
    assert_string_equal(rows[1].tag, "default");
    assert_int_equal(api->segments(rows, 0), 2); /* queries the number */
    tms_tag_row_t tags[4];
    assert_int_equal(api->tags(tags, 4), 3);
    const char *const names[] = {"other", "weights", "default"};
    for (int i = 0; i < 3; i++) {
        assert_string_equal(tags[i].name, names[i]);
        assert_int_equal(tags[i].used, i > 0);
    }
    settings.tag = "";
    assert_int_equal(api->region_enter(&settings, 0, &region, &error), TMS_INVALID_ARGUMENT);
    ASSERT_OK(api->free(address, &error), error);
    ASSERT_OK(api->free(outside, &error), error);
    assert_int_equal(api->free(outside, &error), TMS_NOT_MANAGED);
}

static void an_outer_region_can_be_left_before_an_inner_one(void **state) {
    (void)state;
    tms_error_t error;
    tms_region_settings_t outer = {.managed = 1, .backup = TMS_BACKUP_NONE, .tag = "outer"}, current;
    tms_region_settings_t inner = {.managed = 1, .backup = TMS_BACKUP_PINNED, .tag = "inner"};
    uint64_t first = 0, second = 77;
    int32_t depth = -1;
    ASSERT_OK(api->region_enter(&outer, 0, &first, &error), error);
    ASSERT_OK(api->region_enter(&inner, 0, &second, &error), error);
    assert_int_equal(api->region_leave(first), 1);
    api->region_current(&current, &depth);
    assert_string_equal(current.tag, "inner");
    assert_int_equal(depth, 1);
    assert_int_equal(api->region_leave(second), 0);
    assert_int_equal(api->region_leave(second), TMS_NO_SUCH_REGION);
    inner.tag = NULL;
    assert_int_equal(api->region_enter(&inner, 0, &second, &error), TMS_INVALID_ARGUMENT);
}

static void contents_come_back_through_the_table(void **state) {
    (void)state;
    tms_error_t error;
    tms_report_t report;
    tms_tag_info_t info;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    uint64_t address = 0, region = 0;
    const char *tag = "kept";
    tms_region_settings_t settings = {.managed = 1, .backup = TMS_BACKUP_MMAP, .tag = tag};
    tms_selection_t selection = {.tags = &tag, .tag_count = 1};
    ASSERT_OK(api->region_enter(&settings, 0, &region, &error), error);
    ASSERT_OK(api->allocate(2 * MIB, 0, &address, &error), error);
    assert_int_equal(api->region_leave(region), 0);
    fill(address, 2 * MIB, 4);
    ASSERT_OK(api->pause(&selection, &report, &error), error);
    assert_int_equal(report.copied_bytes, 2 * MIB);
    assert_true(report.seconds > 0);
    api->tag_info(tag, &info);
    assert_int_equal(info.paused, 1);
    assert_int_equal(info.pause_epoch, 1);
    ASSERT_OK(api->host_backup(address + MIB, MIB, &buffer, &host, &error), error);
    assert_memory_equal(host, (char *)buffer->memory + MIB, MIB);
    api->host_buffer_release(buffer);
    ASSERT_OK(api->resume(&selection, &report, &error), error);
    assert_filled(address, 2 * MIB, 4);
    ASSERT_OK(api->free(address, &error), error);
}

static void settings_are_kept(void **state) {
    (void)state;
    api->set_memory_margin(123);
    assert_int_equal(api->get_memory_margin(), 123);
    api->set_memory_margin(0);
    api->set_retain_backup(7);
    assert_int_equal(api->get_retain_backup(), 1);
    api->set_retain_backup(0);
    assert_int_equal(api->get_retain_backup(), 0);
}

static void devices_can_be_queried(void **state) {
    (void)state;
    tms_error_t error;
    int32_t count = 0;
    uint64_t mask = 0, free_bytes = 0, total = 0;
    ASSERT_OK(api->device_count(&count, &error), error);
    assert_true(count >= 1);
    ASSERT_OK(api->device_memory(0, &free_bytes, &total, &error), error);
    assert_true(free_bytes > 0 && free_bytes <= total);
    ASSERT_OK(api->active_devices(&mask, &error), error);
    assert_true(mask & 1);
    assert_int_equal(api->device_memory(count, &free_bytes, &total, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(api->device_memory(-1, &free_bytes, &total, &error), TMS_INVALID_ARGUMENT);
    tms_device_info_t info = {0};
    ASSERT_OK(api->device_info(0, &info, &error), error);
    assert_int_equal(info.total_bytes, total);
    assert_int_equal(strncmp(info.uuid, "GPU-", 4), 0);
    assert_int_equal(api->device_info(count, &info, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(api->device_info(-1, &info, &error), TMS_INVALID_ARGUMENT);
    simulator()->fail_after("cuDeviceGetUuid_v2", 0, 1, CUDA_ERROR_NOT_SUPPORTED);
    assert_int_equal(api->device_info(0, &info, &error), TMS_DRIVER);
    assert_non_null(strstr(error.message, "cuDeviceGetUuid"));
    ASSERT_OK(api->refresh_peers(&error), error);
    simulator()->fail_after("cuMemGetInfo_v2", 0, 1, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(api->device_memory(0, &free_bytes, &total, &error), TMS_DEVICE_LOST);
    assert_non_null(strstr(error.message, "No managed memory was paused"));
}

static void captures_through_the_table(void **state) {
    (void)state;
    tms_error_t error;
    tms_counters_t counters;
    tms_region_settings_t settings = {.managed = 1, .backup = TMS_BACKUP_NONE, .tag = "graph"};
    tms_segment_info_t row;
    uint64_t address = 0;
    ASSERT_OK(api->capture_begin(&settings, NULL, &error), error);
    ASSERT_OK(api->allocate(MIB, 0, &address, &error), error);
    assert_int_equal(api->find(address, 1, &row), TMS_OK);
    assert_string_equal(row.tag, "graph");
    api->counters(&counters);
    assert_int_equal(counters.visible_captures, 1);
    assert_int_equal(api->pause(&(tms_selection_t){0}, NULL, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_true(api->capture_end(0, 0));
    ASSERT_OK(api->free(address, &error), error);
    settings.tag = NULL;
    assert_int_equal(api->capture_begin(&settings, NULL, &error), TMS_INVALID_ARGUMENT);
    api->counters(&counters);
    assert_int_equal(counters.visible_captures, 0);
}

int main(void) {
    api = tms_get_api(tms_interface());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(other_interfaces_get_no_table),
        cmocka_unit_test(queries_before_any_use_make_no_state), /* before the calls that create it */
        cmocka_unit_test(a_region_gives_its_settings_to_allocations),
        cmocka_unit_test(an_outer_region_can_be_left_before_an_inner_one),
        cmocka_unit_test(contents_come_back_through_the_table),
        cmocka_unit_test(settings_are_kept),
        cmocka_unit_test(devices_can_be_queried),
        cmocka_unit_test(captures_through_the_table),
    };
    return cmocka_run_group_tests(tests, reset, NULL);
}
