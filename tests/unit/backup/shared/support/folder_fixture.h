/* Shared by the tests of the folder, its key and its clean-up: the fixture, with system calls that can be made to fail.
 * Included once in a program, after cmocka.h. */
#ifndef TMS_TESTS_FOLDER_FIXTURE_H
#define TMS_TESTS_FOLDER_FIXTURE_H

#include <sys/file.h>

#include "shared_faults.h"
#include "shared_fixture.h"

static inline int make_plain(void **state) {
    inject_nothing();
    return make(state);
}

static inline bool is_locked(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    bool locked = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(fd);
    return locked;
}

#define FOLDER_TEST(test) cmocka_unit_test_setup_teardown(test, make_plain, release)

#endif
