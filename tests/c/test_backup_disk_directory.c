/* backup_disk_directory.c: the directory, the lock that tells the living from the dead, and what must never be touched. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "backup_disk_directory.h"
#include "captured_stderr.h"
#include "disk_domain.h"
#include "disk_fixture.h"

static void test_set_directory(void **state) {
    (void)state;
    tms_disk_file_t *old = create(10);
    assert_int_equal(mkdir(below("a"), 0700), 0);
    assert_int_equal(mkdir(below("a/b"), 0700), 0);
    assert_int_equal(tms_disk_set_directory(&disk, below("a/b/c///"), &error), TMS_OK);
    assert_string_equal(disk.path, below("a/b/c"));
    assert_entries(below("a/b/c"), 0, 0); /* the attempt to make a file there has left nothing */
    tms_disk_file_t *new = create(20);
    assert_entries(base, 1, 1);
    assert_entries(below("a/b/c"), 1, 1);
    assert_int_equal(tms_disk_file_write(old, "0123456789", 10, 0, &context, &error), TMS_OK);
    tms_disk_file_destroy(&disk, old);
    assert_entries(base, 0, 0);
    assert_entries(below("a/b/c"), 1, 1);
    tms_disk_file_destroy(&disk, new);
    assert_entries(below("a/b/c"), 0, 0);
}

static void test_a_directory_name_that_begins_like_another(void **state) {
    (void)state;
    assert_int_equal(mkdir(below("x"), 0700), 0);
    assert_int_equal(tms_disk_set_directory(&disk, below("x/y"), &error), TMS_OK);
    tms_disk_file_t *inner = create(1);
    assert_int_equal(tms_disk_set_directory(&disk, below("x"), &error), TMS_OK);
    tms_disk_file_t *outer = create(1);
    assert_entries(below("x"), 1, 1);
    assert_entries(below("x/y"), 1, 1);
    assert_ptr_not_equal(inner->owner_lock, outer->owner_lock);
    tms_disk_file_destroy(&disk, inner);
    tms_disk_file_destroy(&disk, outer);
}

static void test_relative_directories_are_fixed_when_set(void **state) {
    (void)state;
    char *before = getcwd(NULL, 0);
    assert_non_null(before);
    assert_int_equal(chdir(base), 0);
    assert_int_equal(tms_disk_set_directory(&disk, "relative", &error), TMS_OK);
    assert_int_equal(chdir(before), 0);
    free(before);
    tms_disk_file_t *file = create(1);
    assert_entries(below("relative"), 1, 1);
    tms_disk_file_destroy(&disk, file);
}

