/* Guards resume(exclusive=True), which holds the locks of the devices: it waits for them, and releases them after the
 * memory. A second set of locks stands for another process. */

#include "core/allocation/free.h"
#include "support/resume_wait_fixture.h"

#include <stdlib.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "temporary.h"

static char lock_directory[TEMPORARY_BYTES];
/* While unlocking is watched: the number of unlocks, and what the device still held of ours then. */
static struct {
    bool watched;
    int count;
    uint64_t held_bytes;
} unlocking;

int flock(int fd, int operation) {
    if (unlocking.watched && operation & LOCK_UN) {
        unlocking.count++;
        unlocking.held_bytes += physical_bytes(0);
    }
    return (int)syscall(SYS_flock, fd, operation);
}

static void begin_other(fixture_t *f, tms_device_locks_t *locks) {
    tms_error_t error;
    ASSERT_OK(tms_device_locks_init(locks, &f->config, &f->devices, &error), error);
}

static tms_status_t try_lock(tms_device_locks_t *locks) {
    tms_error_context_t context = {.operation = "test", .device = 0};
    return tms_device_locks_acquire(locks, 1, NULL, &context, NULL);
}

static void an_exclusive_resume_waits_for_the_lock(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_device_locks_t other;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    fill(address, 2 * MIB, 1);
    begin_other(f, &other);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(try_lock(&other), TMS_OK);

    tms_selection_t selection = {.exclusive = 1};
    assert_int_equal(resume_selected(f, &selection, &error), TMS_DEVICE_LOCKED);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    ASSERT_OK(resume_all(f, &error), error); /* a call without the option does not wait for it */
    ASSERT_OK(pause_all(f, &error), error);

    others_t others = {.fixture = f, .let_go = &other};
    selection = waiting(&others, LONG_SECONDS);
    selection.exclusive = 1;
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_int_equal(others.asked > 0, 1);
    assert_filled(address, 2 * MIB, 1);
    assert_int_equal(try_lock(&other), TMS_DEVICE_LOCKED);
    ASSERT_OK(pause_all(f, &error), error);
    assert_int_equal(try_lock(&other), TMS_OK);
    tms_device_locks_release(&other, 1);
    tms_device_locks_destroy(&other);
}

static void the_lock_is_released_with_the_last_resumed_segment(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_device_locks_t other;
    uint64_t a = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB);
    allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    begin_other(f, &other);
    ASSERT_OK(pause_all(f, &error), error);
    tms_selection_t selection = {.exclusive = 1};
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_int_equal(tms_free_address(&f->saver, a, &error), TMS_OK);
    assert_int_equal(try_lock(&other), TMS_DEVICE_LOCKED);
    ASSERT_OK(pause_tag(f, "b", &error), error);
    assert_int_equal(try_lock(&other), TMS_OK);
    tms_device_locks_release(&other, 1);
    tms_device_locks_destroy(&other);
}

/* The process that waits for the lock needs the memory. */
static void the_lock_is_released_after_the_memory(void **state) {
    fixture_t *f = *state;
    for (int is_free = 0; is_free < 2; is_free++) {
        tms_error_t error;
        uint64_t addresses[] = {allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), allocate(f, "a", TMS_BACKUP_NONE, 4 * MIB)};
        tms_selection_t selection = {.exclusive = 1};
        ASSERT_OK(pause_all(f, &error), error);
        ASSERT_OK(resume_selected(f, &selection, &error), error);
        unlocking.count = 0;
        unlocking.held_bytes = 0;
        unlocking.watched = true;
        if (!is_free) ASSERT_OK(pause_all(f, &error), error);
        for (size_t i = 0; i < 2; i++) assert_int_equal(tms_free_address(&f->saver, addresses[i], &error), TMS_OK);
        unlocking.watched = false;
        assert_int_equal(unlocking.count, 1);
        assert_int_equal(unlocking.held_bytes, 0);
    }
}

/* Pauses what is on the second device while the call waits for the lock of the first. */
static void *pause_late(void *argument) {
    assert_int_equal(pause_tag(argument, "late", NULL), TMS_OK);
    return NULL;
}

