/* Guards private_directory.c and path_walk.c: whose directory is used, which is refused, which links are followed, and that
 * directories are created private. */
#include "base/private_directory.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "own_process.h"
#include "temporary.h"

enum { PERMISSIONS = 07777, OTHER_USER = 12345 };

static char base[TEMPORARY_BYTES];

static int make(void **state) {
    (void)state;
    return make_temporary_directory(base, "private") ? 0 : -1;
}

static int release(void **state) {
    (void)state;
    return remove_temporary_directory(base);
}

static int open_it(const char *configured, char path[PATH_MAX], tms_directory_failure_t *failure) {
    const tms_directory_choice_t choice = tms_private_directory(configured, base);
    return tms_private_directory_open(&choice, path, failure);
}

static void assert_opens(const char *configured, const char *expected) {
    char path[PATH_MAX];
    tms_directory_failure_t failure;
    int fd = open_it(configured, path, &failure);
    assert_true(fd >= 0);
    assert_string_equal(path, expected);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    close(fd);
}

static void assert_refused(const char *configured, int os_error) {
    char path[PATH_MAX];
    tms_directory_failure_t failure;
    assert_int_equal(open_it(configured, path, &failure), -1);
    assert_int_equal(failure.os_error, os_error);
}

/* Makes a directory below the one of the test. */
static void make_in(char path[PATH_MAX], const char *name, mode_t mode, uid_t owner) {
    snprintf(path, PATH_MAX, "%s/%s", base, name);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(chmod(path, mode), 0);
    assert_int_equal(chown(path, owner, (gid_t)-1), 0);
}

static void the_default_is_of_this_user(void **state) {
    (void)state;
    char path[PATH_MAX], expected[PATH_MAX];
    struct stat found;
    const tms_directory_choice_t unset = tms_private_directory("", base);
    snprintf(expected, sizeof expected, "%s/torch_memory_saver-%lu", base, (unsigned long)geteuid());
    assert_true(tms_directory_path(&unset, path));
    assert_string_equal(path, expected);
    assert_int_equal(access(path, F_OK), -1); /* only asked for */
    assert_opens(NULL, expected);
    assert_int_equal(stat(path, &found), 0);
    assert_int_equal(found.st_mode & PERMISSIONS, 0700);
    assert_int_equal(chmod(path, 0750), 0); /* others could look at its files */
    assert_refused(NULL, EPERM);
}

static void a_configured_one_is_used_if_only_its_user_writes_to_it(void **state) {
    (void)state;
    char path[PATH_MAX], wanted[PATH_MAX];
    snprintf(path, sizeof path, "%s/own", base);
    snprintf(wanted, sizeof wanted, "%s/own//", base);
    assert_opens(wanted, path);
    assert_int_equal(chmod(path, 0755), 0);
    assert_opens(wanted, path);
    assert_int_equal(chmod(path, 0720), 0);
    assert_refused(wanted, EPERM);
    assert_int_equal(chmod(path, 0702), 0);
    assert_refused(wanted, EPERM);
}

static void in_a_sticky_one_of_root_it_makes_its_own(void **state) {
    (void)state;
    char sticky[PATH_MAX], own[PATH_MAX + 64];
    struct stat found;
    tms_directory_failure_t failure;
    tms_directory_t opened;
    if (geteuid() != 0) skip();
    make_in(sticky, "sticky", 01777, 0);
    snprintf(own, sizeof own, "%s/torch_memory_saver-0", sticky);
    assert_opens(sticky, own);
    assert_int_equal(stat(own, &found), 0);
    assert_int_equal(found.st_mode & PERMISSIONS, 0700);
    assert_int_equal(chown(own, OTHER_USER, OTHER_USER), 0); /* another user was there first */
    assert_refused(sticky, EPERM);
    const tms_directory_choice_t exact = {.configured = sticky, .exact = true};
    assert_true(tms_directory_open(&exact, &opened, &failure));
    assert_string_equal(opened.path, sticky);
    assert_null(opened.shared);
    close(opened.fd);
    tms_directory_choice_t named = tms_private_directory(sticky, "/");
    named.own = "store";
    snprintf(own, sizeof own, "%s/store-0", sticky);
    assert_true(tms_directory_open(&named, &opened, &failure));
    assert_string_equal(opened.path, own);
    close(opened.fd);
    make_in(sticky, "of another", 01777, OTHER_USER);
    assert_refused(sticky, EPERM);
}

static void a_shared_one_is_opened_for_files_that_are_safe_in_it(void **state) {
    (void)state;
    char path[PATH_MAX];
    tms_directory_failure_t failure;
    tms_directory_t opened;
    make_in(path, "shared", 0777, geteuid());
    const tms_directory_choice_t choice = {.configured = path};
    assert_true(tms_directory_open(&choice, &opened, &failure));
    assert_non_null(opened.shared);
    close(opened.fd);
}

