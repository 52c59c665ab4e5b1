/* Guards which operations of backup/disk/copy.c wait for a slow disk or device, cancellation, and forks. pthread_create:
 * there are threads. */
#include "support.h"

#include <sys/wait.h>

#include "own_process.h"
#include "support/disk_copy_fixture.h"

/* ---- many files ---- */

/* While the disk is stalled, saves continue until the ring is full; nothing counts as written before the wait. */
static void a_save_does_not_wait_for_its_writes(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    tms_backup_t backups[MAX_IN_FLIGHT];
    set_way(f, BY_THREADS);
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BUFFER);
    fill(address, BUFFER, 1);
    for (int i = 0; i < MAX_IN_FLIGHT; i++) backups[i] = prepared(f, BUFFER);
    open_copier(f, &copier, NULL);
    close_gate();
    for (int i = 0; i < MAX_IN_FLIGHT; i++)
        ASSERT_OK(tms_backup_save(&backups[i], &f->saver.stores, &copier, address, &CONTEXT, &error), error);
    open_gate();
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    for (int i = 0; i < MAX_IN_FLIGHT; i++) {
        tms_backup_commit(&backups[i], &f->saver.stores);
        assert_loads(f, &backups[i], address, 1);
        tms_backup_destroy(&backups[i], &f->saver.stores);
    }
}

/* Called during a wait. If no read has been started for a while, it records how far each copy has come, and lets the
 * blocked requests end. */
typedef struct watcher {
    int release, submits, still;    /* `submits` at the end: before the requests ended */
    uint64_t on_device, off_device; /* copies to the device that were started, and that were waited for */
    bool released;
} watcher_t;

static int32_t look_and_release(void *context) {
    enum { LONG = 20, ENOUGH = 64 };
    watcher_t *watcher = context;
    const char bytes[ENOUGH] = {0};
    if (watcher->released) return 0;
    if (watcher->submits != calls.submits) watcher->still = 0;
    watcher->submits = calls.submits;
    if (++watcher->still < LONG) return 0;
    watcher->on_device = simulator()->calls("cuMemcpyHtoDAsync");
    watcher->off_device = simulator()->calls("cuEventSynchronize");
    watcher->released = true;
    assert_int_equal(write(watcher->release, bytes, ENOUGH), ENOUGH);
    return 0;
}

