/* Guards backup/shared/folder.c: which folders are refused, what is made, and what is left when it is closed or full. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sys/vfs.h>

#include "own_process.h"
#include "support/folder_fixture.h"

enum { OTHER_USER = 12345 };

/* ---- opening ---- */

static void a_new_folder(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    assert_int_equal(mode_of(root), 0700);
    assert_int_equal(mode_of(below("objects")), 0700);
    assert_int_equal(mode_of(below("holders")), 0700);
    assert_int_equal(mode_of(below("key")), 0400);
    assert_int_equal(links_of(below("key")), 1);
    assert_int_equal(count_names(root), 3);
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(strlen(folder->holder_name), TMS_SHARED_HOLDER_DIGITS);
    assert_int_equal(count_names(holder_path(folder, "")), 1);
    assert_true(is_locked(holder_path(folder, "lock")));
    assert_string_equal(folder->path, root);
    const int descriptors[] = {folder->root, folder->objects, folder->holder, folder->lock};
    for (size_t i = 0; i < 4; i++) assert_int_equal(fcntl(descriptors[i], F_GETFD), FD_CLOEXEC);
    close_folder(folder);
    assert_nothing_left();
    assert_true(exists(below("key")));
}

/* Opens the usual folder as a user that has no other process. */
static void open_as_new_user(void) {
    char wanted[64];
    tms_shared_folder_t folder;
    if (geteuid() != 0) _exit(SKIPPED);
    uid_t user = 1000000 + (uid_t)getpid();
    CHECK(setuid(user) == 0);
    snprintf(wanted, sizeof wanted, "/dev/shm/torch_memory_saver-store-%lu", (unsigned long)user);
    const char *const unset[] = {NULL, ""};
    for (size_t i = 0; i < 2; i++) {
        CHECK(tms_shared_folder_open(&folder, unset[i], &quiet, &context, &error) == TMS_OK);
        CHECK(strcmp(folder.path, wanted) == 0);
        CHECK(tms_shared_folder_is_current(&folder, unset[i]));
        tms_shared_folder_close(&folder, &quiet);
    }
    snprintf(root, sizeof root, "%s", wanted);
    CHECK(unlink(below("key")) == 0 && rmdir(below("objects")) == 0 && rmdir(below("holders")) == 0 && rmdir(wanted) == 0);
    _exit(0);
}

static void the_usual_folder_is_of_the_user(void **state) {
    (void)state;
    assert_exits(open_as_new_user);
}

static void in_a_sticky_folder_of_root_it_has_the_usual_name(void **state) {
    (void)state;
    char sticky[TEMPORARY_BYTES];
    if (geteuid() != 0) skip();
    snprintf(sticky, sizeof sticky, "%s", root);
    assert_int_equal(mkdir(sticky, 0700), 0);
    assert_int_equal(chmod(sticky, 01777), 0);
    snprintf(root, sizeof root, "%.200s/torch_memory_saver-store-0", sticky);
    tms_shared_folder_t folder;
    assert_int_equal(tms_shared_folder_open(&folder, sticky, &quiet, &context, &error), TMS_OK);
    assert_string_equal(folder.path, root);
    assert_true(tms_shared_folder_is_current(&folder, sticky));
    tms_shared_folder_close(&folder, &quiet);
    assert_nothing_left();
}

static void a_folder_that_others_can_write_to(void **state) {
    (void)state;
    assert_int_equal(mkdir(root, 0700), 0);
    const mode_t modes[] = {0720, 0702, 0777};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(chmod(root, modes[i]), 0);
        assert_refused(root, "no other user can write to it");
    }
    assert_int_equal(count_names(root), 0);
    assert_int_equal(chmod(root, 0755), 0);
    close_folder(open_folder());
}

static void a_folder_that_is_a_link(void **state) {
    (void)state;
    char target[TEMPORARY_BYTES + 8];
    snprintf(target, sizeof target, "%s/target", base);
    assert_int_equal(mkdir(target, 0700), 0);
    assert_int_equal(symlink(target, root), 0);
    assert_refused(root, "It is a symbolic link: name the folder itself in TMS_SHARED_DIR.");
    assert_int_equal(count_names(target), 0);
}

