/* Guards single files of the disk store against failures of the system: files that cannot be removed, full disks, limits of
 * file sizes and descriptors. Each is an error that names the cause, and a retry succeeds once the cause is gone. Files that
 * somebody has changed are in test_tampering.c. */
#include "support/disk_hostile_fixture.h"

/* ---- failures of the system ---- */

static void the_quarantine_retries_failed_removals(void **state) {
    (void)state;
    tms_quarantine_t quarantine;
    assert_int_equal(tms_quarantine_init(&quarantine, &error), TMS_OK);
    disk.quarantine = &quarantine;
    tms_disk_file_t *first = create_saved(), *second = create_saved();
    unlinks_refused = 2;
    assert_destroyed_with_warnings(first, 1);
    assert_destroyed_with_warnings(second, 1);
    assert_entries(below("d"), 2, 1); /* with the lock, or the next process could not know that they are left over */
    assert_int_equal(atomic_load(&disk.total), 2 * BYTES);
    assert_int_equal(tms_quarantine_held(&quarantine, TMS_QUARANTINE_OTHER), 1);
    unlinks_refused = 1;
    tms_quarantine_retry(&quarantine);
    assert_entries(below("d"), 1, 1);
    assert_false(tms_quarantine_is_empty(&quarantine));
    unlinks_allowed = unlinks_refused = 1; /* the lock file */
    tms_quarantine_retry(&quarantine);
    assert_entries(below("d"), 0, 1);
    assert_false(tms_quarantine_is_empty(&quarantine));
    tms_quarantine_retry(&quarantine);
    assert_entries(below("d"), 0, 0);
    assert_true(tms_quarantine_is_empty(&quarantine));
    assert_int_equal(atomic_load(&disk.total), 0);
    assert_null(disk.files);
    assert_null(disk.locks);
    tms_quarantine_release(&quarantine);
}

static void the_next_file_retries_failed_removals(void **state) {
    (void)state;
    tms_disk_file_t *file = create_saved();
    unlinks_refused = 1;
    assert_destroyed_with_warnings(file, 1);
    assert_entries(below("d"), 1, 1);
    file = create_saved();
    assert_entries(below("d"), 1, 1);
    unlinks_refused = 1;
    assert_destroyed_with_warnings(file, 1);
    tms_disk_remove_all(&disk); /* and at exit */
    assert_entries(below("d"), 0, 0);
    assert_int_equal(atomic_load(&disk.total), 0);
}

/* In a child, because the limit cannot be raised again. SIGXFSZ would end it. */
static int child_with_a_file_size_limit(void) {
    struct rlimit limit = {.rlim_cur = BYTES - 1, .rlim_max = RLIM_INFINITY};
    signal(SIGXFSZ, SIG_DFL);
    tms_disk_after_fork_in_child(&disk);
    tms_disk_file_t *before = NULL, *file = NULL;
    if (tms_disk_file_create(&disk, BYTES, &before, NULL, &context, &error) != TMS_OK) return 10;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 11;
    if (tms_disk_file_create(&disk, BYTES, &file, NULL, &context, &error) != TMS_BACKUP_IO || error.os_error != EFBIG)
        return 12;
    if (save(before) != TMS_BACKUP_IO || error.os_error != EFBIG) return 13;
    fault.fallocate_error = EOPNOTSUPP; /* the other way of reserving space */
    if (tms_disk_file_create(&disk, BYTES, &file, NULL, &context, &error) != TMS_BACKUP_IO || error.os_error != EFBIG)
        return 14;
    if (count_entries(below("d"), ".backup") != 1) return 15;
    limit.rlim_cur = RLIM_INFINITY;
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0 || save(before) != TMS_OK || load(before) != TMS_OK) return 16;
    tms_disk_file_destroy(&disk, before);
    return 0;
}

/* A disk of 8 MiB for this process alone, which another file fills. Status 77: such a disk is not available here. */
static int child_on_a_full_disk(void) {
    tms_disk_after_fork_in_child(&disk);
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("small", below("d"), "tmpfs", 0, "size=8m") != 0)
        return 77;
    tms_disk_file_t *first = NULL, *file = NULL;
    if (tms_disk_file_create(&disk, BYTES, &first, NULL, &context, &error) != TMS_OK) return 10;
    if (tms_disk_file_create(&disk, 2 * BYTES, &file, NULL, &context, &error) != TMS_BACKUP_IO || error.os_error != ENOSPC)
        return 11;
    fault.fallocate_error = EOPNOTSUPP; /* so that the write is what finds the disk full */
    if (tms_disk_file_create(&disk, BYTES, &file, NULL, &context, &error) != TMS_OK) return 12;
    char command[4 * PATH_BYTES];
    snprintf(command, sizeof(command), "head -c 3m /dev/zero > '%s/filler'", below("d"));
    if (system(command) != 0) return 13;
    if (save(file) != TMS_BACKUP_IO || error.os_error != ENOSPC) return 14;
    if (save(first) != TMS_OK || load(first) != TMS_OK) return 15; /* its space was reserved */
    if (unlink(below("d/filler")) != 0 || save(file) != TMS_OK || load(file) != TMS_OK) return 16;
    tms_disk_file_destroy(&disk, first);
    tms_disk_file_destroy(&disk, file);
    return count_entries(below("d"), "") == 0 ? 0 : 17;
}

