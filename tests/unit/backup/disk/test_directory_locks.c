/* Guards backup/disk/directory.c: the lock files that distinguish live from dead processes, and concurrent use by many
 * threads and processes. */
#include "support/disk_directory_fixture.h"

static void make_old(const char *path) {
    const struct timespec times[2] = {{.tv_sec = time(NULL) - 3600}, {.tv_sec = time(NULL) - 3600}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

/* On a file system whose locks are local to each machine, the lock of a live process on another machine can be acquired. */
static void test_files_of_other_lock_domains_stay(void **state) {
    (void)state;
    char lock[PATH_BYTES], backup[PATH_BYTES];
    const unsigned long long domains[] = {tms_disk_domain() ^ 1, 0};
    assert_true(tms_disk_domain() != 0 && tms_disk_domain() == tms_disk_domain());
    for (size_t i = 0; i < 2; i++) {
        for (int is_new = 0; is_new < 2; is_new++) {
            snprintf(lock, sizeof(lock), "tms-%016llx-999999991-0123456789abcde%d%s", domains[i], is_new,
                     is_new ? ".new" : ".lock");
            snprintf(backup, sizeof(backup), "tms-%016llx-999999991-0123456789abcde%d-1.backup", domains[i], is_new);
            put_file(below(lock), "kept");
            make_old(below(lock));
            put_file(below(backup), "kept");
        }
    }
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_int_equal(count_entries(base, ""), 8);
}

static void test_a_process_with_an_unknown_lock_domain(void **state) {
    (void)state;
    fault.stat_error = EACCES;
    assert_true(tms_disk_domain() == 0);
    put_file(below("tms-0000000000000000-999999991-0123456789abcdef.lock"), "kept");
    tms_disk_file_t *file = create(10);
    fault.stat_error = 0;
    assert_non_null(strstr(file->path, "/tms-0000000000000000-"));
    assert_entries(base, 1, 2);
    tms_disk_file_destroy(&disk, file);
    assert_int_equal(count_entries(base, ""), 1);
}

static void test_file_systems_without_locks(void **state) {
    (void)state;
    static const int errors[] = {ENOLCK, EOPNOTSUPP, EINTR, EIO};
    const int directory = open(base, O_PATH | O_DIRECTORY);
    put_file(below_own(DEAD ".lock"), "");
    put_file(below_own(DEAD "-1.backup"), "kept");
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        fault.flock_error = errors[i];
        tms_disk_file_t *file = create(10); /* works, and removes nothing, because it cannot be known which files are dead */
        fault.flock_error = 0;
        assert_entries(base, 2, 1);
        assert_int_equal(count_entries(base, ".unlocked"), 1);
        /* Another process cleans up concurrently. It can lock the files that it finds. */
        put_file(below_own(DEAD ".lock"), "");
        tms_disk_remove_dead(directory, &log_under_test);
        assert_true(tms_disk_file_is_usable(file));
        tms_disk_file_destroy(&disk, file);
        assert_int_equal(count_entries(base, ""), 0);
        put_file(below_own(DEAD ".lock"), "");
        put_file(below_own(DEAD "-1.backup"), "kept");
    }
    close(directory);

    /* Another process always acquires the lock first: the library gives up after a few names and leaves none of the files.
     */
    fault.flock_error = EWOULDBLOCK;
    assert_create_fails(10, TMS_BACKUP_IO, EWOULDBLOCK);
    assert_entries(base, 1, 1);
}

static void test_an_interrupted_lock_is_retried(void **state) {
    (void)state;
    fault.flock_interruptions = 3;
    tms_disk_file_t *file = create(10);
    assert_int_equal(fault.flock_interruptions, 0);
    assert_entries(base, 1, 1);
    tms_disk_file_destroy(&disk, file);
}

/* Another process cleans up at the worst moment: a lock file exists and is not locked yet. */
static unsigned clean_ups;

static void clean_up_beside(void) {
    int directory = open(base, O_PATH | O_DIRECTORY);
    assert_true(directory >= 0);
    fault.before_lock = NULL; /* it locks files, too */
    tms_disk_remove_dead(directory, &log_under_test);
    fault.before_lock = clean_up_beside;
    close(directory);
    clean_ups++;
}

static void test_a_clean_up_keeps_a_new_lock_file_that_is_not_locked_yet(void **state) {
    (void)state;
    clean_ups = 0;
    fault.before_lock = clean_up_beside;
    tms_disk_file_t *file = create(10);
    fault.before_lock = NULL;
    assert_int_equal(clean_ups, 2); /* before the lock, at the first attempt; and when our own clean-up reached it */
    assert_entries(base, 1, 1);
    assert_int_equal(count_entries(base, ""), 2);
    tms_disk_file_destroy(&disk, file);
    assert_int_equal(count_entries(base, ""), 0);
}

static void test_old_lock_files_that_were_never_locked_are_removed(void **state) {
    (void)state;
    static const char *const old[] = {DEAD ".new", "999999992-0123456789abcdef.new", "x-0123456789abcdef.new",
                                      DEAD ".new.new"};
    for (size_t i = 0; i < sizeof(old) / sizeof(old[0]); i++) {
        put_file(below_own(old[i]), "");
        make_old(below_own(old[i]));
    }
    put_file(below_own("999999993-0123456789abcdef.new"), ""); /* by a process that is about to lock it */
    int living = open(below_own(old[1]), O_RDWR);
    assert_int_equal(flock(living, LOCK_EX | LOCK_NB), 0);
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_false(exists(below_own(old[0])));
    for (size_t i = 1; i < sizeof(old) / sizeof(old[0]); i++) assert_true(exists(below_own(old[i])));
    assert_true(exists(below_own("999999993-0123456789abcdef.new")));
    close(living);
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_false(exists(below_own(old[1])));
}

static void test_a_lock_file_that_cannot_get_its_name(void **state) {
    (void)state;
    fault.renameat_error = EACCES;
    assert_create_fails(10, TMS_BACKUP_IO, EACCES);
    assert_string_equal(error.call, "renameat");
    assert_int_equal(count_entries(base, ""), 0);
    fault.renameat_error = 0;
    tms_disk_file_destroy(&disk, create(10));
}

enum { THREADS = 4, ROUNDS = 25 };

static void *make_and_remove_files(void *argument) {
    int *faults = argument;
    for (int round = 0; round < ROUNDS; round++) {
        tms_disk_file_t *files[3] = {NULL, NULL, NULL};
        char data[32];
        for (int i = 0; i < 3; i++) *faults += tms_disk_file_create(&disk, 32, &files[i], NULL, &context, NULL) != TMS_OK;
        for (int i = 0; i < 3; i++) {
            char expected[32];
            snprintf(expected, sizeof(expected), "%p %d %d", argument, round, i);
            *faults += tms_disk_file_write(files[i], expected, 32, 0, &context, NULL) != TMS_OK;
            *faults += tms_disk_file_read(files[i], data, 32, 0, &context, NULL) != TMS_OK;
            *faults += strcmp(data, expected) != 0;
        }
        for (int i = 0; i < 3; i++) tms_disk_file_destroy(&disk, files[i]);
    }
    return NULL;
}

static void test_threads(void **state) {
    (void)state;
    pthread_t threads[THREADS];
    int faults[THREADS] = {0};
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, make_and_remove_files, &faults[i]);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++) assert_int_equal(faults[i], 0);
    assert_entries(base, 0, 0);
    assert_int_equal(atomic_load(&disk.total), 0);
    assert_int_equal(disk.next_number, THREADS * ROUNDS * 3);
}