static void a_folder_that_is_a_file(void **state) {
    (void)state;
    int fd = creat(root, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_refused(root, "Not a directory");
    assert_non_null(strstr(error.message, "Set TMS_SHARED_DIR to another folder."));
    assert_int_equal(unlink(root), 0);
}

static void a_folder_of_another_user(void **state) {
    (void)state;
    if (geteuid() != 0) skip();
    assert_int_equal(mkdir(root, 0700), 0);
    assert_int_equal(chown(root, OTHER_USER, OTHER_USER), 0);
    assert_refused(root, "the check that it is this user's");
    assert_int_equal(count_names(root), 0);
}

/* A folder of root is trusted elsewhere, but its files are root's. */
static void open_roots(void) {
    tms_shared_folder_t folder;
    CHECK(setuid(OTHER_USER) == 0);
    CHECK(tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_BACKUP_IO);
    CHECK(strstr(error.message, "the check that it is this user's") && strstr(error.message, root));
    _exit(0);
}

static void a_folder_of_root(void **state) {
    (void)state;
    if (geteuid() != 0) skip();
    assert_int_equal(chmod(base, 0755), 0);
    assert_int_equal(mkdir(root, 0755), 0);
    assert_exits(open_roots);
    assert_int_equal(count_names(root), 0);
}

static void a_folder_that_is_not_in_memory(void **state) {
    (void)state;
    char path[64];
    struct statfs system;
    snprintf(path, sizeof path, "/proc/%d/task", (int)getpid());
    assert_refused(path, "is not on tmpfs");
    assert_non_null(strstr(error.message, "TMS_SHARED_DIR"));
    assert_int_equal(statfs("/dev/shm", &system), 0);
}

static void paths_that_are_not_there(void **state) {
    (void)state;
    char path[TEMPORARY_BYTES + 16];
    assert_refused("relative/folder", ". Set TMS_SHARED_DIR to an absolute path.");
    snprintf(path, sizeof path, "%s/missing/store", base);
    assert_refused(path, "mkdirat failed");
    assert_non_null(strstr(error.message, "Its parent directory does not exist: create it"));
    assert_null(strstr(error.message, "permissions"));
    snprintf(path, sizeof path, "%s/missing", base);
    assert_false(exists(path));
    put_file(root, "text", 0600);
    assert_refused(root, "openat failed");
    assert_non_null(strstr(error.message, "Set TMS_SHARED_DIR to another folder."));
}

static void is_current(void **state) {
    (void)state;
    char moved[TEMPORARY_BYTES + 16], other[TEMPORARY_BYTES + 16], slashes[TEMPORARY_BYTES + 16];
    snprintf(moved, sizeof moved, "%s/moved", base);
    snprintf(other, sizeof other, "%s/other", base);
    snprintf(slashes, sizeof slashes, "%s//", root);
    tms_shared_folder_t *folder = open_folder();
    assert_true(tms_shared_folder_is_current(folder, root));
    assert_true(tms_shared_folder_is_current(folder, slashes));
    assert_false(tms_shared_folder_is_current(folder, other));
    assert_int_equal(rename(root, moved), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    assert_int_equal(mkdir(root, 0700), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    assert_int_equal(rmdir(root), 0);
    assert_int_equal(symlink(moved, root), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    assert_int_equal(unlink(root), 0);
    assert_int_equal(rename(moved, root), 0);
    assert_true(tms_shared_folder_is_current(folder, root));
    assert_int_equal(rename(below("objects"), below("old")), 0);
    assert_int_equal(mkdir(below("objects"), 0700), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    assert_int_equal(rmdir(below("objects")), 0);
    assert_int_equal(rename(below("old"), below("objects")), 0);
    assert_true(tms_shared_folder_is_current(folder, root));
    assert_int_equal(unlink(holder_path(folder, "lock")), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    close_folder(folder);
    assert_nothing_left();
    tms_shared_folder_t closed = {.root = -1, .objects = -1, .holder = -1, .lock = -1};
    assert_false(tms_shared_folder_is_current(&closed, root));
}

static void a_folder_that_is_not_open_is_closed(void **state) {
    (void)state;
    /* The other descriptors are those of another file. */
    int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_true(file >= 0);
    tms_shared_folder_t folder = {.root = -1, .objects = file, .holder = file, .lock = file};
    tms_shared_folder_close(&folder, &quiet);
    assert_int_equal(fcntl(file, F_GETFD), FD_CLOEXEC);
    folder = (tms_shared_folder_t){.root = -1, .objects = file, .holder = file, .lock = file};
    tms_shared_folder_after_fork_in_child(&folder);
    assert_int_equal(fcntl(file, F_GETFD), FD_CLOEXEC);
    tms_shared_folder_close(&folder, &quiet);
    assert_int_equal(folder.root, -1);
    close(file);
}

static void closing_removes_the_objects_that_nobody_else_has(void **state) {
    (void)state;
    bool written;
    tms_shared_folder_t *folder = open_folder(), *second = open_folder();
    for (unsigned i = 1; i <= 3; i++) assert_true(get_object(folder, i, &written));
    assert_true(get_object(second, 2, &written));
    assert_false(written);
    close_folder(folder);
    assert_int_equal(count_names(below("objects")), 1);
    assert_int_equal(links_of(object_path(2, "")), 2);
    close_folder(second);
    assert_nothing_left();
}

static void a_folder_that_was_deleted_is_closed(void **state) {
    (void)state;
    char command[TEMPORARY_BYTES + 16];
    bool written;
    tms_shared_folder_t *folder = open_folder();
    assert_true(get_object(folder, 1, &written));
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    assert_int_equal(system(command), 0);
    assert_false(tms_shared_folder_is_current(folder, root));
    tms_shared_folder_clean(folder, &quiet);
    close_folder(folder);
    assert_false(exists(root));
    close_folder(open_folder());
}

/* ---- failures ---- */

static void a_holder_that_is_never_made(void **state) {
    (void)state;
    tms_shared_folder_t folder;
    inject(CALL_flock, EWOULDBLOCK, 0, 1000);
    assert_int_equal(tms_shared_folder_open(&folder, root, &quiet, &context, &error), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, EWOULDBLOCK);
    assert_true(fault.fired > 1 && fault.fired < 1000);
    inject_nothing();
    assert_nothing_left();
    inject(CALL_flock, EINTR, 0, 3);
    close_folder(open_folder());
    assert_int_equal(fault.fired, 3);
}

static void a_full_folder(void **state) {
    (void)state;
    tms_shared_folder_t folder;
    const call_t calls[] = {CALL_mkdirat, CALL_openat, CALL_pwrite, CALL_linkat};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        bool failed = true;
        for (unsigned nth = 0; failed; nth++) {
            inject(calls[i], ENOSPC, nth, 1);
            failed = tms_shared_folder_open(&folder, root, &quiet, &context, &error) != TMS_OK;
            assert_true(failed || fault.fired == 0);
            inject_nothing();
            if (!failed) tms_shared_folder_close(&folder, &quiet);
            if (!failed) break;
            assert_int_equal(error.status, TMS_BACKUP_IO);
            assert_int_equal(error.os_error, ENOSPC);
            assert_non_null(strstr(error.message, root));
            assert_non_null(strstr(error.message, "TMS_SHARED_DIR"));
            assert_non_null(strstr(error.message, "--shm-size"));
            assert_nothing_left();
            (void)unlink(below("key"));
        }
        (void)unlink(below("key"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        FOLDER_TEST(a_new_folder),
        FOLDER_TEST(the_usual_folder_is_of_the_user),
        FOLDER_TEST(in_a_sticky_folder_of_root_it_has_the_usual_name),
        FOLDER_TEST(a_folder_that_others_can_write_to),
        FOLDER_TEST(a_folder_that_is_a_link),
        FOLDER_TEST(a_folder_that_is_a_file),
        FOLDER_TEST(a_folder_of_another_user),
        FOLDER_TEST(a_folder_of_root),
        FOLDER_TEST(a_folder_that_is_not_in_memory),
        FOLDER_TEST(paths_that_are_not_there),
        FOLDER_TEST(is_current),
        FOLDER_TEST(a_folder_that_is_not_open_is_closed),
        FOLDER_TEST(closing_removes_the_objects_that_nobody_else_has),
        FOLDER_TEST(a_folder_that_was_deleted_is_closed),
        FOLDER_TEST(a_holder_that_is_never_made),
        FOLDER_TEST(a_full_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
