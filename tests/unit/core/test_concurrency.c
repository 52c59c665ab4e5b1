/* Guards concurrent use: threads allocate, free, pause and resume in every way, and query all state meanwhile. Their
 * operations are random with fixed seeds, and bounded. TSan detects accesses without the lock. In any build a call may fail
 * only because of another thread, and nothing may be left at the end. */

#include "support.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "temporary.h"

enum { ALLOCATORS = 3, MOVERS = 2, READERS = 2, THREADS = ALLOCATORS + MOVERS + READERS };
enum { ALLOCATIONS = 600, MOVES = 250, LOOKS = 1000, HELD = 12, TAGS = 3, ROWS = 64, LARGEST_MIB = 5 };
#define PATIENCE_SECONDS 0.01

static const char *const tag_names[TAGS] = {"a", "b", "c"};

typedef struct shared {
    fixture_t *f;
    char directories[2][TEMPORARY_BYTES];
    pthread_mutex_t lock;
    char unexpected[TMS_ERROR_MESSAGE_BYTES]; /* the first failure that no other thread explains, or "" */
    _Atomic uint64_t moved, seen;             /* allocations moved; rows seen */
} shared_t;

typedef struct worker {
    shared_t *shared;
    pthread_t thread;
    unsigned seed;
} worker_t;

/* A scheduler may run one kind of thread to its end before another begins: each continues until all kinds have met. */
static bool have_met(shared_t *shared) { return atomic_load(&shared->moved) > 0 && atomic_load(&shared->seen) > 0; }

static int choose(worker_t *worker, int count) { return (int)((unsigned)rand_r(&worker->seed) % (unsigned)count); }

/* The others may hold the memory, a capture, or have requested cancellation. */
static bool is_expected(tms_status_t status) {
    return status == TMS_OK || status == TMS_OUT_OF_DEVICE_MEMORY || status == TMS_CAPTURE_IN_PROGRESS ||
           status == TMS_INTERRUPTED;
}

static void note(shared_t *shared, tms_status_t status, const tms_error_t *error) {
    if (is_expected(status)) return;
    pthread_mutex_lock(&shared->lock);
    if (!shared->unexpected[0]) (void)snprintf(shared->unexpected, sizeof shared->unexpected, "%s", error->message);
    pthread_mutex_unlock(&shared->lock);
}

/* ---- allocate and free ---- */

static uint64_t allocate_any(worker_t *worker) {
    fixture_t *f = worker->shared->f;
    tms_error_t error;
    uint64_t address = 0, level = 0;
    const bool often = choose(worker, 3) > 0; /* of one kind, so that neighbours share runs */
    const tms_region_settings_t settings = {.managed = 1,
                                            .backup = often ? TMS_BACKUP_PINNED : choose(worker, TMS_BACKUP_DISK + 1),
                                            .tag = tag_names[choose(worker, TAGS)],
                                            .own_handles = choose(worker, 8) == 0,
                                            .host_policy = often ? TMS_HOST_DEFAULT : choose(worker, TMS_HOST_RETAIN + 1)};
    uint64_t bytes = 1 + (uint64_t)choose(worker, LARGEST_MIB * (int)MIB);
    tms_status_t status = tms_region_enter(&f->regions, &settings, false, &level, &error);
    note(worker->shared, status, &error);
    if (status != TMS_OK) return 0;
    tms_region_t region = tms_saver_settings(&f->saver);
    status = tms_allocation_create(&f->saver, &region, bytes, choose(worker, 2), &address, &error);
    note(worker->shared, status, &error);
    (void)tms_region_leave(&f->regions, level);
    return status == TMS_OK ? address : 0;
}

static void *allocate_and_free(void *argument) {
    worker_t *worker = argument;
    uint64_t held[HELD] = {0};
    tms_error_t error;
    for (int i = 0; i < ALLOCATIONS || !have_met(worker->shared); i++) {
        uint64_t *place = &held[choose(worker, HELD)];
        if (*place) {
            note(worker->shared, tms_free_address(&worker->shared->f->saver, *place, &error), &error);
            *place = 0;
        } else {
            *place = allocate_any(worker);
        }
    }
    for (int i = 0; i < HELD; i++) {
        if (held[i]) note(worker->shared, tms_free_address(&worker->shared->f->saver, held[i], &error), &error);
    }
    return NULL;
}

/* ---- pause and resume ---- */

static int32_t stop_sometimes(void *context) { return choose(context, 50) == 0; }

static tms_status_t resume_behind(worker_t *worker, const tms_selection_t *selection, tms_report_t *report,
                                  tms_error_t *error) {
    tms_pending_t *pending = NULL;
    tms_status_t status = tms_resume_begin(&worker->shared->f->saver, selection, &pending, error);
    if (status != TMS_OK) return status;
    if (choose(worker, 2)) status = tms_pending_wait(pending, NULL, NULL, report, error);
    (void)tms_pending_done(pending);
    tms_pending_release(pending);
    return status;
}

