/* Guards pause and resume against driver failures: one before the commit changes nothing, and one after it damages one
 * segment. */
#include "support.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void a_capture_forbids_both_before_anything_changes(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    simulator()->clear_counts();
    ASSERT_OK(tms_capture_table_begin(&f->saver, NULL, NULL, &error), error);
    assert_int_equal(pause_all(f, &error), TMS_CAPTURE_IN_PROGRESS);
    assert_int_equal(resume_all(f, &error), TMS_CAPTURE_IN_PROGRESS);
    (void)tms_capture_end_of(&f->saver, 0);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
    assert_int_equal(simulator()->calls("cuMemHostRegister"), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    ASSERT_OK(pause_all(f, &error), error);
}

/* Fails each driver call of an operation in turn, once, and checks that nothing changed and that a repeated call succeeds.
 */
typedef tms_status_t (*operation_t)(fixture_t *, tms_error_t *);

static void fail_each(fixture_t *f, const char *call, uint64_t occurrence, operation_t operation, tms_segment_state_t before,
                      const uint64_t *addresses, size_t count) {
    tms_error_t error;
    uint64_t physical = physical_bytes(0), fired = simulator()->failures_fired();
    simulator()->fail_after(call, occurrence, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(operation(f, &error), TMS_DRIVER);
    assert_int_equal(simulator()->failures_fired(), fired + 1);
    assert_string_equal(error.operation, before == TMS_SEGMENT_ACTIVE ? "pause" : "resume");
    assert_int_equal(physical_bytes(0), physical);
    for (size_t i = 0; i < count; i++) assert_int_equal(state_of(f, addresses[i]), before);
}

static void a_failed_pause_changes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t addresses[] = {allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB), allocate(f, "b", TMS_BACKUP_DISK, 2 * MIB),
                            allocate(f, "d", HEAP_BACKUP, 2 * MIB), allocate(f, "c", TMS_BACKUP_NONE, 2 * MIB)};
    for (uint32_t i = 0; i < 4; i++) fill(addresses[i], 2 * MIB, i);
    const struct {
        const char *call;
        uint64_t occurrences;
    } points[] = {{"cuCtxSynchronize", 1},    {"cuStreamCreate", 1},          {"cuMemcpyDtoHAsync", 3},
                  {"cuEventCreate", 1},       {"cuEventRecord", 1},           {"cuEventSynchronize", 1},
                  {"cuStreamSynchronize", 1}, {"cuDevicePrimaryCtxRetain", 1}};
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        for (uint64_t occurrence = 0; occurrence < points[i].occurrences; occurrence++) {
            fail_each(f, points[i].call, occurrence, pause_all, TMS_SEGMENT_ACTIVE, addresses, 4);
            assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes), 0);
            assert_int_equal(atomic_load(&f->saver.stores.disk.total), 0);
            for (uint32_t k = 0; k < 4; k++) assert_filled(addresses[k], 2 * MIB, k);
        }
    }
    const tms_tag_t *tag = tms_tag_find(&f->regions.tags, "a");
    assert_int_equal(tag->pause_epoch, 0);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(tag->pause_epoch, 1);
    ASSERT_OK(resume_all(f, &error), error);
    for (uint32_t k = 0; k < 3; k++) assert_filled(addresses[k], 2 * MIB, k);
}

