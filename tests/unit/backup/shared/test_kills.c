/* Guards that a process that is killed before any of its system calls leaves nothing that the clean-up of another process
 * does not remove, and no claim or key that is not whole.
 *
 * A child runs with ptrace and is killed at its n-th system call. The ordinary test takes some n, TMS_EVERY_KILL all
 * (make shared-kills). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sys/file.h>

#include "backup/shared/entry.h"
#include "support/killed_steps.h"

/* ---- the traced process ---- */

/* Each way through the code. Objects 2 and 4 exist: the first is held by another process, the second is an unfinished file.
 */
static void use_everything(void) {
    static tms_shared_folder_t folder;
    tms_shared_attempt_t attempt;
    CHECK(tms_shared_folder_open(&folder, root, &quiet, &context, &error) == TMS_OK);
    tms_shared_folder_clean(&folder, &quiet);
    CHECK(get_object(&folder, 1, NULL));
    CHECK(get_object(&folder, 2, NULL));
    CHECK(try_object(&folder, 3, true, &attempt) == TMS_OK && attempt.state == TMS_SHARED_CLAIMED);
    CHECK(write_part(&folder, 3, attempt.fd, 0, OBJECT_BYTES / 2) == TMS_OK);
    abandon(&folder, 3, attempt.fd);
    CHECK(get_object(&folder, 4, NULL));
    /* The object has lost its name, and gets it again. */
    CHECK(unlink(object_path(1, "")) == 0);
    CHECK(get_object(&folder, 1, NULL));
    drop(&folder, 2);
    drop(&folder, 4);
    tms_shared_folder_close(&folder, &quiet);
}

/* ---- what is left ---- */

static bool is_locked(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    bool locked = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0;
    if (fd >= 0) close(fd);
    return locked;
}

static void assert_holders_live(unsigned count) {
    DIR *list = opendir(below("holders"));
    assert_non_null(list);
    for (const struct dirent *entry; (entry = readdir(list));) {
        char lock[64];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        assert_int_equal(strlen(entry->d_name), TMS_SHARED_HOLDER_DIGITS);
        snprintf(lock, sizeof lock, "holders/%.32s/lock", entry->d_name);
        assert_true(is_locked(below(lock)));
        count--;
    }
    closedir(list);
    assert_int_equal(count, 0);
}

/* The only object is the one that a living process holds. */
static void assert_only_living(const tms_shared_folder_t *survivor) {
    const char *const files[] = {"key", "holders", "objects"};
    for (size_t i = 0; i < 3; i++) assert_true(exists(below(files[i])));
    assert_int_equal(count_names(root), 3);
    assert_int_equal(links_of(below("key")), 1);
    assert_int_equal(mode_of(below("key")), 0400);
    assert_holders_live(survivor ? 2 : 1);
    assert_int_equal(count_names(below("objects")), survivor ? 1 : 0);
    if (!survivor) return;
    assert_int_equal(links_of(object_path(2, "")), 2);
    assert_int_equal(mode_of(object_path(2, "")), 0400);
    assert_true(exists(holder_path(survivor, name_of(2).text)));
}

/* Before the clean-up, too, what has its name is whole, and can be had. */
static void get_all(const tms_shared_folder_t *folder) {
    for (unsigned i = 1; i <= 4; i++) {
        if (!get_object(folder, i, NULL)) fail_msg("object %u: %s", i, error.message);
    }
}

static void check_what_is_left(const tms_shared_folder_t *survivor, bool clean_first) {
    tms_shared_folder_t *second = open_folder();
    if (!clean_first) get_all(second);
    tms_shared_folder_clean(second, &quiet);
    if (!clean_first) {
        assert_holders_live(survivor ? 2 : 1);
        for (unsigned i = 1; i <= 4; i++) assert_false(exists(object_path(i, ".part")));
        for (unsigned i = 1; i <= 4; i++) assert_int_equal(links_of(object_path(i, "")), survivor && i == 2 ? 3 : 2);
        for (unsigned i = 1; i <= 4; i++) drop(second, i);
    }
    assert_only_living(survivor);
    get_all(second);
    close_folder(second);
    if (survivor) assert_true(get_object(survivor, 2, NULL));
}

/* ---- the tests ---- */

/* What the killed process finds, except for the living one: a dead holder, and an unfinished object. */
static void leave_something(void) {
    assert_int_equal(mkdir(below("holders/0123456789abcdef"), 0700), 0);
    put_file(below("holders/0123456789abcdef/lock"), "", 0600);
    put_file(object_path(5, ""), contents_of(5), 0400);
    assert_int_equal(link(object_path(5, ""), below("holders/0123456789abcdef/link")), 0);
    put_file(object_path(4, ".part"), "half", 0600);
}

static void run(bool first_start, bool clean_first) {
    bool killed = true;
    for (unsigned calls = clean_first ? 0 : step() / 2; killed; calls += step()) {
        tms_shared_folder_t *survivor = NULL;
        snprintf(root, sizeof root, "%.200s/store %u", base, calls);
        if (!first_start) {
            survivor = open_folder();
            assert_true(get_object(survivor, 2, NULL));
            leave_something();
        }
        pid_t pid = start_traced(use_everything);
        if (!pid) skip();
        killed = kill_after(pid, calls);
        check_what_is_left(survivor, clean_first);
        if (survivor) close_folder(survivor);
        assert_nothing_left();
        assert_int_equal(remove_temporary_directory(root), 0);
    }
}

static void a_first_start(void **state) {
    (void)state;
    run(true, true);
}

static void a_first_start_whose_objects_are_wanted(void **state) {
    (void)state;
    run(true, false);
}

static void beside_a_living_process(void **state) {
    (void)state;
    run(false, true);
}

static void beside_a_living_process_whose_objects_are_wanted(void **state) {
    (void)state;
    run(false, false);
}

int main(void) {
#define KILL_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        KILL_TEST(a_first_start),
        KILL_TEST(a_first_start_whose_objects_are_wanted),
        KILL_TEST(beside_a_living_process),
        KILL_TEST(beside_a_living_process_whose_objects_are_wanted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
