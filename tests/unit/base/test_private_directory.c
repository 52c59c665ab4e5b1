/* Guards private_directory.c: whose directory is used, which is refused, and that it is created private. */
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

#include "temporary.h"

enum { PERMISSIONS = 07777 };

static char base[TEMPORARY_BYTES];

static int make(void **state) {
    (void)state;
    return make_temporary_directory(base, "private") ? 0 : -1;
}

static int release(void **state) {
    (void)state;
    return remove_temporary_directory(base);
}

static int open_it(const char *configured, char path[PATH_MAX], tms_private_directory_failure_t *failure) {
    const tms_private_directory_t directory = {.configured = configured, .parent = base};
    return tms_private_directory_open(&directory, path, failure);
}

static void the_default_is_of_this_user(void **state) {
    (void)state;
    char path[PATH_MAX], expected[PATH_MAX];
    struct stat found;
    tms_private_directory_failure_t failure;
    const tms_private_directory_t unset = {.configured = "", .parent = base};
    snprintf(expected, sizeof expected, "%s/torch_memory_saver-%lu", base, (unsigned long)geteuid());
    assert_true(tms_private_directory_path(&unset, path));
    assert_string_equal(path, expected);
    assert_int_equal(access(path, F_OK), -1); /* only asked for */
    int fd = open_it(NULL, path, &failure);
    assert_true(fd >= 0);
    assert_string_equal(path, expected);
    assert_int_equal(fstat(fd, &found), 0);
    assert_int_equal(found.st_mode & PERMISSIONS, 0700);
    assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    close(fd);
    assert_int_equal(chmod(path, 0750), 0); /* others could replace its files */
    assert_int_equal(open_it(NULL, path, &failure), -1);
    assert_int_equal(failure.os_error, EPERM);
}

static void a_configured_one_may_be_shared(void **state) {
    (void)state;
    char path[PATH_MAX], wanted[PATH_MAX];
    tms_private_directory_failure_t failure;
    snprintf(wanted, sizeof wanted, "%s/own//", base);
    int fd = open_it(wanted, path, &failure);
    assert_true(fd >= 0);
    close(fd);
    wanted[strlen(wanted) - 2] = '\0';
    assert_string_equal(path, wanted);
    assert_int_equal(chmod(path, 0777), 0);
    fd = open_it(wanted, path, &failure);
    assert_true(fd >= 0);
    close(fd);
}

static void what_is_no_directory_of_this_user_is_refused(void **state) {
    (void)state;
    char path[PATH_MAX], link[PATH_MAX], longer[PATH_MAX + 8];
    tms_private_directory_failure_t failure;
    snprintf(link, sizeof link, "%s/link", base);
    assert_int_equal(symlink(base, link), 0);
    assert_int_equal(open_it(link, path, &failure), -1);
    assert_true(failure.os_error == ELOOP || failure.os_error == ENOTDIR);
    assert_int_equal(open_it("relative", path, &failure), -1);
    assert_int_equal(failure.os_error, EINVAL);
    assert_int_equal(open_it("/dev/null", path, &failure), -1);
    assert_int_equal(failure.os_error, ENOTDIR);
    memset(longer, 'x', sizeof longer - 1);
    longer[0] = '/';
    longer[sizeof longer - 1] = '\0';
    assert_int_equal(open_it(longer, path, &failure), -1);
    assert_int_equal(failure.os_error, ENAMETOOLONG);
    if (geteuid() == 0) {
        snprintf(link, sizeof link, "%s/others", base);
        assert_int_equal(mkdir(link, 0700), 0);
        assert_int_equal(chown(link, 12345, 12345), 0);
        assert_int_equal(open_it(link, path, &failure), -1);
        assert_int_equal(failure.os_error, EPERM);
    }
}

int main(void) {
#define DIRECTORY_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        DIRECTORY_TEST(the_default_is_of_this_user),
        DIRECTORY_TEST(a_configured_one_may_be_shared),
        DIRECTORY_TEST(what_is_no_directory_of_this_user_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
