/* Guards backup/disk/disk.c: the files, their contents, and every failure of creating or using one. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "captured_stderr.h"
#include "support/disk_fixture.h"

static void test_nothing_happens_before_the_first_file(void **state) {
    (void)state;
    tms_disk_directory_t other;
    assert_int_equal(tms_disk_init(&other, below("later"), &log_under_test, &error), TMS_OK);
    assert_false(exists(below("later")));
    tms_disk_file_t *file = NULL;
    assert_int_equal(tms_disk_file_create(&other, 10, &file, NULL, &context, &error), TMS_OK);
    struct stat found;
    assert_int_equal(stat(below("later"), &found), 0);
    assert_int_equal(found.st_mode & 0777, 0700);
    assert_entries(below("later"), 1, 1);
    tms_disk_file_destroy(&other, file);
    tms_disk_release(&other);
    assert_entries(below("later"), 0, 0);
}

static void test_contents(void **state) {
    (void)state;
    const uint64_t bytes = 3 * MIB + 5;
    unsigned char *written = malloc(bytes), *got = calloc(1, bytes);
    assert_non_null(written);
    assert_non_null(got);
    for (uint64_t i = 0; i < bytes; i++) written[i] = (unsigned char)(i * 31 + (i >> 12));
    tms_disk_file_t *file = create(bytes);
    assert_int_equal(file->bytes, bytes);
    assert_int_equal(atomic_load(&disk.total), bytes);
    for (int round = 0; round < 2; round++) { /* in two transfers; then with short and interrupted ones */
        assert_int_equal(tms_disk_file_write(file, written, 2 * MIB, 0, &context, &error), TMS_OK);
        assert_int_equal(tms_disk_file_write(file, written + 2 * MIB, bytes - 2 * MIB, 2 * MIB, &context, &error), TMS_OK);
        memset(got, 0, bytes);
        assert_int_equal(tms_disk_file_read(file, got + MIB, bytes - MIB, MIB, &context, &error), TMS_OK);
        assert_int_equal(tms_disk_file_read(file, got, MIB, 0, &context, &error), TMS_OK);
        assert_memory_equal(got, written, bytes);
        for (uint64_t i = 0; i < bytes; i++) written[i] ^= 0xFF;
        fault.transfer_most = 4097;
        fault.interruptions = 3;
    }
    struct stat found;
    assert_int_equal(stat(file->path, &found), 0);
    assert_int_equal(found.st_size, bytes);
    tms_disk_file_destroy(&disk, file);
    assert_int_equal(atomic_load(&disk.total), 0);
    free(written);
    free(got);
}

static void test_files_are_private_and_reserved(void **state) {
    (void)state;
    struct stat found;
    mode_t mask = umask(0);
    tms_disk_file_t *file = create(5 * MIB);
    umask(mask);
    assert_int_equal(stat(file->path, &found), 0);
    assert_int_equal(found.st_mode & 07777, 0600);
    assert_int_equal(found.st_size, 5 * MIB);
    assert_true((uint64_t)found.st_blocks * 512 >= 5 * MIB);
    assert_int_equal(file->path[0], '/');
    assert_memory_equal(file->path, base, strlen(base));
    tms_disk_file_destroy(&disk, file);
}

static void test_the_lock_lives_as_long_as_files_do(void **state) {
    (void)state;
    tms_disk_file_t *files[3];
    for (int i = 0; i < 3; i++) files[i] = create((uint64_t)i * 1000); /* also an empty one */
    assert_entries(base, 3, 1);
    tms_disk_file_destroy(&disk, files[1]);
    tms_disk_file_destroy(&disk, files[2]);
    assert_entries(base, 1, 1);
    assert_int_equal(atomic_load(&disk.total), 0);
    tms_disk_file_destroy(&disk, files[0]);
    assert_entries(base, 0, 0);
    tms_disk_file_destroy(&disk, NULL);
    assert_null(disk.files);
    assert_null(disk.locks);
}

