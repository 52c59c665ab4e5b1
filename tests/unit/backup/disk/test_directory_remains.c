/* Guards backup/disk/directory.c: which files of earlier processes are removed, and which must never be changed. */
#include "support/disk_directory_fixture.h"

/* A separate process with `files` backup files in the directory. Returns when they exist; the process then waits until it
 * is killed. */
static pid_t start_process_with_files(int files) {
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test does not wait for it */
        tms_disk_directory_t own;
        if (tms_disk_init(&own, disk.path, &log_under_test, NULL) != TMS_OK) _exit(2);
        for (int i = 0; i < files; i++) {
            tms_disk_file_t *file = NULL;
            if (tms_disk_file_create(&own, 1000, &file, NULL, &context, NULL) != TMS_OK) _exit(3);
        }
        if (write(ready[1], "x", 1) != 1) _exit(4);
        for (;;) pause();
    }
    close(ready[1]);
    ssize_t got = read(ready[0], &byte, 1);
    close(ready[0]);
    assert_int_equal(got, 1);
    return child;
}

static void kill_process(pid_t child) {
    int status = 0;
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
}

static void test_files_of_dead_processes_are_removed(void **state) {
    (void)state;
    pid_t dead = start_process_with_files(3);
    kill_process(dead);
    assert_entries(base, 3, 1);
    tms_disk_file_t *file = create(10); /* the first file is the first use of the directory */
    assert_entries(base, 1, 1);
    assert_true(exists(file->path));
    tms_disk_file_destroy(&disk, file);

    kill_process(start_process_with_files(2));
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_entries(base, 0, 0);
}

static void test_files_of_living_processes_stay(void **state) {
    (void)state;
    pid_t living = start_process_with_files(2), dead = start_process_with_files(3);
    kill_process(dead);
    tms_disk_file_t *file = create(10);
    assert_entries(base, 3, 2);
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_entries(base, 3, 2);
    tms_disk_file_destroy(&disk, file);
    assert_entries(base, 2, 1);
    kill_process(living);
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_entries(base, 0, 0);
}

/* As if each mount of a directory had locks of its own, on one machine. */
static void test_files_of_living_processes_stay_although_their_lock_can_be_acquired(void **state) {
    (void)state;
    pid_t living = start_process_with_files(2), dead = start_process_with_files(3);
    kill_process(dead);
    fault.local_locks = true;
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_entries(base, 2, 1);
    kill_process(living);
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_entries(base, 0, 0);
}

/* Its parent may never reap it. */
static void test_files_of_zombies_are_removed(void **state) {
    (void)state;
    siginfo_t ended;
    pid_t zombie = start_process_with_files(2);
    assert_int_equal(kill(zombie, SIGKILL), 0);
    assert_int_equal(waitid(P_PID, (id_t)zombie, &ended, WEXITED | WNOWAIT), 0);
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_entries(base, 0, 0);
    assert_int_equal(waitpid(zombie, NULL, 0), zombie);
}

/* As after an exec of the program by itself. */
static void test_files_from_before_an_exec_are_removed(void **state) {
    (void)state;
    char lock[PATH_BYTES], backup[PATH_BYTES];
    const unsigned long long domain = tms_disk_domain();
    snprintf(lock, sizeof(lock), "tms-%016llx-%ld-0123456789abcdef.lock", domain, (long)getpid());
    snprintf(backup, sizeof(backup), "tms-%016llx-%ld-0123456789abcdef-1.backup", domain, (long)getpid());
    put_file(below(lock), "");
    put_file(below(backup), "old");
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_entries(base, 0, 0);
}

