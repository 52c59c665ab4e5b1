/* Guards pause and resume: bytes, addresses, states, and the order of driver calls. */
#include "support.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The number of lines of a trace that name this call. */
static size_t lines_of(const char *trace, const char *call) {
    size_t count = 0, length = strlen(call);
    for (const char *line = trace; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        count += strncmp(line, call, length) == 0 && (line[length] == '\n' || line[length] == '\0');
    return count;
}

static void memory_is_released_and_restored_at_the_same_address(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t address = allocate(f, "kv_cache", TMS_BACKUP_NONE, 5 * MIB);
    fill(address, 5 * MIB, 1);
    ASSERT_OK(pause_with_report(f, "kv_cache", &report, &error), error);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(report.bytes, 6 * MIB);
    assert_int_equal(report.copied_bytes, 0);
    assert_int_equal(physical_bytes(0), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_with_report(f, "kv_cache", &report, &error), error);
    assert_int_equal(report.bytes, 6 * MIB);
    assert_int_equal(physical_bytes(0), 6 * MIB);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_ACTIVE);
    assert_poisoned(address, 6 * MIB); /* the contents were discarded: this is fresh memory */
    fill(address, 6 * MIB, 2);
    assert_filled(address, 6 * MIB, 2);
}

static void contents_survive_in_every_backup(void **state) {
    fixture_t *f = *state;
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK, HEAP_BACKUP};
    for (uint32_t i = 0; i < 4; i++) {
        tms_error_t error;
        tms_report_t report;
        uint64_t bytes = 4 * MIB - 12345; /* not a multiple of anything */
        uint64_t address = allocate(f, "weights", kinds[i], bytes);
        for (uint32_t cycle = 0; cycle < 3; cycle++) {
            fill(address, bytes, i * 10 + cycle);
            ASSERT_OK(pause_with_report(f, "weights", &report, &error), error);
            assert_int_equal(report.copied_bytes, bytes);
            assert_int_equal(physical_bytes(0), 0);
            ASSERT_OK(resume_with_report(f, "weights", &report, &error), error);
            assert_int_equal(report.copied_bytes, bytes);
            assert_filled(address, bytes, i * 10 + cycle);
        }
        assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes), 0); /* host memory does not outlive the resume */
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        assert_int_equal(atomic_load(&f->saver.stores.disk.total), 0);
    }
}

static void the_order_of_driver_calls_is_the_contract(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    static char trace[1 << 16];
    for (int i = 0; i < 3; i++) allocate(f, "weights", i ? TMS_BACKUP_PINNED : TMS_BACKUP_NONE, 2 * MIB);
    simulator()->trace(ON);
    simulator()->clear_counts();
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->read_trace(trace, sizeof trace);
    const char *lock = strstr(trace, "cuMemHostRegister"), *wait = strstr(trace, "cuCtxSynchronize");
    const char *copy = strstr(trace, "cuMemcpyDtoHAsync"), *copied = copy ? strstr(copy, "cuStreamSynchronize") : NULL;
    const char *unmap = strstr(trace, "cuMemUnmap");
    assert_true(lock && wait && copy && copied && unmap);
    assert_true(wait < lock && lock < copy && copy < copied && copied < unmap);
    assert_null(strstr(unmap, "cuMemcpyDtoHAsync"));
    assert_int_equal(lines_of(trace, "cuCtxSynchronize"), 1);
    assert_int_equal(lines_of(trace, "cuMemUnmap"), 3);
    assert_int_equal(lines_of(trace, "cuMemRelease"), 3);
    assert_int_equal(lines_of(trace, "cuMemAddressFree"), 0);

    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    tms_host_store_settle(&f->saver.stores.host);
    simulator()->read_trace(trace, sizeof trace);
    simulator()->trace(OFF);
    assert_int_equal(lines_of(trace, "cuMemCreate"), 3);
    assert_int_equal(lines_of(trace, "cuMemMap"), 3);
    assert_int_equal(lines_of(trace, "cuMemSetAccess"), 3);
    const char *last_copy = strstr(trace, "cuMemcpyHtoDAsync"), *unlocked = strstr(trace, "cuMemHostUnregister");
    assert_true(last_copy && unlocked && strstr(last_copy, "cuStreamSynchronize") < unlocked);
}

/* Kernels may still use dropped memory. */
static void a_pause_that_drops_everything_waits_for_the_device(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    static char trace[1 << 12];
    for (int i = 0; i < 3; i++) allocate(f, "kv_cache", TMS_BACKUP_NONE, 2 * MIB);
    simulator()->trace(ON);
    simulator()->clear_counts();
    ASSERT_OK(pause_all(f, &error), error);
    simulator()->read_trace(trace, sizeof trace);
    simulator()->trace(OFF);
    const char *wait = strstr(trace, "cuCtxSynchronize"), *unmap = strstr(trace, "cuMemUnmap");
    assert_int_equal(lines_of(trace, "cuCtxSynchronize"), 1);
    assert_int_equal(lines_of(trace, "cuMemUnmap"), 3);
    assert_true(wait && unmap && wait < unmap);
}

