/* Guards backup/disk/directory.c: the choice of the directory, the refusal of bad ones, and the loss of the directory. */
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

#include "backup/disk/directory.h"
#include "backup/disk/domain.h"
#include "captured_stderr.h"
#include "support/disk_fixture.h"

static void test_set_directory(void **state) {
    (void)state;
    tms_disk_file_t *old = create(10);
    assert_int_equal(mkdir(below("a"), 0700), 0);
    assert_int_equal(mkdir(below("a/b"), 0700), 0);
    assert_int_equal(tms_disk_set_directory(&disk, below("a/b/c///"), &error), TMS_OK);
    assert_string_equal(disk.path, below("a/b/c"));
    assert_entries(below("a/b/c"), 0, 0); /* the attempt to create a file there has left nothing */
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
    assert_string_equal(error.call, "openat");
    assert_non_null(strstr(error.message, below("regular/below")));
    assert_string_equal(disk.path, base);
    assert_file(below("regular"), "text");
    tms_disk_file_t *file = create(1);
    assert_entries(base, 1, 1);
    tms_disk_file_destroy(&disk, file);
}

/* A missing mount or a misspelled path must not become a directory on another disk. */
static void test_only_the_last_path_component_is_created(void **state) {
    (void)state;
    assert_int_equal(tms_disk_set_directory(&disk, below("missing/backups"), &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOENT);
    assert_string_equal(error.call, "mkdirat");
    assert_non_null(strstr(error.message, below("missing/backups")));
    assert_non_null(strstr(error.message, "create its parent directories first"));
    assert_int_equal(access(below("missing"), F_OK), -1);
    assert_string_equal(disk.path, base);
    assert_int_equal(mkdir(below("missing"), 0700), 0);
    assert_int_equal(tms_disk_set_directory(&disk, below("missing/backups"), &error), TMS_OK);
}

static void test_an_unwritable_directory(void **state) {
    (void)state;
    const uid_t user = geteuid(), other = 12345;
    if (user == 0) { /* root may write anywhere: become a user who may not */
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

static void test_a_vanished_directory_is_recreated(void **state) {
    (void)state;
    assert_int_equal(tms_disk_set_directory(&disk, below("gone"), &error), TMS_OK);
    assert_int_equal(rmdir(below("gone")), 0);
    tms_disk_file_destroy(&disk, create(1));
    assert_entries(below("gone"), 0, 0);
    /* If something else took its place, the call is an error, and the next call works again. */
    assert_int_equal(rmdir(below("gone")), 0);
    put_file(below("gone"), "");
    assert_create_fails(1, TMS_BACKUP_IO, ENOTDIR);
    assert_int_equal(unlink(below("gone")), 0);
    tms_disk_file_destroy(&disk, create(1));
}

int main(void) {
#define DISK_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        DISK_TEST(test_set_directory),
        DISK_TEST(test_a_directory_name_that_begins_like_another),
        DISK_TEST(test_relative_directories_are_fixed_when_set),
        DISK_TEST(test_bad_directories_change_nothing),
        DISK_TEST(test_only_the_last_path_component_is_created),
        DISK_TEST(test_an_unwritable_directory),
        DISK_TEST(test_a_vanished_directory_is_recreated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