static void test_bad_directories_change_nothing(void **state) {
    (void)state;
    put_file(below("regular"), "text");
    assert_int_equal(tms_disk_set_directory(&disk, NULL, &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_disk_set_directory(&disk, "", &error), TMS_INVALID_ARGUMENT);
    assert_int_equal(tms_disk_set_directory(&disk, below("regular"), &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOTDIR);
    assert_int_equal(tms_disk_set_directory(&disk, below("regular/below"), &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOTDIR);
    assert_string_equal(error.operation, "set_disk_backup_dir");
    assert_string_equal(error.call, "lstat");
    assert_non_null(strstr(error.message, below("regular/below")));
    assert_string_equal(disk.path, base);
    assert_file(below("regular"), "text");
    tms_disk_file_t *file = create(1);
    assert_entries(base, 1, 1);
    tms_disk_file_destroy(&disk, file);
}

/* A mount that is missing, or a misspelled path, must not become a directory on another disk. */
static void test_only_the_last_directory_is_made(void **state) {
    (void)state;
    assert_int_equal(tms_disk_set_directory(&disk, below("missing/backups"), &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOENT);
    assert_string_equal(error.call, "mkdir");
    assert_non_null(strstr(error.message, below("missing/backups")));
    assert_non_null(strstr(error.message, "create the directories above it first"));
    assert_int_equal(access(below("missing"), F_OK), -1);
    assert_string_equal(disk.path, base);
    assert_int_equal(mkdir(below("missing"), 0700), 0);
    assert_int_equal(tms_disk_set_directory(&disk, below("missing/backups"), &error), TMS_OK);
}

static void test_an_unwritable_directory(void **state) {
    (void)state;
    const uid_t user = geteuid(), other = 12345;
    if (user == 0) { /* root may write anywhere: become somebody who may not */
        assert_int_equal(chown(base, other, (gid_t)-1), 0);
        assert_int_equal(seteuid(other), 0);
    }
    int made = mkdir(below("closed"), 0500);
    tms_status_t direct = tms_disk_set_directory(&disk, below("closed"), &error);
    int direct_error = error.os_error;
    tms_status_t deeper = tms_disk_set_directory(&disk, below("closed/deeper"), &error);
    if (user == 0) assert_int_equal(seteuid(user), 0);
    assert_int_equal(made, 0);
    assert_int_equal(direct, TMS_BACKUP_IO);
    assert_int_equal(direct_error, EACCES);
    assert_int_equal(deeper, TMS_BACKUP_IO);
    assert_int_equal(error.os_error, EACCES);
    assert_string_equal(disk.path, base);
}

static void test_a_directory_that_vanished_is_made_again(void **state) {
    (void)state;
    assert_int_equal(tms_disk_set_directory(&disk, below("gone"), &error), TMS_OK);
    assert_int_equal(rmdir(below("gone")), 0);
    tms_disk_file_destroy(&disk, create(1));
    assert_entries(below("gone"), 0, 0);
    /* With something else in its place: an error, and the next call works again. */
    assert_int_equal(rmdir(below("gone")), 0);
    put_file(below("gone"), "");
    assert_create_fails(1, TMS_BACKUP_IO, ENOTDIR);
    assert_int_equal(unlink(below("gone")), 0);
    tms_disk_file_destroy(&disk, create(1));
}

/* A process of its own with `files` backup files in the directory. Returns when they are there; it then waits for its end.
 */
static pid_t start_process_with_files(int files) {
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails does not wait for it */
        tms_disk_directory_t own;
        _Atomic uint64_t own_total = 0;
        if (tms_disk_init(&own, disk.path, &log_under_test, &own_total, NULL) != TMS_OK) _exit(2);
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

/* As where each mount of a directory has locks of its own, on one machine. */
static void test_files_of_living_processes_stay_although_their_lock_can_be_had(void **state) {
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

/* Its parent may never wait for it. */
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

/* As after the program has started itself anew with exec. */
static void test_files_of_this_process_s_former_program_are_removed(void **state) {
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

/* The name of a file as a process of this lock domain makes it, from the number of the process on. */
static const char *own(const char *rest) {
    static char names[4][PATH_BYTES];
    static unsigned next;
    char *name = names[next++ % 4];
    snprintf(name, PATH_BYTES, "tms-%016llx-%s", (unsigned long long)tms_disk_domain(), rest);
    return name;
}

static const char *below_own(const char *rest) { return below(own(rest)); }

/* Numbers above all that Linux gives to processes. */
#define DEAD "999999991-0123456789abcdef"

static void make_old(const char *path) {
    const struct timespec times[2] = {{.tv_sec = time(NULL) - 3600}, {.tv_sec = time(NULL) - 3600}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void test_only_what_is_ours_is_removed(void **state) {
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
        "999999991-fedcba9876543210-1.backup", /* has no lock file: nothing says that its process is dead */
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

/* On a file system whose locks are local to each machine the lock of a living process of another one can be had. */
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

static void test_a_process_that_does_not_know_its_lock_domain(void **state) {
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

    /* A backup of ours that has become another user's is neither written nor read nor removed. */
    tms_disk_file_t *file = create(100);
    char data[100] = "", path[2 * PATH_BYTES];
    snprintf(path, sizeof(path), "%s", file->path);
    assert_int_equal(chown(path, other, (gid_t)-1), 0);
    assert_int_equal(tms_disk_file_write(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, EPERM);
    tms_disk_file_destroy(&disk, file);
    assert_true(exists(path));
}

static void test_file_systems_without_locks(void **state) {
    (void)state;
    static const int errors[] = {ENOLCK, EOPNOTSUPP, EINTR, EIO};
    const int directory = open(base, O_PATH | O_DIRECTORY);
    put_file(below_own(DEAD ".lock"), "");
    put_file(below_own(DEAD "-1.backup"), "kept");
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        fault.flock_error = errors[i];
        tms_disk_file_t *file = create(10); /* works, and removes nothing, since nothing can be told */
        fault.flock_error = 0;
        assert_entries(base, 2, 1);
        assert_int_equal(count_entries(base, ".unlocked"), 1);
        /* Another process, which can lock what it finds, cleans up beside it. */
        put_file(below_own(DEAD ".lock"), "");
        tms_disk_remove_dead(directory, &log_under_test);
        assert_true(tms_disk_file_is_usable(file));
        tms_disk_file_destroy(&disk, file);
        assert_int_equal(count_entries(base, ""), 0);
        put_file(below_own(DEAD ".lock"), "");
        put_file(below_own(DEAD "-1.backup"), "kept");
    }
    close(directory);

    /* A lock that another process always has first: given up after a few names, and none of them stays. */
    fault.flock_error = EWOULDBLOCK;
    assert_create_fails(10, TMS_BACKUP_IO, EWOULDBLOCK);
    assert_entries(base, 1, 1);
}

static void test_an_interrupted_lock_is_tried_again(void **state) {
    (void)state;
    fault.flock_interruptions = 3;
    tms_disk_file_t *file = create(10);
    assert_int_equal(fault.flock_interruptions, 0);
    assert_entries(base, 1, 1);
    tms_disk_file_destroy(&disk, file);
}

/* The clean-up of another process, at the worst moment: a lock file has been made, and nobody has locked it yet. */
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

static void test_a_clean_up_takes_no_lock_file_for_a_dead_one_s_that_is_not_locked_yet(void **state) {
    (void)state;
    clean_ups = 0;
    fault.before_lock = clean_up_beside;
    tms_disk_file_t *file = create(10);
    fault.before_lock = NULL;
    assert_int_equal(clean_ups, 2); /* before the lock, at the first attempt; and when our own clean-up met it */
    assert_entries(base, 1, 1);
    assert_int_equal(count_entries(base, ""), 2);
    tms_disk_file_destroy(&disk, file);
    assert_int_equal(count_entries(base, ""), 0);
}

static void test_lock_files_that_were_never_locked_are_removed_once_they_are_old(void **state) {
    (void)state;
    static const char *const old[] = {DEAD ".new", "999999992-0123456789abcdef.new", "x-0123456789abcdef.new",
                                      DEAD ".new.new"};
    for (size_t i = 0; i < sizeof(old) / sizeof(old[0]); i++) {
        put_file(below_own(old[i]), "");
        make_old(below_own(old[i]));
    }
    put_file(below_own("999999993-0123456789abcdef.new"), ""); /* by somebody who is about to lock it */
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
    assert_int_equal(atomic_load(&total), 0);
    assert_int_equal(disk.next_number, THREADS * ROUNDS * 3);
}

/* Processes that start, clean up and end at the same time must not take each other for dead. */
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

/* Another process's clean-up may lock and remove a lock file between its making and its locking. */
static void test_a_lock_file_that_vanishes_is_made_again(void **state) {
    (void)state;
    fault.vanishing_locks = 3;
    tms_disk_file_t *file = create(10);
    assert_int_equal(fault.vanishing_locks, 0);
    assert_entries(base, 1, 1);
    char name[2 * PATH_BYTES];
    snprintf(name, sizeof(name), "%s.lock", file->owner_lock->prefix);
    assert_true(exists(name));
    tms_disk_file_destroy(&disk, file);
    fault.vanishing_locks = 1000; /* for ever: given up */
    assert_create_fails(10, TMS_BACKUP_IO, 0);
    fault.vanishing_locks = 0;
    assert_entries(base, 0, 0);
}

int main(void) {
#define DISK_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        DISK_TEST(test_set_directory),
        DISK_TEST(test_a_directory_name_that_begins_like_another),
        DISK_TEST(test_relative_directories_are_fixed_when_set),
        DISK_TEST(test_bad_directories_change_nothing),
        DISK_TEST(test_only_the_last_directory_is_made),
        DISK_TEST(test_an_unwritable_directory),
        DISK_TEST(test_a_directory_that_vanished_is_made_again),
        DISK_TEST(test_files_of_dead_processes_are_removed),
        DISK_TEST(test_files_of_living_processes_stay),
        DISK_TEST(test_files_of_living_processes_stay_although_their_lock_can_be_had),
        DISK_TEST(test_files_of_zombies_are_removed),
        DISK_TEST(test_files_of_this_process_s_former_program_are_removed),
        DISK_TEST(test_only_what_is_ours_is_removed),
        DISK_TEST(test_files_of_other_users_stay),
        DISK_TEST(test_file_systems_without_locks),
        DISK_TEST(test_an_interrupted_lock_is_tried_again),
        DISK_TEST(test_files_of_other_lock_domains_stay),
        DISK_TEST(test_a_process_that_does_not_know_its_lock_domain),
        DISK_TEST(test_a_clean_up_takes_no_lock_file_for_a_dead_one_s_that_is_not_locked_yet),
        DISK_TEST(test_lock_files_that_were_never_locked_are_removed_once_they_are_old),
        DISK_TEST(test_a_lock_file_that_cannot_get_its_name),
        DISK_TEST(test_threads),
        DISK_TEST(test_processes_in_one_directory),
        DISK_TEST(test_a_lock_file_that_vanishes_is_made_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
