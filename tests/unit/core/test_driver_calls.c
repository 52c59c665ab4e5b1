/* Guards against failing driver calls: the same sequence of allocations on two devices runs with each entry point missing
 * in turn, and with single calls failing. The error names the call, every segment's state is true, and once the cause is
 * gone everything works and nothing is left.
 *
 * The ordinary test fails the first calls of each entry point and some of the others, TMS_EVERY_CALL all (make faults). */

#include "support.h"

#include <stdlib.h>
#include <string.h>

#include "base/config.h"
#include "core/model/export.h"
#include "temporary.h"

enum { DEVICES = 2, SEGMENTS = 5, MARGIN = 1 << 20 };

static const uint64_t BYTES = 12 << 10;

static const struct {
    tms_backup_kind_t backup;
    int device;
} WANTED[SEGMENTS] = {
    {TMS_BACKUP_PINNED, 0}, {TMS_BACKUP_MMAP, 1}, {TMS_BACKUP_DISK, TMS_NO_DEVICE}, {HEAP_BACKUP, 1}, {TMS_BACKUP_NONE, 1}};

static const tms_error_context_t CONTEXT = {.operation = "test", .device = TMS_NO_DEVICE};

typedef struct life {
    fixture_t fixture;
    tms_driver_table_t *table; /* the loaded one, to take entry points out of it */
    uint64_t address[SEGMENTS];
    uint32_t seed[SEGMENTS]; /* of the contents */
    const char *call;        /* missing or failing */
    int failures;            /* of our calls */
} life_t;

static void begin(life_t *life, const char *call) {
    tms_error_t error;
    const tms_driver_table_t *table = NULL;
    *life = (life_t){.call = call};
    fixture_t *f = &life->fixture;
    fixture_begin(f, DEVICES);
    simulator()->set_poison_limit(0); /* filling pages would take most of the time */
    tms_log_init(&f->log, TMS_LOG_SILENT);
    atomic_store(&f->saver.memory_margin_bytes, MARGIN);
    f->saver.stores.copying.chunk_bytes = BYTES / 3;
    ASSERT_OK(tms_driver_load(&f->driver, &table, &CONTEXT, &error), error);
    life->table = (tms_driver_table_t *)(uintptr_t)table;
}

/* A failure is about the call that was made to fail, and names it. */
static bool succeeds(life_t *life, tms_status_t status, const tms_error_t *error) {
    if (status == TMS_OK) return true;
    life->failures++;
    if (error->status != status || strcmp(error->call, life->call) != 0 || !strstr(error->message, life->call))
        print_error("%s: %s, and the error is about %s: %s\n", life->call, tms_status_name(status), error->call,
                    error->message);
    assert_int_equal(error->status, status);
    assert_string_equal(error->call, life->call);
    assert_non_null(strstr(error->message, life->call));
    return false;
}

static bool can_be_damaged(const char *call) { return strcmp(call, "cuMemUnmap") == 0 || strcmp(call, "cuMemRelease") == 0; }

/* Asserts that every segment is in an allowed state, and that memory holds what was written there. */
static void look(life_t *life) {
    for (int i = 0; i < SEGMENTS; i++) {
        tms_segment_info_t row;
        if (!life->address[i]) continue;
        assert_int_equal(tms_inspect_find(&life->fixture.saver, life->address[i], 1, &row), TMS_OK);
        assert_true(row.state == TMS_SEGMENT_ACTIVE || row.state == TMS_SEGMENT_PAUSED ||
                    (row.state == TMS_SEGMENT_DAMAGED && can_be_damaged(life->call)));
        if (row.state == TMS_SEGMENT_ACTIVE && WANTED[i].backup != TMS_BACKUP_NONE)
            assert_filled(life->address[i], BYTES, life->seed[i]);
    }
}

static void write_to(life_t *life, int i, uint32_t seed) {
    life->seed[i] = seed;
    fill(life->address[i], BYTES, seed);
}

static void allocate_all(life_t *life) {
    for (int i = 0; i < SEGMENTS; i++) {
        tms_error_t error;
        tms_region_t region = life->fixture.regions.initial;
        region.backup = WANTED[i].backup;
        tms_status_t status =
            tms_allocation_create(&life->fixture.saver, &region, BYTES, WANTED[i].device, &life->address[i], &error);
        if (succeeds(life, status, &error))
            write_to(life, i, (uint32_t)i);
        else
            assert_int_equal(life->address[i], 0);
    }
}

static void free_all(life_t *life) {
    for (int i = 0; i < SEGMENTS; i++) {
        tms_error_t error;
        if (!life->address[i]) continue;
        (void)succeeds(life, tms_free_address(&life->fixture.saver, life->address[i], &error), &error);
        life->address[i] = 0;
    }
}

static void export_all(life_t *life) {
    for (int i = 0; i < SEGMENTS; i++) {
        tms_error_t error;
        tms_export_t exported = {.descriptor = 0};
        if (!life->address[i]) continue;
        tms_status_t status = tms_export_memory(&life->fixture.saver, life->address[i], &exported, &error);
        assert_true(succeeds(life, status, &error) == (exported.descriptor > 0));
    }
}

static int32_t never(void *context) {
    (void)context;
    return 0;
}

static void pause_and_resume(life_t *life) {
    tms_error_t error;
    tms_report_t report;
    /* Cancellable: the wait is on another thread, and copies are in chunks with events between them. */
    const tms_selection_t all = {.exclusive = 1, .interrupted = never};
    (void)succeeds(life, tms_pause_perform(&life->fixture.saver, &all, &report, &error), &error);
    look(life);
    (void)succeeds(life, tms_resume_perform(&life->fixture.saver, &all, &report, &error), &error);
    look(life);
}

