/* Guards the descriptors that other processes duplicate: their numbers do not return soon, they end with exec and fork, and
 * the process's limit is an error that names itself. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/descriptors.h"
#include "own_process.h"

static const tms_error_context_t CONTEXT = {.operation = "share", .device = 0};
static tms_descriptors_t descriptors;

static int setup(void **state) {
    tms_error_t error;
    (void)state;
    return tms_descriptors_init(&descriptors, &error) != TMS_OK;
}

static int teardown(void **state) {
    (void)state;
    tms_descriptors_release(&descriptors);
    return 0;
}

static int open_something(void) { return open("/dev/null", O_RDONLY); }

static bool is_open(int number) { return fcntl(number, F_GETFD) >= 0; }

static tms_descriptor_t adopt(int given) {
    tms_descriptor_t adopted = {.among = NULL};
    tms_error_t error;
    assert_int_equal(tms_descriptors_adopt(&descriptors, given, &adopted, &CONTEXT, &error), TMS_OK);
    return adopted;
}

static void a_file_moves_into_the_window(void **state) {
    (void)state;
    struct stat before, after;
    int given = open_something();
    assert_int_equal(fstat(given, &before), 0);
    tms_descriptor_t adopted = adopt(given);
    assert_false(is_open(given));
    assert_int_equal(fstat(adopted.number, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    assert_int_equal(fcntl(adopted.number, F_GETFD), FD_CLOEXEC);
    assert_int_equal(adopted.number, descriptors.first);
    tms_descriptor_close(&adopted);
    assert_null(adopted.among);
    assert_false(is_open(descriptors.first));
    tms_descriptor_close(&adopted); /* none: nothing to do */
}

static void a_number_returns_only_after_all_others(void **state) {
    (void)state;
    tms_descriptor_t stays = adopt(open_something());
    int before = stays.number;
    for (int i = 1; i < descriptors.count; i++) {
        tms_descriptor_t each = adopt(open_something());
        assert_int_equal(each.number, before + 1);
        before = each.number;
        tms_descriptor_close(&each);
    }
    tms_descriptor_t again = adopt(open_something());
    assert_int_equal(again.number, stays.number + 1); /* the first one is still open */
    tms_descriptor_close(&again);
    tms_descriptor_close(&stays);
}

static void a_forked_child_has_none(void **state) {
    (void)state;
    tms_descriptor_t one = adopt(open_something()), other = adopt(open_something());
    tms_descriptor_close(&one);
    pthread_mutex_lock(&descriptors.lock);
    pid_t child = fork();
    if (child == 0) {
        bool inherited = is_open(other.number);
        tms_descriptors_after_fork_in_child(&descriptors);
        _exit(inherited && !is_open(other.number) ? 0 : 1);
    }
    pthread_mutex_unlock(&descriptors.lock);
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_true(is_open(other.number));
    tms_descriptor_close(&other);
}

/* In a process of its own, because the limit of open files is the process's. */
static void use_every_number(void) {
    enum { LIMIT = 64 };
    const struct rlimit limit = {.rlim_cur = LIMIT, .rlim_max = LIMIT};
    tms_descriptor_t all[LIMIT], none = {.among = NULL};
    tms_error_t error;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_int_equal(tms_descriptors_init(&descriptors, &error), TMS_OK);
    for (int i = 0; i < LIMIT / 2; i++) {
        all[i] = adopt(open_something());
        assert_int_equal(all[i].number, LIMIT / 2 + i);
    }
    int given = open_something();
    assert_int_equal(tms_descriptors_adopt(&descriptors, given, &none, &CONTEXT, &error), TMS_INVALID_STATE);
    assert_null(none.among);
    assert_false(is_open(given));
    assert_string_equal(error.call, "fcntl");
    assert_int_equal(error.os_error, EMFILE);
    assert_non_null(
        strstr(error.message, "this process may use 32 of them for that. Raise the limit of open files (ulimit -n)"));
    tms_descriptor_close(&all[7]);
    all[7] = adopt(open_something());
    assert_int_equal(all[7].number, LIMIT / 2 + 7);
    tms_descriptors_release(&descriptors);
    for (int i = 0; i < LIMIT / 2; i++) assert_false(is_open(all[i].number));
}

static void the_limit_of_open_files_is_named(void **state) {
    (void)state;
    assert_exits(use_every_number);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_file_moves_into_the_window, setup, teardown),
        cmocka_unit_test_setup_teardown(a_number_returns_only_after_all_others, setup, teardown),
        cmocka_unit_test_setup_teardown(a_forked_child_has_none, setup, teardown),
        cmocka_unit_test(the_limit_of_open_files_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