static int child_without_descriptors(void) {
    struct rlimit limit;
    tms_disk_after_fork_in_child(&disk);
    tms_disk_file_t *before = NULL, *file = NULL;
    if (tms_disk_file_create(&disk, BYTES, &before, NULL, &context, &error) != TMS_OK || save(before) != TMS_OK) return 10;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 11;
    rlim_t usual = limit.rlim_cur;
    limit.rlim_cur = 3;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 12;
    if (tms_disk_file_create(&disk, BYTES, &file, NULL, &context, &error) != TMS_BACKUP_IO || error.os_error != EMFILE)
        return 13;
    if (load(before) != TMS_BACKUP_IO || error.os_error != EMFILE) return 14;
    limit.rlim_cur = usual;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || load(before) != TMS_OK) return 15;
    if (tms_disk_file_create(&disk, BYTES, &file, NULL, &context, &error) != TMS_OK) return 16;
    tms_disk_file_destroy(&disk, before);
    tms_disk_file_destroy(&disk, file);
    return 0;
}

static int run_child(int (*body)(void)) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(body());
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status)) fail_msg("ended by signal %d", WTERMSIG(status));
    return WEXITSTATUS(status);
}

static void a_file_size_limit_is_an_error_and_no_signal(void **state) {
    (void)state;
    assert_int_equal(run_child(child_with_a_file_size_limit), 0);
}

static void a_full_disk_is_an_error_until_there_is_room(void **state) {
    (void)state;
    int status = run_child(child_on_a_full_disk);
    if (status == 77) {
        print_message("skipped: this process may not mount a small disk\n");
        skip();
    }
    assert_int_equal(status, 0);
}

static void lack_of_descriptors_is_an_error_until_some_are_free(void **state) {
    (void)state;
    assert_int_equal(run_child(child_without_descriptors), 0);
}

static int32_t stop(void *asked) {
    ++*(int *)asked;
    return 1;
}

static void a_reservation_can_be_interrupted(void **state) {
    (void)state;
    int asked = 0;
    tms_wait_t wait;
    tms_disk_file_t *file = NULL;
    tms_wait_begin(&wait, stop, &asked, 0);
    wait.polled -= 1; /* the callback is due */
    assert_int_equal(tms_disk_file_create(&disk, BYTES, &file, &wait, &context, &error), TMS_INTERRUPTED);
    assert_int_equal(asked, 1);
    assert_null(file);
    assert_entries(below("d"), 0, 0);
    assert_int_equal(atomic_load(&disk.total), 0);
    tms_disk_file_destroy(&disk, create(BYTES));
}

static unsigned count_descriptors(void) { return count_entries("/proc/self/fd", ""); }

static void no_descriptor_stays_open(void **state) {
    (void)state;
    unsigned before = count_descriptors();
    tms_disk_file_t *file = create_saved();
    assert_int_equal(count_descriptors(), before + 2); /* the directory and its lock */
    fault.fallocate_error = ENOSPC;
    assert_create_fails(BYTES, TMS_BACKUP_IO, ENOSPC);
    fault.fallocate_error = 0;
    assert_int_equal(truncate(file->path, 5), 0);
    assert_int_equal(load(file), TMS_BACKUP_IO);
    assert_int_equal(count_descriptors(), before + 2);
    tms_disk_file_destroy(&disk, file);
    assert_int_equal(count_descriptors(), before);
}

int main(void) {
#define DISK_TEST(test) cmocka_unit_test_setup_teardown(test, begin, release)
    const struct CMUnitTest tests[] = {
        DISK_TEST(the_quarantine_retries_failed_removals),
        DISK_TEST(the_next_file_retries_failed_removals),
        DISK_TEST(a_file_size_limit_is_an_error_and_no_signal),
        DISK_TEST(a_full_disk_is_an_error_until_there_is_room),
        DISK_TEST(lack_of_descriptors_is_an_error_until_some_are_free),
        DISK_TEST(a_reservation_can_be_interrupted),
        DISK_TEST(no_descriptor_stays_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