/* Retained backups, of which one changes between two pauses. */
static void pause_what_has_changed(life_t *life) {
    tms_segment_info_t row;
    atomic_store(&life->fixture.saver.host_policy, TMS_HOST_RETAIN);
    pause_and_resume(life);
    if (life->address[0] && tms_inspect_find(&life->fixture.saver, life->address[0], 1, &row) == TMS_OK &&
        row.state == TMS_SEGMENT_ACTIVE)
        write_to(life, 0, SEGMENTS);
    pause_and_resume(life);
    atomic_store(&life->fixture.saver.host_policy, TMS_HOST_RELEASE);
}

static void live(life_t *life) {
    tms_error_t error;
    tms_device_mask_t active = 0;
    (void)succeeds(life, tms_devices_active(&life->fixture.devices, &active, &CONTEXT, &error), &error);
    allocate_all(life);
    (void)succeeds(life, tms_peers_refresh(&life->fixture.saver, &error), &error);
    export_all(life);
    pause_and_resume(life);
    pause_what_has_changed(life);
    free_all(life);
}

/* The cause is gone: a second run of the same saver has no failure, and releases what the first one left. */
static void live_again(life_t *life) {
    life->failures = 0;
    live(life);
    assert_int_equal(life->failures, 0);
    tms_counters_t counters;
    tms_inspect_counters(&life->fixture.saver, &counters);
    assert_int_equal(counters.resident_bytes, 0);
    assert_int_equal(counters.paused_bytes, 0);
    assert_nothing_waits(&life->fixture.saver);
    fixture_end(&life->fixture, DEVICES);
}

/* Calls that have a substitute, that undo something (they are retried, and fail no call), or that are not used here. */
static bool is_optional(const char *call) {
    static const char *const optional[] = {"cuInit",
                                           "cuDriverGetVersion",
                                           "cuGetErrorName",
                                           "cuDevicePrimaryCtxRelease",
                                           "cuCtxGetCurrent",
                                           "cuCtxPopCurrent",
                                           "cuStreamIsCapturing",
                                           "cuStreamGetCtx",
                                           "cuCtxGetId",
                                           "cuMemAddressFree",
                                           "cuStreamDestroy",
                                           "cuEventDestroy",
                                           "cuEventQuery",
                                           "cuThreadExchangeStreamCaptureMode",
                                           "cuMemHostRegister",
                                           "cuMemHostUnregister",
                                           "cuMemHostGetDevicePointer",
                                           "cuModuleLoadData",
                                           "cuModuleUnload",
                                           "cuModuleGetFunction",
                                           "cuModuleGetGlobal",
                                           "cuLaunchKernel",
                                           "cuMemsetD8Async",
                                           "cuMemGetAccess",
                                           "cuMemAlloc",
                                           "cuMemFree",
                                           "cuMemcpyBatchAsync",
                                           "cuMemcpyDtoDAsync",
                                           "cuStreamWaitEvent"};
    for (size_t i = 0; i < sizeof optional / sizeof optional[0]; i++) {
        if (strcmp(optional[i], call) == 0) return true;
    }
    return false;
}

/* One run without an entry point. `text` is its name: `name` may be a macro of cuda.h. */
#define WITHOUT(life, name, text)                                                                                           \
    do {                                                                                                                    \
        begin((life), text);                                                                                                \
        __typeof__((life)->table->name) taken = (life)->table->name;                                                        \
        (life)->table->name = NULL;                                                                                         \
        live(life);                                                                                                         \
        (life)->table->name = taken;                                                                                        \
        if (((life)->failures > 0) == is_optional(text)) fail_msg("without %s %d calls failed", text, (life)->failures);    \
        live_again(life);                                                                                                   \
    } while (0);

static void every_entry_point_may_be_missing(void **state) {
    (void)state;
    static life_t life;
#define WITHOUT_ONE(name, symbol, parameters) WITHOUT(&life, name, #name)
    TMS_DRIVER_ENTRY_POINTS(WITHOUT_ONE)
#undef WITHOUT_ONE
}

static void each_call_may_fail(void **state) {
    (void)state;
    static life_t life;
    static const char *const calls[] = {
#define NAME(name, symbol, parameters) #name,
        TMS_DRIVER_ENTRY_POINTS(NAME)
#undef NAME
    };
    int injected = 0;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (uint64_t before = 0;; before += getenv("TMS_EVERY_CALL") ? 1 : 1 + before / 4) {
            begin(&life, calls[i]);
            uint64_t fired = simulator()->failures_fired();
            simulator()->fail_after(calls[i], before, 1, CUDA_ERROR_OPERATING_SYSTEM);
            live(&life);
            bool reached = simulator()->failures_fired() > fired;
            simulator()->fail_after(calls[i], 0, 0, CUDA_SUCCESS);
            live_again(&life);
            if (!reached) break;
            injected++;
        }
    }
    print_message("%d injected failures\n", injected);
    assert_true(injected > SEGMENTS * 10);
}

static char folder[TEMPORARY_BYTES];

static int make_folder(void **state) {
    (void)state;
    if (!make_temporary_directory(folder, "driver-calls") || setenv("TMS_LOCK_DIR", folder, 1) != 0) return -1;
    return setenv("TMS_DISK_BACKUP_DIR", folder, 1);
}

static int remove_folder(void **state) {
    (void)state;
    return remove_temporary_directory(folder);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_entry_point_may_be_missing),
        cmocka_unit_test(each_call_may_fail),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