static void test_lack_of_space_leaves_nothing_behind(void **state) {
    (void)state;
    fault.fallocate_error = ENOSPC;
    assert_create_fails(MIB, TMS_BACKUP_IO, ENOSPC);
    assert_string_equal(error.call, "fallocate");
    assert_entries(base, 0, 0);
    assert_int_equal(atomic_load(&disk.total), 0);
    fault.fallocate_error = 0;
    assert_create_fails(UINT64_MAX, TMS_BACKUP_IO, EFBIG);
    /* More than the file system has: refused before any of it is reserved. */
    assert_create_fails(UINT64_C(1) << 62, TMS_BACKUP_IO, ENOSPC);
    assert_int_equal(fault.reserved, 0);
    assert_entries(base, 0, 0);
    assert_int_equal(atomic_load(&disk.total), 0);
    assert_null(disk.files);
}

static void test_interrupted_reservation(void **state) {
    (void)state;
    fault.interruptions = 5;
    tms_disk_file_t *file = create(70 * MIB); /* more than one step */
    struct stat found;
    assert_int_equal(stat(file->path, &found), 0);
    assert_int_equal(found.st_size, 70 * MIB);
    tms_disk_file_destroy(&disk, file);
}

static void test_file_systems_without_fallocate(void **state) {
    (void)state;
    static const int errors[] = {EOPNOTSUPP, ENOSYS, EINVAL};
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
        struct stat found;
        fault.fallocate_error = errors[i];
        tms_disk_file_t *file = create(MIB);
        assert_int_equal(stat(file->path, &found), 0);
        assert_int_equal(found.st_size, MIB);
        tms_disk_file_destroy(&disk, file);
        assert_create_fails(UINT64_C(1) << 60, TMS_BACKUP_IO, ENOSPC); /* more than is free */
        assert_entries(base, 0, 0);
    }
}