static void test_only_our_own_files_are_removed(void **state) {
    (void)state;
    static const char *const kept[] = {
        "999999991.lock",
        "x-0123456789abcdef.lock",
        "999999991-0123456789abcde.lock",
        "999999991-0123456789abcdef0.lock",
        DEAD ".backup",
        DEAD "-.backup",
        DEAD "-1x.backup",
        DEAD "-1.backup.bak",
        "999999991-fedcba9876543210-1.backup", /* has no lock file: nothing shows that its process is dead */
    };
    put_file(below("victim"), "precious");
    for (size_t i = 0; i < sizeof(kept) / sizeof(kept[0]); i++) put_file(below_own(kept[i]), "kept");
    put_file(below("notes.txt"), "kept");
    put_file(below("tms-999999991-0123456789abcdef.lock"), "kept"); /* without a domain */
    put_file(below_own(DEAD ".lock"), "");
    put_file(below_own(DEAD "-1.backup"), "old");
    assert_int_equal(symlink(below("victim"), below_own(DEAD "-2.backup")), 0);
    assert_int_equal(mkdir(below_own(DEAD "-3.backup"), 0700), 0);
    assert_int_equal(symlink(below("victim"), below_own("999999992-0123456789abcdef.lock")), 0);
    put_file(below_own("999999992-0123456789abcdef-1.backup"), "kept");
    assert_int_equal(mkfifo(below_own("999999993-0123456789abcdef.lock"), 0600), 0);
    put_file(below_own("999999993-0123456789abcdef-1.backup"), "kept");

    captured_stderr_t captured = capture_begin();
    tms_status_t status = tms_disk_set_directory(&disk, base, &error);
    char output[4096];
    capture_end(captured, output, sizeof(output));
    assert_int_equal(status, TMS_OK);
    assert_int_equal(count_lines(output), 2); /* the link and the directory */
    assert_false(exists(below_own(DEAD ".lock")));
    assert_false(exists(below_own(DEAD "-1.backup")));
    assert_true(exists(below_own(DEAD "-2.backup")));
    assert_true(exists(below_own(DEAD "-3.backup")));
    assert_true(exists(below_own("999999992-0123456789abcdef.lock")));
    assert_file(below_own("999999992-0123456789abcdef-1.backup"), "kept");
    assert_true(exists(below_own("999999993-0123456789abcdef.lock")));
    assert_file(below_own("999999993-0123456789abcdef-1.backup"), "kept");
    for (size_t i = 0; i < sizeof(kept) / sizeof(kept[0]); i++) assert_file(below_own(kept[i]), "kept");
    assert_file(below("victim"), "precious");
    assert_file(below("notes.txt"), "kept");
    assert_file(below("tms-999999991-0123456789abcdef.lock"), "kept");
}

static void test_files_of_other_users_stay(void **state) {
    (void)state;
    if (geteuid() != 0) {
        print_message("skipped: only root can make files of another user\n");
        skip();
    }
    const uid_t other = 12345;
    put_file(below_own(DEAD ".lock"), "");
    put_file(below_own(DEAD "-1.backup"), "kept");
    assert_int_equal(chown(below_own(DEAD ".lock"), other, (gid_t)-1), 0);
    put_file(below_own("999999992-0123456789abcdef.lock"), "");
    put_file(below_own("999999992-0123456789abcdef-1.backup"), "kept");
    assert_int_equal(chown(below_own("999999992-0123456789abcdef-1.backup"), other, (gid_t)-1), 0);
    tms_log_init(&log_under_test, TMS_LOG_SILENT);
    assert_int_equal(tms_disk_set_directory(&disk, base, &error), TMS_OK);
    assert_true(exists(below_own(DEAD ".lock")));
    assert_file(below_own(DEAD "-1.backup"), "kept");
    assert_false(exists(below_own("999999992-0123456789abcdef.lock")));
    assert_file(below_own("999999992-0123456789abcdef-1.backup"), "kept");

    /* A backup of ours whose owner has changed is neither written nor read nor removed. */
    tms_disk_file_t *file = create(100);
    char data[100] = "", path[2 * PATH_BYTES];
    snprintf(path, sizeof(path), "%s", file->path);
    assert_int_equal(chown(path, other, (gid_t)-1), 0);
    assert_int_equal(tms_disk_file_write(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, EPERM);
    tms_disk_file_destroy(&disk, file);
    assert_true(exists(path));
}

int main(void) {
#define DISK_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        DISK_TEST(test_files_of_dead_processes_are_removed),
        DISK_TEST(test_files_of_living_processes_stay),
        DISK_TEST(test_files_of_living_processes_stay_although_their_lock_can_be_acquired),
        DISK_TEST(test_files_of_zombies_are_removed),
        DISK_TEST(test_files_from_before_an_exec_are_removed),
        DISK_TEST(test_only_our_own_files_are_removed),
        DISK_TEST(test_files_of_other_users_stay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