static void tags_are_independent_and_repeats_do_nothing(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t weights = allocate(f, "weights", TMS_BACKUP_PINNED, 2 * MIB),
             cache = allocate(f, "kv_cache", TMS_BACKUP_NONE, 4 * MIB);
    fill(weights, 2 * MIB, 3);
    ASSERT_OK(pause_with_report(f, "kv_cache", &report, &error), error);
    assert_int_equal(report.allocations, 1);
    assert_filled(weights, 2 * MIB, 3);
    ASSERT_OK(pause_with_report(f, "kv_cache", &report, &error), error);
    assert_int_equal(report.allocations, 0);
    ASSERT_OK(pause_with_report(f, ALL_TAGS, &report, &error), error);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(physical_bytes(0), 0);
    ASSERT_OK(resume_with_report(f, "weights", &report, &error), error);
    assert_filled(weights, 2 * MIB, 3);
    assert_int_equal(state_of(f, cache), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
    assert_int_equal(report.allocations, 1);
    ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
    assert_int_equal(report.allocations, 0);
    ASSERT_OK(pause_with_report(f, "never used", &report, &error), error);
    assert_int_equal(report.allocations, 0);
    assert_int_equal(report.unknown_tags, 1);
}

static void a_selection_of_several_tags(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    uint64_t a = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), b = allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    uint64_t c = allocate(f, "c", TMS_BACKUP_NONE, 2 * MIB);
    const char *tags[] = {"a", "c"};
    tms_selection_t selection = {.tags = tags, .tag_count = 2};
    ASSERT_OK(tms_pause_perform(&f->saver, &selection, &report, &error), error);
    assert_int_equal(state_of(f, a), TMS_SEGMENT_PAUSED);
    assert_int_equal(state_of(f, b), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, c), TMS_SEGMENT_PAUSED);
    selection.tag_count = 0; /* an empty selection is not "all" */
    ASSERT_OK(tms_resume_perform(&f->saver, &selection, &report, &error), error);
    assert_int_equal(report.allocations, 0);
}

static void counters_and_tags_report_what_is_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t a = allocate(f, "a", TMS_BACKUP_PINNED, 3 * MIB);
    allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_tag(f, "a", &error), error);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.resident_bytes, 2 * MIB);
    assert_int_equal(counters.paused_bytes, 4 * MIB);
    assert_int_equal(counters.host_backup_bytes, 3 * MIB);
    tms_tag_t *tag = tms_tag_find(&f->regions.tags, "a");
    assert_int_equal(tag->paused, 1);
    assert_int_equal(tag->pause_epoch, 1);
    assert_int_equal(tms_free_address(&f->saver, a, &error), TMS_OK);
    assert_int_equal(tag->paused, 0);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.paused_bytes, 0);
    assert_int_equal(counters.host_backup_bytes, 0);
}

static void a_pause_waits_for_every_stream(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_error_context_t context = {.operation = "test", .device = 0};
    CUstream streams[2];
    uint64_t address = allocate(f, "weights", TMS_BACKUP_PINNED, 2 * MIB);
    memset((void *)address, 5, 2 * MIB);
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(f->cuda->cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        assert_int_equal(simulator()->launch_add(streams[i], address + (uint64_t)i * MIB, MIB, 1, 0), CUDA_SUCCESS);
    }
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    for (uint64_t i = 0; i < 2 * MIB; i++) assert_int_equal(((uint8_t *)address)[i], 6);
    for (int i = 0; i < 2; i++) assert_int_equal(f->cuda->cuStreamDestroy(streams[i]), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
}

static void a_pause_in_flight_blocks_no_other_thread(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    held_pause_t held;
    uint64_t freed = allocate(f, "weights", TMS_BACKUP_PINNED, 2 * MIB),
             kept = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, 1, kept);
    begin_pause(&held, f, "weights");

    /* The pause owns its segments now and waits for the device. Other threads allocate, query and free unaffected. */
    assert_int_equal(state_of(f, kept), TMS_SEGMENT_PAUSING);
    uint64_t other = allocate(f, "weights", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_free_address(&f->saver, freed, &error), TMS_OK);
    assert_int_equal(tms_free_address(&f->saver, freed, &error), TMS_INVALID_ARGUMENT); /* a second free is an error */
    assert_int_equal(physical_bytes(0), 6 * MIB); /* the queued free has not happened yet */

    simulator()->open_gate(1);
    join_pause(&held);
    assert_false(is_managed(f, freed));
    assert_int_equal(state_of(f, kept), TMS_SEGMENT_PAUSED);
    assert_int_equal(state_of(f, other), TMS_SEGMENT_ACTIVE);
    assert_int_equal(physical_bytes(0), 2 * MIB);
    destroy_stream(f, stream);
}