static void test_failed_transfers(void **state) {
    (void)state;
    char data[100] = "contents";
    tms_disk_file_t *file = create(100);
    fault.pwrite_error = ENOSPC;
    assert_int_equal(tms_disk_file_write(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOSPC);
    assert_string_equal(error.call, "pwrite");
    assert_non_null(strstr(error.message, file->path));
    assert_non_null(strstr(error.message, "iB of free space. Check the free space"));
    assert_non_null(strstr(error.message, "TMS_DISK_BACKUP_DIR"));
    assert_null(strstr(error.message, "TMS_SHARED_DIR"));
    assert_null(strstr(error.message, "permissions"));
    fault.pwrite_error = 0;
    assert_int_equal(tms_disk_file_write(file, data, 100, 0, &context, &error), TMS_OK);

    assert_int_equal(truncate(file->path, 60), 0);
    assert_int_equal(tms_disk_file_read(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_non_null(strstr(error.message, "was changed or truncated: it ends at offset 60 of 100"));
    assert_null(strstr(error.message, "free space"));

    assert_int_equal(unlink(file->path), 0);
    assert_int_equal(tms_disk_file_read(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOENT);
    assert_null(strstr(error.message, "Check the")); /* neither space nor permissions have removed the file */
    assert_int_equal(tms_disk_file_write(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOENT);
    assert_entries(base, 0, 1);
    tms_disk_file_destroy(&disk, file); /* an already removed file is not reported */
    assert_entries(base, 0, 0);
}

static void test_links_are_never_followed(void **state) {
    (void)state;
    char next[2 * PATH_BYTES], data[100] = "overwritten";
    put_file(below("victim"), "precious");
    tms_disk_file_t *file = create(100);
    snprintf(next, sizeof(next), "%s-%u.backup", file->owner_lock->prefix, disk.next_number);

    /* At the path where the next file is to be created. */
    assert_int_equal(symlink(below("victim"), next), 0);
    assert_create_fails(100, TMS_BACKUP_IO, EEXIST);
    assert_int_equal(unlink(next), 0);

    /* At the path of a created file. */
    assert_int_equal(unlink(file->path), 0);
    assert_int_equal(symlink(below("victim"), file->path), 0);
    assert_int_equal(tms_disk_file_write(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ELOOP);
    assert_int_equal(tms_disk_file_read(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    snprintf(next, sizeof(next), "%s", file->path);
    captured_stderr_t captured = capture_begin();
    tms_disk_file_destroy(&disk, file);
    char output[4096];
    capture_end(captured, output, sizeof(output));
    assert_int_equal(count_lines(output), 1);
    assert_non_null(strstr(output, "was not removed"));
    assert_true(exists(next));
    assert_file(below("victim"), "precious");

    /* A FIFO neither blocks nor is written to. */
    file = create(100);
    assert_int_equal(unlink(file->path), 0);
    assert_int_equal(mkfifo(file->path, 0600), 0);
    assert_int_equal(tms_disk_file_write(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(tms_disk_file_read(file, data, 100, 0, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(unlink(file->path), 0);
    tms_disk_file_destroy(&disk, file);
}

/* A separate process with `files` backup files in the directory. Returns when they exist; the process then waits until it
 * is killed. */
static void test_remove_all(void **state) {
    (void)state;
    tms_disk_file_t *first = create(10);
    assert_int_equal(tms_disk_set_directory(&disk, below("second"), &error), TMS_OK);
    tms_disk_file_t *second = create(20);
    assert_int_equal(atomic_load(&disk.total), 30);
    tms_disk_remove_all(&disk);
    assert_entries(base, 0, 0);
    assert_entries(below("second"), 0, 0);
    assert_int_equal(atomic_load(&disk.total), 0);
    tms_disk_file_t *third = create(30); /* usable again */
    tms_disk_file_destroy(&disk, first);
    tms_disk_file_destroy(&disk, second);
    assert_int_equal(atomic_load(&disk.total), 30);
    assert_entries(below("second"), 1, 1);
    tms_disk_file_destroy(&disk, third);
}

/* What a forked child does before its exit. Runs after tms_disk_after_fork_in_child; returns 0 on success. */
static int child_forgets(tms_disk_file_t *inherited) {
    char path[2 * PATH_BYTES];
    snprintf(path, sizeof(path), "%s", inherited->path);
    if (disk.files || disk.locks || atomic_load(&disk.total) != 0) return 10;
    tms_disk_remove_all(&disk);
    if (!exists(path)) return 11;
    tms_disk_file_destroy(&disk, inherited);
    if (!exists(path)) return 12;
    tms_disk_file_t *own = NULL; /* also removes files of dead processes; the parent is alive */
    if (tms_disk_file_create(&disk, 5, &own, NULL, &context, NULL) != TMS_OK) return 13;
    if (!exists(path) || count_entries(base, ".lock") != 2) return 14;
    tms_disk_file_destroy(&disk, own);
    return exists(path) ? 0 : 15;
}

static void test_a_forked_child_changes_nothing(void **state) {
    (void)state;
    char data[10] = "";
    tms_disk_file_t *file = create(10);
    int lock_fd = file->owner_lock->fd;
    assert_int_equal(tms_disk_file_write(file, "0123456789", 10, 0, &context, &error), TMS_OK);
    fflush(NULL);
    pthread_mutex_lock(&disk.lock); /* as the handler before a fork does */
    pid_t child = fork();
    if (child != 0) pthread_mutex_unlock(&disk.lock);
    assert_true(child >= 0);
    if (child == 0) {
        tms_disk_after_fork_in_child(&disk);
        _exit(fcntl(lock_fd, F_GETFD) == -1 ? child_forgets(file) : 16);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_entries(base, 1, 1);
    assert_int_equal(tms_disk_file_read(file, data, 10, 0, &context, &error), TMS_OK);
    assert_memory_equal(data, "0123456789", 10);
    tms_disk_file_destroy(&disk, file);
    assert_entries(base, 0, 0);
}

int main(void) {
#define DISK_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        DISK_TEST(test_nothing_happens_before_the_first_file),
        DISK_TEST(test_contents),
        DISK_TEST(test_files_are_private_and_reserved),
        DISK_TEST(test_the_lock_lives_as_long_as_files_do),
        DISK_TEST(test_lack_of_space_leaves_nothing_behind),
        DISK_TEST(test_interrupted_reservation),
        DISK_TEST(test_file_systems_without_fallocate),
        DISK_TEST(test_failed_transfers),
        DISK_TEST(test_links_are_never_followed),
        DISK_TEST(test_remove_all),
        DISK_TEST(test_a_forked_child_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