static void one_of_another_user_is_refused(void **state) {
    (void)state;
    char path[PATH_MAX];
    if (geteuid() != 0) skip();
    make_in(path, "others", 0700, OTHER_USER);
    assert_refused(path, EPERM);
}

/* Becomes another user, to whom a directory of root's is open. */
static void open_as_another_user(void) {
    char path[PATH_MAX];
    tms_directory_failure_t failure;
    snprintf(path, sizeof path, "%s/root", base);
    if (setuid(OTHER_USER) != 0) _exit(2);
    const tms_directory_choice_t choice = {.configured = path};
    tms_directory_t opened;
    _exit(tms_directory_open(&choice, &opened, &failure) && !opened.shared ? 0 : 1);
}

static void one_of_root_is_trusted(void **state) {
    (void)state;
    char path[PATH_MAX];
    if (geteuid() != 0) skip();
    make_in(path, "root", 0755, 0);
    assert_int_equal(chmod(base, 0755), 0);
    assert_int_equal(run_in_child(open_as_another_user), 0);
}

static void links_of_other_users_are_not_followed(void **state) {
    (void)state;
    char directory[PATH_MAX], link[PATH_MAX], inside[PATH_MAX + 8];
    tms_directory_failure_t failure;
    tms_directory_t opened;
    make_in(directory, "goal", 0700, geteuid());
    snprintf(link, sizeof link, "%s/link", base);
    snprintf(inside, sizeof inside, "%s/inside", link);
    assert_int_equal(symlink("goal", link), 0);
    assert_refused(link, ENOTDIR); /* although it is this user's */
    assert_opens(inside, inside);
    snprintf(inside, sizeof inside, "%s/inside", directory);
    assert_int_equal(access(inside, F_OK), 0);
    if (geteuid() != 0) return;
    assert_int_equal(lchown(link, OTHER_USER, OTHER_USER), 0);
    const tms_directory_choice_t choice = {.configured = link};
    assert_false(tms_directory_open(&choice, &opened, &failure));
    assert_int_equal(failure.os_error, EPERM);
    snprintf(inside, sizeof inside, "%s/inside", link);
    assert_refused(inside, EPERM);
}

static void what_is_no_directory_is_refused(void **state) {
    (void)state;
    char link[PATH_MAX], longer[PATH_MAX + 8], name[PATH_MAX];
    snprintf(link, sizeof link, "%s/loop", base);
    assert_int_equal(symlink(link, link), 0);
    snprintf(name, sizeof name, "%s/loop/inside", base);
    assert_refused(name, ELOOP);
    assert_refused("relative", EINVAL);
    assert_refused("/dev/null", ENOTDIR);
    memset(longer, 'x', sizeof longer - 1);
    longer[0] = '/';
    longer[sizeof longer - 1] = '\0';
    assert_refused(longer, ENAMETOOLONG);
    snprintf(name, sizeof name, "/%.300s", longer + 1);
    assert_refused(name, ENAMETOOLONG);
    snprintf(name, sizeof name, "%s/no/such", base); /* only the last one is made */
    assert_refused(name, ENOENT);
}

static void missing_parents_are_made_on_request(void **state) {
    (void)state;
    char path[PATH_MAX];
    struct stat found;
    tms_directory_failure_t failure;
    tms_directory_t opened;
    snprintf(path, sizeof path, "%s/a/b", base);
    const tms_directory_choice_t choice = {.configured = path, .walk = {.mode = 0700, .parents = true}};
    assert_true(tms_directory_open(&choice, &opened, &failure));
    close(opened.fd);
    *strrchr(path, '/') = '\0';
    assert_int_equal(stat(path, &found), 0);
    assert_int_equal(found.st_mode & PERMISSIONS, 0700);
}

int main(void) {
#define DIRECTORY_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        DIRECTORY_TEST(the_default_is_of_this_user),
        DIRECTORY_TEST(a_configured_one_is_used_if_only_its_user_writes_to_it),
        DIRECTORY_TEST(in_a_sticky_one_of_root_it_makes_its_own),
        DIRECTORY_TEST(a_shared_one_is_opened_for_files_that_are_safe_in_it),
        DIRECTORY_TEST(one_of_another_user_is_refused),
        DIRECTORY_TEST(one_of_root_is_trusted),
        DIRECTORY_TEST(links_of_other_users_are_not_followed),
        DIRECTORY_TEST(what_is_no_directory_is_refused),
        DIRECTORY_TEST(missing_parents_are_made_on_request),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