/* Processes that start, clean up and end concurrently must not take each other for dead. */
static void test_processes_in_one_directory(void **state) {
    (void)state;
    enum { PROCESSES = 4 };
    pid_t children[PROCESSES];
    fflush(NULL);
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            int faults = 0;
            make_and_remove_files(&faults);
            _exit(faults ? 1 : 0);
        }
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status = 0;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_entries(base, 0, 0);
}

/* Another process's clean-up may lock and remove a lock file between its creation and its locking. */
static void test_a_vanished_lock_file_is_recreated(void **state) {
    (void)state;
    fault.vanishing_locks = 3;
    tms_disk_file_t *file = create(10);
    assert_int_equal(fault.vanishing_locks, 0);
    assert_entries(base, 1, 1);
    char name[2 * PATH_BYTES];
    snprintf(name, sizeof(name), "%s.lock", file->owner_lock->prefix);
    assert_true(exists(name));
    tms_disk_file_destroy(&disk, file);
    fault.vanishing_locks = 1000; /* for ever: the library gives up */
    assert_create_fails(10, TMS_BACKUP_IO, 0);
    fault.vanishing_locks = 0;
    assert_entries(base, 0, 0);
}

int main(void) {
#define DISK_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        DISK_TEST(test_file_systems_without_locks),
        DISK_TEST(test_an_interrupted_lock_is_retried),
        DISK_TEST(test_files_of_other_lock_domains_stay),
        DISK_TEST(test_a_process_with_an_unknown_lock_domain),
        DISK_TEST(test_a_clean_up_keeps_a_new_lock_file_that_is_not_locked_yet),
        DISK_TEST(test_old_lock_files_that_were_never_locked_are_removed),
        DISK_TEST(test_a_lock_file_that_cannot_get_its_name),
        DISK_TEST(test_threads),
        DISK_TEST(test_processes_in_one_directory),
        DISK_TEST(test_a_vanished_lock_file_is_recreated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
