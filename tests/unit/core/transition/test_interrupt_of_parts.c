/* Guards what other threads do during a cancellable call: frees, refusals, forks, and devices that come into use. */
#include "support/interrupt_fixture.h"

/* ---- what a callback may do ---- */

/* The work never ends, like that of a device that hangs. */
static void a_free_does_not_delay_cancellation(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    uint64_t kept = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), freed = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    CUstream stream = launch_behind_gate(f, GATE, kept);
    for (int call = 0; call < 2; call++) { /* the second one finds what the first has deferred */
        asker_t asker = {.fixture = f, .address = call == 0 ? freed : 0, .stop = true};
        tms_selection_t selection = asking(&asker);
        assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
        tms_inspect_counters(&f->saver, &counters);
        assert_int_equal(counters.deferred_frees, 1);
        assert_int_equal(state_of(f, kept), TMS_SEGMENT_ACTIVE);
        assert_int_equal(physical_bytes(0), 4 * MIB);
    }
    simulator()->open_gate(GATE);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(physical_bytes(0), 0);
    destroy_stream(f, stream);
}

/* Unpinning waits for the device, on an H200 as here. If it fails once, the next call retries it. */
static void quarantined_host_memory_does_not_delay_cancellation(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_counters_t counters;
    tms_log_init(&f->log, TMS_LOG_SILENT);
    uint64_t kept = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), other = allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    uint64_t backed = allocate(f, "c", TMS_BACKUP_PINNED, 2 * MIB);
    ASSERT_OK(pause_tag(f, "c", &error), error);
    ASSERT_OK(pause_tag(f, "b", &error), error);
    simulator()->fail_after("cuMemHostUnregister", 0, 1, CUDA_ERROR_UNKNOWN);
    ASSERT_OK(resume_tag(f, "c", &error), error);
    settle_host_memory(&f->saver);
    CUstream stream = launch_behind_gate(f, GATE, kept);

    asker_t asker = {.stop = true};
    tms_selection_t selection = asking(&asker);
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
    tms_inspect_counters(&f->saver, &counters);
    assert_int_equal(counters.quarantined_host, 1); /* a thread waits with it */
    ASSERT_OK(resume_tag(f, "b", &error), error);   /* needs no resource of the device */
    assert_int_equal(state_of(f, other), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, backed), TMS_SEGMENT_ACTIVE);
    simulator()->open_gate(GATE);
    assert_nothing_held(f);
    destroy_stream(f, stream);
}

/* ---- while it copies ---- */

/* The staging memory of a resume from disk is pinned; the work on the device is not ours. */
static void staging_memory_does_not_delay_cancellation(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.after = "cuMemHostRegister", .stop = true};
    tms_selection_t selection = asking(&asker);
    uint64_t busy = allocate(f, "busy", TMS_BACKUP_NONE, 2 * MIB), address = allocate(f, "a", TMS_BACKUP_DISK, COPIED * MIB);
    const char *const tags[] = {"a"};
    fill(address, COPIED * MIB, 1);
    ASSERT_OK(pause_tag(f, "a", &error), error);
    CUstream stream = launch_behind_gate(f, GATE, busy);
    copy_slowly(f, MIB);
    selection.tags = tags;
    selection.tag_count = 1;
    simulator()->clear_counts();
    assert_int_equal(resume_selected(f, &selection, &error), TMS_INTERRUPTED);
    assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    simulator()->open_gate(GATE);
    release_copies();
    ASSERT_OK(resume_tag(f, "a", &error), error);
    assert_filled(address, COPIED * MIB, 1);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK); /* its file stays until then */
    assert_nothing_held(f);
    destroy_stream(f, stream);
}

/* The child has a copy of the call, and no access to the device. */
static int32_t fork_when_asked(void *context) {
    asker_t *asker = context;
    if (!begins(asker) || asker->asked > 1) return false;
    pid_t child = fork();
    if (child == 0) return false;
    int ended = -1;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    return false;
}

static void a_child_forked_during_a_copy_does_not_call_the_driver(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .after = "cuMemcpyDtoHAsync"};
    tms_selection_t selection = {.interrupted = fork_when_asked, .interrupt_context = &asker};
    uint64_t address = allocate(f, "a", TMS_BACKUP_MMAP, COPIED * MIB);
    fill(address, COPIED * MIB, 1);
    pid_t parent = getpid();
    copy_slowly(f, MIB);
    tms_status_t status = pause_selected(f, &selection, &error);
    if (getpid() != parent) end_child(status != TMS_FORKED ? 1 : simulator()->calls_in_child() != 0 ? 2 : 0);
    ASSERT_OK(status, error);
    assert_true(asker.asked >= 1);
    release_copies();
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, COPIED * MIB, 1);
}

