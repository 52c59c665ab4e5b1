/* Guards guard mode: what paused addresses show, what a resume brings back, and that it costs nothing where it is off. */
#include "support/guard_fixture.h"

#include <pthread.h>

enum { GATE = 1 };

/* ---- paused memory ---- */

static void late_reads_find_the_guard_byte(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t small = allocate(f, "weights", TMS_BACKUP_PINNED, 1 * MIB), large = allocate(f, "kv", TMS_BACKUP_NONE, 7 * MIB);
    fill(small, 1 * MIB, 1);
    fill(large, 7 * MIB, 2);
    ASSERT_OK(pause_all(f, &error), error);
    assert_guard_bytes(small, 2 * MIB);
    assert_guard_bytes(large, 8 * MIB);
    assert_int_equal(physical_bytes(0), PAGE); /* all of them show the same page */
    assert_int_equal(counters_of(f).guarded_bytes, 10 * MIB);
    assert_int_equal(counters_of(f).guard, 1);
    assert_int_equal(counters_of(f).paused_bytes, 10 * MIB);
    assert_int_equal(counters_of(f).resident_bytes, 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_filled(small, 1 * MIB, 1);
    assert_guard_bytes(large, 8 * MIB);
    assert_int_equal(physical_bytes(0), 10 * MIB);
    assert_int_equal(counters_of(f).guarded_bytes, 0);
    fill(large, 8 * MIB, 3);
    assert_filled(large, 8 * MIB, 3);
}

static void late_copies_fail_and_leave_the_context_whole(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_error_context_t context = {.operation = "test", .device = 0};
    static uint8_t host[4096];
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB), other = allocate(f, "other", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_tag(f, "kv", &error), error);
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    for (uint64_t at = address; at < address + 4 * MIB; at += MIB) {
        assert_int_equal(f->cuda->cuMemcpyHtoDAsync(at, host, sizeof host, NULL), CUDA_ERROR_INVALID_VALUE);
        assert_int_equal(f->cuda->cuMemsetD8Async(at, 1, sizeof host, NULL), CUDA_ERROR_INVALID_VALUE);
        assert_int_equal(f->cuda->cuMemcpyDtoHAsync(host, at, sizeof host, NULL), CUDA_SUCCESS);
    }
    assert_int_equal(f->cuda->cuCtxSynchronize(), CUDA_SUCCESS);
    assert_guard_bytes((uint64_t)host, sizeof host);
    assert_int_equal(f->cuda->cuMemsetD8Async(other, 1, 4096, NULL), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuCtxSynchronize(), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
    assert_guard_bytes(address, 4 * MIB);
    ASSERT_OK(resume_all(f, &error), error);
}

static void a_late_kernel_that_writes_loses_the_context(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_error_context_t context = {.operation = "test", .device = 0};
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    assert_int_equal(simulator()->launch_add(NULL, address, 4096, 1, 0), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    tms_devices_leave(&f->devices, 0);
    assert_int_equal(resume_all(f, &error), TMS_DEVICE_LOST); /* it waits for late reads */
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
}

static void peers_read_the_page_as_well(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_error_context_t context = {.operation = "test", .device = 1};
    static uint8_t host[4096];
    ASSERT_OK(tms_devices_enter(&f->devices, 1, &context, &error), error);
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB);
    uint64_t there = allocate_on(f, 1, "kv", TMS_BACKUP_NONE, 2 * MIB);
    turn_guard_on(f);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(physical_bytes(0), PAGE);
    assert_int_equal(physical_bytes(1), PAGE); /* each device has its own */
    assert_int_equal(f->cuda->cuMemcpyDtoHAsync(host, address + 3 * MIB, sizeof host, NULL), CUDA_SUCCESS);
    assert_int_equal(f->cuda->cuCtxSynchronize(), CUDA_SUCCESS);
    assert_guard_bytes((uint64_t)host, sizeof host);
    simulator()->clear_counts();
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 2); /* both may have read */
    tms_devices_leave(&f->devices, 1);
    assert_guard_bytes(address, 4 * MIB);
    assert_guard_bytes(there, 2 * MIB);
}

/* ---- resumed memory ---- */

typedef struct knowledge {
    tms_live_t live;
} knowledge_t;

static int32_t tell(void *context, tms_live_t *live) {
    *live = ((const knowledge_t *)context)->live;
    return 0;
}

static void what_is_not_kept_comes_back_as_the_guard_byte(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_backup_kind_t kinds[] = {TMS_BACKUP_PINNED, TMS_BACKUP_DISK};
    for (size_t i = 0; i < 2; i++) {
        uint64_t address = allocate(f, "weights", kinds[i], 6 * MIB);
        const tms_live_range_t ranges[] = {{address + MIB, address + 2 * MIB}, {address + 3 * MIB, address + 4 * MIB + 512}};
        knowledge_t knowledge = {
            .live = {.allocations = &address, .allocation_count = 1, .ranges = ranges, .range_count = 2}};
        const tms_selection_t selection = {.find_live = tell, .live_context = &knowledge};
        fill(address, 6 * MIB, 1);
        ASSERT_OK(pause_selected(f, &selection, &error), error);
        assert_guard_bytes(address, 6 * MIB);
        ASSERT_OK(resume_all(f, &error), error);
        assert_guard_bytes(address, MIB);
        assert_filled_part(address, MIB, MIB, 1);
        assert_guard_bytes(address + 2 * MIB, MIB);
        assert_filled_part(address, 3 * MIB, MIB + 512, 1);
        assert_guard_bytes(address + 4 * MIB + 512, 2 * MIB - 512);
        assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    }
}