static int32_t pause_late_and_let_go(void *context) {
    others_t *others = context;
    pthread_t thread;
    if (others->asked++ > 0) return 0;
    assert_int_equal(pthread_create(&thread, NULL, pause_late, others->fixture), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    tms_device_locks_release(others->let_go, 1);
    return 0;
}

static void only_devices_that_are_locked_are_resumed(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_report_t report;
    tms_device_locks_t other;
    uint64_t a = allocate(f, "a", TMS_BACKUP_NONE, 2 * MIB), late = allocate_on(f, 1, "late", TMS_BACKUP_NONE, 2 * MIB);
    begin_other(f, &other);
    ASSERT_OK(pause_tag(f, "a", &error), error);
    assert_int_equal(try_lock(&other), TMS_OK);
    others_t others = {.fixture = f, .let_go = &other};
    tms_selection_t selection = {
        .exclusive = 1, .interrupted = pause_late_and_let_go, .interrupt_context = &others, .timeout_seconds = LONG_SECONDS};
    ASSERT_OK(resume_selected_with_report(f, &selection, &report, &error), error);
    assert_int_equal(report.allocations, 1);
    assert_int_equal(state_of(f, a), TMS_SEGMENT_ACTIVE);
    assert_int_equal(state_of(f, late), TMS_SEGMENT_PAUSED);
    tms_device_locks_destroy(&other);
}

static void a_failed_resume_keeps_no_lock(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    tms_device_locks_t other;
    uint64_t address = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    begin_other(f, &other);
    ASSERT_OK(pause_all(f, &error), error);
    tms_selection_t selection = {.exclusive = 1};
    simulator()->fail_after("cuMemMap", 0, 1, CUDA_ERROR_UNKNOWN);
    assert_int_equal(resume_selected(f, &selection, &error), TMS_DRIVER);
    assert_int_equal(state_of(f, address), TMS_SEGMENT_PAUSED);
    assert_int_equal(try_lock(&other), TMS_OK);
    tms_device_locks_release(&other, 1);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_int_equal(tms_free_address(&f->saver, address, &error), TMS_OK);
    assert_int_equal(try_lock(&other), TMS_OK);
    tms_device_locks_release(&other, 1);
    ASSERT_OK(resume_selected(f, &selection, &error), error); /* nothing to resume: no lock is taken */
    assert_int_equal(try_lock(&other), TMS_OK);
    tms_device_locks_release(&other, 1);
    tms_device_locks_destroy(&other);
}

/* The lock of device 0 is held once for each segment that says so. */
static void assert_shares(fixture_t *f, uint64_t expected) {
    uint64_t held = 0;
    for (tms_registry_node_t *node = f->saver.registry.first; node; node = node->next)
        held += tms_segment_of(node)->exclusive;
    assert_int_equal(held, expected);
    assert_int_equal(f->saver.device_locks.device[0].count, expected);
}

static void a_segment_has_one_share_at_most(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    uint64_t a = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    const tms_selection_t selection = {.exclusive = 1};
    allocate(f, "b", TMS_BACKUP_NONE, 2 * MIB);
    ASSERT_OK(pause_all(f, &error), error);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_shares(f, 2);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_shares(f, 2);
    allocate(f, "c", TMS_BACKUP_NONE, 2 * MIB); /* was not resumed */
    ASSERT_OK(pause_tag(f, "a", &error), error);
    assert_shares(f, 1);
    ASSERT_OK(resume_selected(f, &selection, &error), error);
    assert_shares(f, 2);
    tms_free_retain_lock(&f->saver, tms_segment_of(tms_registry_find(&f->saver.registry, a)));
    assert_shares(f, 2);
    ASSERT_OK(pause_all(f, &error), error);
    assert_shares(f, 0);
}

/* A pause that fails to release memory gives the shares up. Repairs, and resumes that skip damage, add none. */
static void damaged_segments_have_no_share(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t selection = {.exclusive = 1};
    uint64_t a = allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    allocate(f, "b", TMS_BACKUP_NONE, 4 * MIB);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    for (int refusals = 1; refusals < 5; refusals++) { /* by the pause, and by the attempts of the resume to repair */
        ASSERT_OK(resume_selected(f, &selection, &error), error);
        simulator()->fail_after("cuMemUnmap", 0, refusals, CUDA_ERROR_UNKNOWN);
        assert_int_equal(pause_all(f, &error), TMS_DRIVER);
        assert_shares(f, 0);
        tms_status_t status = resume_selected(f, &selection, &error);
        assert_shares(f, status == TMS_OK ? 2 : state_of(f, a) == TMS_SEGMENT_ACTIVE);
        simulator()->fail_after("cuMemUnmap", 0, 0, 0);
        ASSERT_OK(resume_selected(f, &selection, &error), error);
        assert_shares(f, 2);
    }
    ASSERT_OK(pause_all(f, &error), error);
    assert_shares(f, 0);
}

/* A resume that is undone, also where the driver keeps what it has mapped. */
static void a_resume_that_is_undone_takes_no_share(void **state) {
    fixture_t *f = *state;
    tms_error_t error;
    const tms_selection_t selection = {.exclusive = 1};
    allocate(f, "a", TMS_BACKUP_PINNED, 2 * MIB);
    allocate(f, "b", TMS_BACKUP_NONE, 4 * MIB);
    tms_log_init(&f->log, TMS_LOG_SILENT);
    for (int kept = 0; kept < 2; kept++) {
        ASSERT_OK(pause_all(f, &error), error);
        simulator()->fail_after("cuMemMap", 1, 1, CUDA_ERROR_UNKNOWN);
        if (kept) simulator()->fail_after("cuMemUnmap", 0, 1, CUDA_ERROR_UNKNOWN);
        assert_int_equal(resume_selected(f, &selection, &error), TMS_DRIVER);
        assert_shares(f, 0);
        ASSERT_OK(resume_selected(f, &selection, &error), error);
        assert_shares(f, 2);
    }
}

static int make_lock_directory(void **state) {
    (void)state;
    return make_temporary_directory(lock_directory, "locks") ? setenv("TMS_LOCK_DIR", lock_directory, 1) : -1;
}

static int remove_lock_directory(void **state) {
    (void)state;
    return remove_temporary_directory(lock_directory);
}

#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_device, teardown)
#define TWO(test) cmocka_unit_test_setup_teardown(test, setup_two_devices, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        ONE(an_exclusive_resume_waits_for_the_lock), ONE(the_lock_is_released_with_the_last_resumed_segment),
        ONE(the_lock_is_released_after_the_memory),  TWO(only_devices_that_are_locked_are_resumed),
        ONE(a_failed_resume_keeps_no_lock),          ONE(a_segment_has_one_share_at_most),
        ONE(damaged_segments_have_no_share),         ONE(a_resume_that_is_undone_takes_no_share),
    };
    return cmocka_run_group_tests(tests, make_lock_directory, remove_lock_directory);
}