static void a_failed_resume_changes_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t addresses[] = {allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB), allocate(f, "b", TMS_BACKUP_DISK, 2 * MIB),
                            allocate(f, "d", HEAP_BACKUP, 2 * MIB), allocate(f, "c", TMS_BACKUP_NONE, 2 * MIB)};
    uint64_t active = allocate(f, "active", TMS_BACKUP_NONE, 2 * MIB);
    for (uint32_t i = 0; i < 4; i++) fill(addresses[i], 2 * MIB, i);
    const char *tags[] = {"a", "b", "c", "d"};
    tms_selection_t selection = {.tags = tags, .tag_count = 4};
    ASSERT_OK(tms_pause_perform(&f->saver, &selection, NULL, &error), error);
    fill(active, 2 * MIB, 99);
    const struct {
        const char *call;
        uint64_t occurrences;
    } points[] = {{"cuMemCreate", 4},   {"cuMemMap", 4},      {"cuMemSetAccess", 4},     {"cuMemcpyHtoDAsync", 3},
                  {"cuEventCreate", 1}, {"cuEventRecord", 1}, {"cuEventSynchronize", 1}, {"cuStreamSynchronize", 1}};
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        for (uint64_t occurrence = 0; occurrence < points[i].occurrences; occurrence++) {
            fail_each(f, points[i].call, occurrence, resume_all, TMS_SEGMENT_PAUSED, addresses, 4);
            assert_int_equal(state_of(f, active), TMS_SEGMENT_ACTIVE);
            assert_filled(active, 2 * MIB, 99);
        }
    }
    ASSERT_OK(resume_all(f, &error), error);
    for (uint32_t k = 0; k < 3; k++) assert_filled(addresses[k], 2 * MIB, k);
}

static void a_resume_without_memory_can_be_repeated(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t a = allocate(f, "a", TMS_BACKUP_PINNED, 40 * MIB), b = allocate(f, "b", TMS_BACKUP_PINNED, 40 * MIB);
    fill(a, 40 * MIB, 1);
    fill(b, 40 * MIB, 2);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->take_memory(0, (int64_t)(200 * MIB)), 0);
    simulator()->clear_counts();
    assert_int_equal(resume_all(f, &error), TMS_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 0); /* the lack of memory is known before it copies */
    assert_string_equal(error.call, "cuMemCreate");
    assert_string_equal(error.tag, "b");
    assert_int_equal(state_of(f, a), TMS_SEGMENT_PAUSED);
    assert_int_equal(state_of(f, b), TMS_SEGMENT_PAUSED);
    assert_int_equal(simulator()->take_memory(0, -(int64_t)(200 * MIB)), 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(a, 40 * MIB, 1);
    assert_filled(b, 40 * MIB, 2);
}

static void a_refused_release_damages_one_and_heals(void **state) {
    fixture_t *f = *state;
    const char *calls[] = {"cuMemUnmap", "cuMemRelease"};
    for (size_t i = 0; i < 2; i++) {
        tms_error_t error;
        tms_counters_t counters;
        uint64_t addresses[3];
        for (uint32_t k = 0; k < 3; k++) fill(addresses[k] = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB), 2 * MIB, k);
        simulator()->fail_after(calls[i], 1, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        assert_string_equal(error.call, calls[i]);
        assert_non_null(strstr(error.message, "damaged"));
        assert_int_equal(state_of(f, addresses[0]), TMS_SEGMENT_PAUSED);
        assert_int_equal(state_of(f, addresses[1]), TMS_SEGMENT_DAMAGED);
        assert_int_equal(state_of(f, addresses[2]), TMS_SEGMENT_PAUSED);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.damaged, 1);
        assert_int_equal(counters.resident_bytes, i == 0 ? 2 * MIB : 0);
        /* The next call retries. The segment is PAUSED then, so the same call resumes it with its contents. */
        ASSERT_OK(resume_all(f, &error), error);
        for (uint32_t k = 0; k < 3; k++) {
            assert_filled(addresses[k], 2 * MIB, k);
            assert_int_equal(tms_free_address(&f->saver, addresses[k], &error), TMS_OK);
        }
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.damaged, 0);
        assert_int_equal(counters.resident_bytes, 0);
        assert_int_equal(counters.paused_bytes, 0);
    }
}

static void a_damaged_segment_can_be_freed(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->fail_after("cuMemRelease", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(pause_all(f, &error), TMS_DRIVER);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.damaged, 0);
    assert_int_equal(counters.quarantined_handles, 0);
    assert_int_equal(physical_bytes(0), 0);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_capture_forbids_both_before_anything_changes),
        ONE(a_failed_pause_changes_nothing),
        ONE(a_failed_resume_changes_nothing),
        ONE(a_resume_without_memory_can_be_repeated),
        ONE(a_refused_release_damages_one_and_heals),
        ONE(a_damaged_segment_can_be_freed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