static void zeros_win_where_the_caller_asks_for_them(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t zero = {.zero = 1};
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_selected(f, &zero, &error), error);
    assert_bytes(address, 4 * MIB, 0);
}

static void a_resume_in_the_background_fills_before_streams_go_on(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_pending_t *pending = NULL;
    const tms_selection_t all = {.tags = NULL};
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(tms_resume_begin(&f->saver, &all, &pending, &error), error);
    ASSERT_OK(tms_pending_wait_stream(pending, NULL, NULL, NULL, &error), error);
    const tms_error_context_t context = {.operation = "test", .device = 0};
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    assert_int_equal(simulator()->launch_add(NULL, address, 4 * MIB, 1, 0), CUDA_SUCCESS); /* 0xFF + 1 */
    assert_int_equal(f->cuda->cuCtxSynchronize(), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
    ASSERT_OK(tms_pending_wait(pending, NULL, NULL, NULL, &error), error);
    tms_pending_release(pending);
    assert_bytes(address, 4 * MIB, 0);
}

typedef struct resuming {
    fixture_t *fixture;
    tms_status_t status;
    tms_error_t error;
} resuming_t;

static void *run_resume(void *argument) {
    resuming_t *resuming = argument;
    resuming->status = resume_all(resuming->fixture, &resuming->error);
    return NULL;
}

static void a_resume_waits_for_late_reads(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_error_context_t context = {.operation = "test", .device = 0};
    pthread_t thread;
    resuming_t resuming = {.fixture = f};
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB), other = allocate(f, "other", TMS_BACKUP_NONE, 8 * MIB);
    ASSERT_OK(pause_tag(f, "kv", &error), error);
    CUstream stream = launch_behind_gate(f, GATE, other);
    ASSERT_OK(tms_devices_enter(&f->devices, 0, &context, &error), error);
    assert_int_equal(f->cuda->cuMemcpyDtoHAsync((void *)(other + 4 * MIB), address, 4 * MIB, stream), CUDA_SUCCESS);
    tms_devices_leave(&f->devices, 0);
    assert_int_equal(pthread_create(&thread, NULL, run_resume, &resuming), 0);
    simulator()->wait_until_synchronizing();
    assert_int_equal(state_of(f, address), TMS_SEGMENT_RESUMING);
    simulator()->open_gate(GATE);
    assert_int_equal(pthread_join(thread, NULL), 0);
    ASSERT_OK(resuming.status, resuming.error);
    destroy_stream(f, stream);
    assert_guard_bytes(other + 4 * MIB, 4 * MIB);
}

/* ---- the page's life ---- */

static void the_page_lives_as_long_as_something_is_guarded(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t a = allocate(f, "a", TMS_BACKUP_NONE, 4 * MIB), b = allocate(f, "b", TMS_BACKUP_PINNED, 2 * MIB);
    uint64_t c = allocate(f, "c", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_tag(f, "a", &error), error);
    assert_int_equal(physical_bytes(0), 4 * MIB + PAGE);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(physical_bytes(0), PAGE);
    ASSERT_OK(resume_tag(f, "b", &error), error);
    assert_guard_bytes(a, 4 * MIB);
    simulator()->clear_counts();
    assert_int_equal(tms_free_address(&f->saver, a, &error), TMS_OK);
    assert_int_equal(simulator()->calls("cuCtxSynchronize"), 1); /* for late reads */
    assert_int_equal(simulator()->calls("cuMemUnmap"), 1);
    assert_guard_bytes(c, 2 * MIB);
    assert_int_equal(tms_free_address(&f->saver, c, &error), TMS_OK);
    assert_int_equal(physical_bytes(0), 2 * MIB);
    assert_null(f->saver.guard.by_device[0].page);
    ASSERT_OK(pause_all(f, &error), error); /* a new one */
    assert_guard_bytes(b, 2 * MIB);
    ASSERT_OK(resume_all(f, &error), error);
    assert_int_equal(physical_bytes(0), 2 * MIB);
}