/* All reads but the first `unpiped`, or this many of them, block until nothing else makes progress. */
static watcher_t load_while_reads_wait(fixture_t *f, int unpiped, int piped) {
    const uint64_t bytes = 64 * BUFFER;
    tms_error_t error;
    tms_copier_t copier;
    tms_wait_t wait;
    int ends[2];
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    tms_backup_t backup = prepared(f, bytes);
    fill(address, bytes, 3);
    /* The first byte of a delayed read comes from the pipe. */
    for (uint64_t i = 0; i < bytes; i += BUFFER) *(char *)(address + i) = 0;
    char *expected = malloc(bytes);
    assert_non_null(expected);
    memcpy(expected, (const void *)address, bytes);
    save_one(f, &backup, address);
    memset((void *)address, 0xEE, bytes);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    watcher_t watcher = {.release = ends[1]};
    clear_calls();
    fault.pipe_end = ends[0];
    fault.unpiped = unpiped;
    fault.piped = piped;
    tms_wait_begin(&wait, look_and_release, &watcher, 0);
    open_copier(f, &copier, &wait);
    ASSERT_OK(tms_backup_load(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    fault.pipe_end = -1;
    close(ends[0]), close(ends[1]);
    assert_memory_equal((const void *)address, expected, bytes);
    free(expected);
    tms_backup_destroy(&backup, &f->saver.stores);
    assert_true(watcher.released);
    return watcher;
}

/* The disk has requests in flight as long as there is a free buffer. */
static void reads_do_not_wait_for_a_late_read(void **state) {
    if (!has_way(BY_URING)) skip();
    assert_int_equal(load_while_reads_wait(*state, 0, 1).submits, MAX_AHEAD);
}

static void completed_reads_proceed_while_the_disk_is_stalled(void **state) {
    if (!has_way(BY_URING)) skip();
    watcher_t watcher = load_while_reads_wait(*state, 1, NEVER);
    assert_int_equal(watcher.submits, 1 + MAX_IN_FLIGHT);
    assert_int_equal(watcher.on_device, 1);
}

/* Even if other buffers are free: using fewer buffers is better for the cache. */
static void device_buffers_are_reused_early(void **state) {
    enum { READ = 6, WITH_DEVICE = 2 };
    if (!has_way(BY_URING)) skip();
    watcher_t watcher = load_while_reads_wait(*state, READ, NEVER);
    assert_int_equal(watcher.submits, READ + MAX_IN_FLIGHT);
    assert_int_equal(watcher.on_device, READ);
    assert_int_equal(watcher.off_device, READ - WITH_DEVICE);
}

/* One copier saves and then loads, without a wait between. */
static void a_copier_switches_from_save_to_load(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_copier_t copier;
    const uint64_t bytes = 6 * BUFFER + 1;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes), other = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    fill(address, bytes, 4);
    FOR_EACH_WAY(way) {
        tms_backup_t backup = prepared(f, bytes);
        set_way(f, way);
        memset((void *)other, 0, bytes);
        open_copier(f, &copier, NULL);
        ASSERT_OK(tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error), error);
        tms_backup_commit(&backup, &f->saver.stores);
        ASSERT_OK(tms_backup_load(&backup, &f->saver.stores, &copier, other, &CONTEXT, &error), error);
        ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
        tms_copier_close(&copier);
        assert_filled(other, bytes, 4);
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

/* ---- interruption ---- */

typedef struct asker {
    int asked, release; /* a descriptor that lets blocked kernel requests end, or -1 */
} asker_t;

/* The disk is stalled until the callback asks whether to cancel. */
static int32_t stop_and_release(void *context) {
    asker_t *asker = context;
    const char bytes[MAX_IN_FLIGHT] = {0};
    asker->asked++;
    if (asker->release >= 0) assert_int_equal(write(asker->release, bytes, sizeof bytes), sizeof bytes);
    open_gate();
    return 1;
}

static void a_call_is_cancelled_while_the_disk_is_stalled(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 64 * BUFFER;
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    fill(address, bytes, 7);
    FOR_EACH_WAY(way) {
        tms_backup_t backup = prepared(f, bytes);
        set_way(f, way);
        save_one(f, &backup, address);
        int descriptors = count_descriptors();
        for (int saving = 0; saving < 2; saving++) {
            tms_error_t error;
            tms_copier_t copier;
            tms_wait_t wait;
            int ends[2] = {-1, -1};
            if (way == BY_URING) assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
            asker_t asker = {.release = ends[1]};
            fault.pipe_end = ends[0];
            close_gate();
            clear_calls();
            if (saving) plan(f, &backup);
            tms_wait_begin(&wait, stop_and_release, &asker, 0);
            open_copier(f, &copier, &wait);
            tms_status_t status = saving ? tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error)
                                         : tms_backup_load(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error);
            assert_int_equal(status, TMS_INTERRUPTED);
            assert_int_equal(asker.asked, 1);
            assert_int_equal(tms_copier_wait(&copier, &CONTEXT, &error), TMS_INTERRUPTED);
            if (saving) assert_true(simulator()->calls("cuMemcpyDtoHAsync") <= MAX_BUFFERS);
            if (!saving) assert_int_equal(simulator()->calls("cuMemcpyHtoDAsync"), 0);
            if (!saving && way == BY_URING) assert_int_equal(calls.submits, MAX_IN_FLIGHT);
            tms_copier_close(&copier);
            fault.pipe_end = -1;
            /* Unpinning would wait for all work on the device. */
            assert_int_equal(simulator()->calls("cuMemHostUnregister"), 0);
            tms_reclaim_all(&f->saver);
            settle_host_memory(&f->saver);
            assert_nothing_held();
            if (ends[0] >= 0) close(ends[0]), close(ends[1]);
            assert_int_equal(count_descriptors(), descriptors);
            assert_filled(address, bytes, 7);
        }
        tms_backup_destroy(&backup, &f->saver.stores);
    }
}

static int32_t fork_once(void *context) {
    asker_t *asker = context;
    if (asker->asked++ > 0) return 0;
    pid_t child = fork();
    if (child == 0) {
        clear_calls();
        return 0;
    }
    int ended = -1;
    open_gate();
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    return 0;
}

/* The child's copy of the ring, the threads' requests and the device belong to the parent. */
static void a_child_forked_during_a_copy_changes_nothing(void **state) {
    fixture_t *f = *state;
    const uint64_t bytes = 64 * BUFFER;
    tms_error_t error;
    tms_copier_t copier;
    tms_wait_t wait;
    asker_t asker = {.release = -1};
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, bytes);
    tms_backup_t backup = prepared(f, bytes);
    pid_t parent = getpid();
    set_way(f, BY_THREADS);
    fill(address, bytes, 8);
    close_gate();
    tms_wait_begin(&wait, fork_once, &asker, 0);
    open_copier(f, &copier, &wait);
    tms_status_t status = tms_backup_save(&backup, &f->saver.stores, &copier, address, &CONTEXT, &error);
    if (getpid() != parent) {
        bool idle = calls.direct_writes + calls.plain_writes + calls.submits + calls.threads == 0;
        end_child(status != TMS_FORKED ? 1 : !idle || simulator()->calls_in_child() != 0 ? 2 : 0);
    }
    ASSERT_OK(status, error);
    ASSERT_OK(tms_copier_wait(&copier, &CONTEXT, &error), error);
    tms_copier_close(&copier);
    tms_backup_commit(&backup, &f->saver.stores);
    assert_true(asker.asked >= 1);
    assert_loads(f, &backup, address, 8);
    tms_backup_destroy(&backup, &f->saver.stores);
}

/* ---- interruption ---- */

#define COPIES(test) cmocka_unit_test_setup_teardown(test, setup_disk_copies, teardown_disk_copies)

int main(void) {
    const struct CMUnitTest tests[] = {
        COPIES(reads_do_not_wait_for_a_late_read),
        COPIES(completed_reads_proceed_while_the_disk_is_stalled),
        COPIES(device_buffers_are_reused_early),
        COPIES(a_save_does_not_wait_for_its_writes),
        COPIES(a_copier_switches_from_save_to_load),
        COPIES(a_call_is_cancelled_while_the_disk_is_stalled),
        COPIES(a_child_forked_during_a_copy_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