static int32_t go_on(void *context) {
    (void)context;
    return false;
}

static int32_t fork_and_know_nothing(void *context, tms_live_t *live) {
    (void)fork_when_asked(context);
    *live = (tms_live_t){.allocation_count = 0};
    return 1;
}

static void a_child_forked_by_the_search_for_live_bytes_does_not_call_the_driver(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f};
    tms_selection_t selection = {.find_live = fork_and_know_nothing, .live_context = &asker, .interrupted = go_on};
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, COPIED * MIB);
    fill(address, COPIED * MIB, 1);
    pid_t parent = getpid();
    tms_status_t status = pause_selected(f, &selection, &error);
    if (getpid() != parent) end_child(status != TMS_FORKED ? 1 : simulator()->calls_in_child() != 0 ? 2 : 0);
    ASSERT_OK(status, error);
    assert_int_equal(asker.asked, 1);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(address, COPIED * MIB, 1);
}

/* ---- what others do meanwhile ---- */

/* A second device comes into use, and a thread searches for peers, while the segment is in transition. */
static int32_t use_second_device(void *context) {
    asker_t *asker = context;
    CUcontext primary;
    if (!begins(asker) || asker->asked > 1) return false;
    asker->results[0] =
        (tms_status_t)asker->fixture->cuda->cuDevicePrimaryCtxRetain(&primary, asker->fixture->topology->device[1].handle);
    asker->results[1] = tms_peers_refresh(&asker->fixture->saver, &asker->error);
    return asker->stop;
}

static void a_device_that_comes_into_use_meanwhile_gets_access(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .stop = true};
    tms_selection_t selection = {.interrupted = use_second_device, .interrupt_context = &asker};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address))), 1);
    CUstream stream = launch_behind_gate(f, GATE, address);
    assert_int_equal(pause_selected(f, &selection, &error), TMS_INTERRUPTED);
    assert_int_equal(asker.results[0], CUDA_SUCCESS);
    assert_int_equal(asker.results[1], TMS_OK);
    simulator()->open_gate(GATE);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address))), 3);
    destroy_stream(f, stream);
}

/* The same, but no thread searches for peers before the call has ended. */
static int32_t only_use_second_device(void *context) {
    asker_t *asker = context;
    CUcontext primary;
    if (!begins(asker) || asker->asked > 1) return false;
    asker->results[0] =
        (tms_status_t)asker->fixture->cuda->cuDevicePrimaryCtxRetain(&primary, asker->fixture->topology->device[1].handle);
    return false;
}

static void a_resume_looks_for_peers_once_more_when_it_ends(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .after = "cuMemcpyHtoDAsync"};
    tms_selection_t selection = {.interrupted = only_use_second_device, .interrupt_context = &asker};
    uint64_t address = allocate(f, "a", TMS_BACKUP_MMAP, COPIED * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    copy_slowly(f, MIB);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    release_copies();
    assert_true(asker.asked >= 1);
    assert_int_equal(asker.results[0], CUDA_SUCCESS);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address))), 3);
}

static void a_device_that_comes_into_use_during_a_resume_gets_access(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    asker_t asker = {.fixture = f, .after = "cuMemcpyHtoDAsync"};
    tms_selection_t selection = {.interrupted = use_second_device, .interrupt_context = &asker};
    uint64_t address = allocate(f, "a", TMS_BACKUP_MMAP, COPIED * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    copy_slowly(f, MIB);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    release_copies();
    assert_true(asker.asked >= 1);
    assert_int_equal(tms_segment_accessible(tms_segment_of(tms_registry_find(&f->saver.registry, address))), 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(a_free_does_not_delay_cancellation),
        ONE(quarantined_host_memory_does_not_delay_cancellation),
        ONE(staging_memory_does_not_delay_cancellation),
        ONE(a_child_forked_during_a_copy_does_not_call_the_driver),
        ONE(a_child_forked_by_the_search_for_live_bytes_does_not_call_the_driver),
        TWO(a_device_that_comes_into_use_meanwhile_gets_access),
        TWO(a_device_that_comes_into_use_during_a_resume_gets_access),
        TWO(a_resume_looks_for_peers_once_more_when_it_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