/* The page goes before memory is created: a resume fits wherever it fits without guard mode. */
static void a_resume_of_everything_needs_no_room_for_the_page(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t patient = {.timeout_seconds = 10};
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 64 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(simulator()->take_memory(0, (int64_t)(256 * MIB - 64 * MIB)), 0);
    ASSERT_OK(resume_all(f, &error), error);
    assert_guard_bytes(address, 64 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    /* An attempt fails; what is free with the page given back suffices for the next. */
    simulator()->fail_after("cuMemCreate", 0, 1, CUDA_ERROR_OUT_OF_MEMORY);
    ASSERT_OK(resume_selected(f, &patient, &error), error);
    assert_int_equal(physical_bytes(0), 64 * MIB);
    simulator()->take_memory(0, -(int64_t)(256 * MIB - 64 * MIB));
}

/* ---- on and off ---- */

static void the_mode_may_change_while_memory_is_paused(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t address = allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    turn_guard_off(f);
    assert_guard_bytes(address, 4 * MIB); /* what is guarded stays so until its resume */
    ASSERT_OK(resume_all(f, &error), error);
    assert_poisoned(address, 4 * MIB);
    assert_int_equal(physical_bytes(0), 4 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(physical_bytes(0), 0);
    turn_guard_on(f);
    ASSERT_OK(resume_all(f, &error), error); /* contents are missing all the same */
    assert_guard_bytes(address, 4 * MIB);
}

/* Every driver call of a cycle, in order. */
static void assert_trace(fixture_t *f, tms_status_t (*call)(fixture_t *, tms_error_t *), const char *expected) {
    static char trace[TRACE_BYTES];
    tms_error_t error;
    simulator()->trace(ON);
    simulator()->clear_counts();
    ASSERT_OK(call(f, &error), error);
    simulator()->read_trace(trace, sizeof trace);
    simulator()->trace(OFF);
    assert_string_equal(trace, expected);
}

#define WAIT                                                                                                                \
    "cuCtxGetCurrent\ncuDevicePrimaryCtxGetState\ncuThreadExchangeStreamCaptureMode\ncuDevicePrimaryCtxGetState\n"          \
    "cuDevicePrimaryCtxRetain\ncuCtxPushCurrent\ncuCtxGetCurrent\ncuCtxSynchronize\ncuCtxPopCurrent\n"                      \
    "cuDevicePrimaryCtxRelease\ncuThreadExchangeStreamCaptureMode\n"
#define RELEASED "cuMemUnmap\ncuMemRelease\n"
#define ENTERED "cuThreadExchangeStreamCaptureMode\ncuDevicePrimaryCtxGetState\ncuDevicePrimaryCtxRetain\ncuCtxPushCurrent\n"
#define LEFT_LAST "cuCtxPopCurrent\ncuDevicePrimaryCtxRelease\ncuThreadExchangeStreamCaptureMode"
#define LEFT      LEFT_LAST "\n"
#define GUARDED   "cuMemMap\ncuMemMap\ncuMemSetAccess\n"
#define PAGE_MADE                                                                                                           \
    "cuMemAddressReserve\n" CREATED ENTERED "cuStreamCreate\ncuMemsetD8Async\ncuStreamSynchronize\ncuStreamDestroy\n" LEFT
#define CREATED "cuMemCreate\ncuMemMap\ncuMemSetAccess\n"

static void a_cycle_without_guard_makes_the_calls_that_it_always_made(void **state) {
    fixture_t *f = *state;
    for (int i = 0; i < 2; i++) allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB);
    turn_guard_off(f);
    assert_trace(f, pause_all, WAIT RELEASED "cuMemUnmap\ncuMemRelease");
    assert_trace(f, resume_all, CREATED "cuMemCreate\ncuMemMap\ncuMemSetAccess");
}

static void a_cycle_with_guard_makes_these_calls(void **state) {
    fixture_t *f = *state;
    for (int i = 0; i < 2; i++) allocate(f, "kv", TMS_BACKUP_NONE, 4 * MIB);
    assert_trace(f, pause_all, WAIT RELEASED PAGE_MADE GUARDED RELEASED "cuMemMap\ncuMemMap\ncuMemSetAccess");
    assert_trace(f, resume_all,
                 WAIT "cuMemUnmap\ncuMemUnmap\n" RELEASED "cuMemAddressFree\n"
                      "cuCtxGetDevice\n" ENTERED "cuMemGetInfo\n" LEFT ENTERED "cuStreamCreate\n" CREATED
                      "cuMemsetD8Async\n" CREATED "cuMemsetD8Async\ncuStreamSynchronize\ncuStreamDestroy\n" LEFT_LAST);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(late_reads_find_the_guard_byte),
        ONE(late_copies_fail_and_leave_the_context_whole),
        ONE(a_late_kernel_that_writes_loses_the_context),
        cmocka_unit_test_setup_teardown(peers_read_the_page_as_well, setup_two_devices, teardown),
        ONE(what_is_not_kept_comes_back_as_the_guard_byte),
        ONE(zeros_win_where_the_caller_asks_for_them),
        ONE(a_resume_in_the_background_fills_before_streams_go_on),
        ONE(a_resume_waits_for_late_reads),
        ONE(the_page_lives_as_long_as_something_is_guarded),
        ONE(a_resume_of_everything_needs_no_room_for_the_page),
        ONE(the_mode_may_change_while_memory_is_paused),
        ONE(a_cycle_without_guard_makes_the_calls_that_it_always_made),
        ONE(a_cycle_with_guard_makes_these_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