static tms_status_t move_any(worker_t *worker, tms_report_t *report, tms_error_t *error) {
    tms_saver_t *saver = &worker->shared->f->saver;
    const char *tag = tag_names[choose(worker, TAGS)];
    tms_selection_t selection = {.timeout_seconds = PATIENCE_SECONDS, .zero = choose(worker, 2)};
    static const tms_backup_kind_t choices[] = {TMS_BACKUP_NONE, TMS_BACKUP_PINNED, TMS_BACKUP_DISK};
    if (choose(worker, 4)) {
        selection.tags = &tag;
        selection.tag_count = 1;
    }
    int way = choose(worker, 5);
    if (choose(worker, 3) == 0) {
        selection.interrupted = stop_sometimes;
        selection.interrupt_context = worker;
    }
    if (way < 2) {
        selection.has_backup = choose(worker, 3) == 0;
        selection.backup = selection.has_backup ? choices[choose(worker, 3)] : TMS_BACKUP_NONE;
        return tms_pause_perform(saver, &selection, report, error);
    }
    selection.host_policy = choose(worker, TMS_HOST_RETAIN + 1);
    if (way == 2) return resume_behind(worker, &selection, report, error);
    selection.exclusive = choose(worker, 2);
    return tms_resume_perform(saver, &selection, report, error);
}

static void *pause_and_resume(void *argument) {
    worker_t *worker = argument;
    for (int i = 0; i < MOVES || !have_met(worker->shared); i++) {
        tms_report_t report = {0};
        tms_error_t error;
        note(worker->shared, move_any(worker, &report, &error), &error);
        atomic_fetch_add(&worker->shared->moved, report.allocations);
    }
    return NULL;
}

/* ---- read ---- */

static void read_row(worker_t *worker, const tms_segment_info_t *row) {
    tms_saver_t *saver = &worker->shared->f->saver;
    tms_segment_info_t again;
    tms_host_buffer_t *buffer = NULL;
    void *host = NULL;
    tms_error_t error;
    (void)tms_inspect_find(saver, row->address + row->bytes / 2, 1, &again); /* it may have been freed */
    if (tms_inspect_host_backup(saver, row->address, row->bytes, &buffer, &host, &error) != TMS_OK || !buffer) return;
    (void)*(volatile char *)host;
    tms_host_buffer_drop(buffer);
}

static void do_something_else(worker_t *worker) {
    fixture_t *f = worker->shared->f;
    tms_error_t error;
    tms_region_t region = tms_saver_settings(&f->saver);
    uint64_t capture = 0, free_bytes, total_bytes;
    const tms_error_context_t context = {.operation = "test", .device = 0};
    tms_status_t status = TMS_OK;
    switch (choose(worker, 24)) {
    case 0: status = tms_host_store_reserve(&f->saver.stores.host, 0, 8 * MIB, &error); break;
    case 1: tms_host_store_trim(&f->saver.stores.host); break;
    case 2:
        status = tms_capture_table_begin(&f->saver, &region, &capture, &error);
        if (status == TMS_OK) (void)tms_capture_end_of(&f->saver, capture);
        break;
    case 3:
        status = tms_disk_set_directory(&f->saver.stores.disk, worker->shared->directories[choose(worker, 2)], &error);
        break;
    case 4: status = tms_peers_refresh(&f->saver, &error); break;
    case 5: status = tms_devices_memory(&f->devices, 0, &free_bytes, &total_bytes, &context, &error); break;
    default: return;
    }
    note(worker->shared, status, &error);
}

static void *read_state(void *argument) {
    worker_t *worker = argument;
    tms_saver_t *saver = &worker->shared->f->saver;
    for (int i = 0; i < LOOKS || !have_met(worker->shared); i++) {
        tms_segment_info_t rows[ROWS];
        tms_counters_t counters;
        size_t count = tms_inspect_segments(saver, rows, ROWS);
        tms_inspect_counters(saver, &counters);
        if (count > ROWS) count = ROWS;
        atomic_fetch_add(&worker->shared->seen, count);
        if (count > 0) read_row(worker, &rows[choose(worker, (int)count)]);
        do_something_else(worker);
    }
    return NULL;
}

/* ---- all of it ---- */

static void threads_do_everything_at_once(void **state) {
    static void *(*const works[THREADS])(void *) = {
        allocate_and_free, allocate_and_free, allocate_and_free, pause_and_resume, pause_and_resume, read_state, read_state};
    shared_t shared = {.f = *state};
    worker_t workers[THREADS];
    tms_error_t error;
    tms_saver_t *saver = &shared.f->saver;
    for (int i = 0; i < 2; i++) assert_non_null(make_temporary_directory(shared.directories[i], "concurrency"));
    saver->device_locks.directory = shared.directories[0];
    ASSERT_OK(tms_disk_set_directory(&saver->stores.disk, shared.directories[0], &error), error);
    tms_log_init(&shared.f->log, TMS_LOG_SILENT); /* calls that are cancelled, captures, memory shortage */
    assert_int_equal(pthread_mutex_init(&shared.lock, NULL), 0);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker_t){.shared = &shared, .seed = (unsigned)i + 1};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, works[i], &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
    tms_pending_resumes_close(&saver->pending_resumes, INFINITY);
    if (shared.unexpected[0]) fail_msg("%s", shared.unexpected);
    tms_counters_t counters;
    ASSERT_OK(resume_all(shared.f, &error), error);
    tms_reclaim_all(saver);
    tms_inspect_counters(saver, &counters);
    assert_int_equal(counters.allocations, 0); /* each thread has freed its own, also during a transition */
    assert_int_equal(counters.resident_bytes, 0);
    assert_int_equal(counters.paused_bytes, 0);
    assert_int_equal(counters.disk_backup_bytes, 0);
    assert_nothing_waits(saver);
    assert_int_equal(physical_bytes(0) + physical_bytes(1), 0);
    pthread_mutex_destroy(&shared.lock);
    for (int i = 0; i < 2; i++) assert_int_equal(remove_temporary_directory(shared.directories[i]), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(threads_do_everything_at_once, setup_two_devices, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