static void retained_backups_keep_their_address_and_are_renewed(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    void *first = NULL;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_PINNED, 2 * MIB);
    atomic_store(&f->saver.host_policy, TMS_HOST_RETAIN);
    for (uint32_t cycle = 0; cycle < 3; cycle++) {
        tms_host_buffer_t *buffer = NULL;
        void *host = NULL;
        fill(address, 2 * MIB, cycle);
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_all(f, &error), error);
        ASSERT_OK(tms_inspect_host_backup(&f->saver, address, 2 * MIB, &buffer, &host, &error), error);
        assert_non_null(host);
        if (!first) first = host;
        assert_ptr_equal(host, first);
        assert_filled((uint64_t)host, 2 * MIB, cycle);
        tms_host_buffer_drop(buffer);
    }
    atomic_store(&f->saver.host_policy, TMS_HOST_RELEASE); /* read at resume: the next one releases */
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes), 0);
}

static void a_view_of_a_backup_outlives_the_resume(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    uint64_t address = allocate(f, "weights", TMS_BACKUP_MMAP, 2 * MIB);
    fill(address, 2 * MIB, 7);
    ASSERT_OK(tms_inspect_host_backup(&f->saver, address, 2 * MIB, &buffer, &host, &error), error);
    assert_null(buffer); /* active and never paused: there is none */
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(tms_inspect_host_backup(&f->saver, address + MIB, 2 * MIB, &buffer, &host, &error),
                     TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_inspect_host_backup(&f->saver, 4096, 1, &buffer, &host, &error), TMS_NOT_MANAGED);
    ASSERT_OK(tms_inspect_host_backup(&f->saver, address, 2 * MIB, &buffer, &host, &error), error);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_filled((uint64_t)host, 2 * MIB, 7);
    tms_host_buffer_drop(buffer);
    assert_int_equal(atomic_load(&f->saver.stores.host.buffer_bytes), 0);
}

static void frees_of_paused_memory_use_no_device(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_NONE, TMS_BACKUP_PINNED, TMS_BACKUP_MMAP, TMS_BACKUP_DISK, HEAP_BACKUP};
    for (size_t i = 0; i < 5; i++) {
        uint64_t address = allocate(f, "a", kinds[i], 2 * MIB);
        ASSERT_OK(pause_all(f, &error), error);
        simulator()->clear_counts();
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
        assert_int_equal(simulator()->calls("cuCtxSynchronize"), 0);
        assert_int_equal(simulator()->calls("cuMemUnmap"), 0);
        assert_int_equal(simulator()->calls("cuMemAddressFree"), 1);
    }
}

static void two_devices_pause_and_resume_together(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    tms_error_context_t context = {.operation = "test", .device = 1};
    int current = -1;
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &context, &error), error);
    tms_devices_leave(&f->devices, 1);
    uint64_t a = allocate_on(f, 0, "weights", TMS_BACKUP_PINNED, 2 * MIB),
             b = allocate_on(f, 1, "weights", TMS_BACKUP_PINNED, 4 * MIB);
    fill(a, 2 * MIB, 1);
    fill(b, 4 * MIB, 2);
    simulator()->clear_counts();
    ASSERT_OK(pause_with_report(f, ALL_TAGS, &report, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
    assert_int_equal(physical_bytes(0), 0);
    assert_int_equal(physical_bytes(1), 0);
    ASSERT_OK(resume_with_report(f, ALL_TAGS, &report, &error), error);
    assert_filled(a, 2 * MIB, 1);
    assert_filled(b, 4 * MIB, 2);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, a))), 3);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, b))), 3);
    ASSERT_OK(tms_devices_current(&f->devices, &current, &context, &error), error);
    assert_int_equal(current, 0);
}

/* The other device's kernels may use memory that they have access to. */
static void a_pause_waits_for_every_device_with_access(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_error_context_t context = {.operation = "test", .device = 1};
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &context, &error), error);
    tms_devices_leave(&f->devices, 1);
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address))), 3);
    simulator()->clear_counts();
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2);
}

static void a_forked_child_gets_an_error(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    atomic_store(&f->saver.forked, true);
    assert_int_equal(pause_all(f, &error), TMS_FORKED);
    assert_int_equal(resume_all(f, &error), TMS_FORKED);
    atomic_store(&f->saver.forked, false);
    assert_int_equal(physical_bytes(0), 2 * MIB);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(memory_is_released_and_restored_at_the_same_address),
        ONE(contents_survive_in_every_backup),
        ONE(the_order_of_driver_calls_is_the_contract),
        ONE(a_pause_that_drops_everything_waits_for_the_device),
        ONE(tags_are_independent_and_repeats_do_nothing),
        ONE(a_selection_of_several_tags),
        ONE(counters_and_tags_report_what_is_paused),
        ONE(a_pause_waits_for_every_stream),
        ONE(a_pause_in_flight_blocks_no_other_thread),
        ONE(retained_backups_keep_their_address_and_are_renewed),
        ONE(a_view_of_a_backup_outlives_the_resume),
        ONE(frees_of_paused_memory_use_no_device),
        TWO(two_devices_pause_and_resume_together),
        TWO(a_pause_waits_for_every_device_with_access),
        ONE(a_forked_child_gets_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
