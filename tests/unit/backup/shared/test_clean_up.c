/* Guards the clean-up of backup/shared/folder.c: what is removed and what stays, and that a holder that another process
 * removes while it is made is made again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sys/syscall.h>

#include "captured_stderr.h"
#include "support/folder_fixture.h"

static void make_dead_holder(const char *name, unsigned number) {
    char path[64];
    snprintf(path, sizeof path, "holders/%s", name);
    assert_int_equal(mkdir(below(path), 0700), 0);
    snprintf(path, sizeof path, "holders/%s/lock", name);
    put_file(below(path), "", 0600);
    if (number == 0) return;
    snprintf(path, sizeof path, "holders/%s/%s", name, name_of(number).text);
    if (link(object_path(number, ""), below(path)) != 0) {
        put_file(object_path(number, ""), "contents", 0400);
        assert_int_equal(link(object_path(number, ""), below(path)), 0);
    }
}

static void what_dead_processes_left_is_removed(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    bool written;
    assert_true(get_object(folder, 1, &written));
    make_dead_holder("0123456789abcdef", 1); /* the other holder links it, too */
    make_dead_holder("0123456789abcdee", 2);
    make_dead_holder(".0123456789abcded", 0);
    put_file(object_path(3, ""), "not linked", 0400);
    put_file(object_path(4, ".part"), "half", 0600);
    put_file(object_path(5, ".part"), "finished, but for the name", 0400);
    assert_int_equal(link(object_path(5, ".part"), object_path(5, "")), 0);
    assert_int_equal(mkdir(below("holders/.0123456789abcdea"), 0700), 0);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(count_names(below("objects")), 1);
    assert_int_equal(links_of(object_path(1, "")), 2);
    close_folder(folder);
    assert_nothing_left();
}

static void without_a_dead_process_objects_are_not_looked_at(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder(), *second = open_folder();
    put_file(object_path(3, ""), "not linked", 0400);
    put_file(object_path(4, ".part"), "half", 0600);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("objects")), 2);
    assert_int_equal(count_names(below("holders")), 2);
    close_folder(second);
    assert_int_equal(mkdir(below("holders/.0123456789abcdea"), 0700), 0); /* killed before it had a lock */
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(count_names(below("holders")), 1);
    close_folder(folder);
}

static void what_living_processes_have_stays(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdee", 0);
    make_dead_holder("0123456789abcdef", 2);
    make_dead_holder(".0123456789abcdec", 0);
    put_file(object_path(4, ".part"), "half", 0600);
    put_file(object_path(5, ""), "published", 0400);
    assert_int_equal(mkdir(below("names"), 0700), 0);
    assert_int_equal(mkdir(below("names/model"), 0700), 0);
    assert_int_equal(link(object_path(5, ""), below("names/model/object")), 0);
    put_file(below("names/model/manifest.json"), "{}", 0400);
    const char *const locked[] = {below("holders/0123456789abcdef/lock"), below("holders/.0123456789abcdec/lock"),
                                  object_path(4, ".part")};
    int fds[3];
    for (size_t i = 0; i < 3; i++) {
        fds[i] = open(locked[i], O_RDWR | O_CLOEXEC);
        assert_int_equal(flock(fds[i], LOCK_EX | LOCK_NB), 0);
    }
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 3);
    assert_int_equal(count_names(below("objects")), 3);
    assert_int_equal(links_of(object_path(2, "")), 2);
    for (size_t i = 0; i < 3; i++) close(fds[i]);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(count_names(below("objects")), 1);
    assert_int_equal(links_of(object_path(5, "")), 2);
    close_folder(folder);
}

/* A user has removed a lock, so the holder cannot show any more whether its process lives. */
static void a_holder_that_lost_its_lock(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdef", 2);
    assert_int_equal(unlink(below("holders/0123456789abcdef/lock")), 0);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(count_names(below("objects")), 0);
    close_folder(folder);
}

static void what_cannot_be_removed_is_logged(void **state) {
    (void)state;
    char text[4096];
    tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdef", 1);
    for (unsigned i = 0; i < 8; i++) { /* The list has some of them before the object, and some after it. */
        char name[64];
        snprintf(name, sizeof name, "holders/0123456789abcdef/directory%u", i);
        assert_int_equal(mkdir(below(name), 0700), 0);
        snprintf(name, sizeof name, "holders/0123456789abcdef/directory%u/in it", i); /* no publisher makes such a one */
        assert_int_equal(mkdir(below(name), 0700), 0);
        if (i % 2) continue;
        snprintf(name, sizeof name, "holders/0123456789abcdef/%s", name_of(i + 2).text);
        put_file(below(name), "", 0600);
    }
    put_file(below("holders/file"), "of somebody else", 0600);
    captured_stderr_t captured = capture_begin();
    tms_shared_folder_clean(folder, &log);
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, below("holders/0123456789abcdef")));
    assert_true(exists(below("holders/0123456789abcdef/lock"))); /* so it is tried again */
    assert_int_equal(count_names(below("holders/0123456789abcdef")), 9);
    assert_int_equal(count_names(below("objects")), 0);
    assert_true(exists(below("holders/file")));
    for (unsigned i = 0; i < 8; i++) {
        char name[64];
        snprintf(name, sizeof name, "holders/0123456789abcdef/directory%u/in it", i);
        assert_int_equal(rmdir(below(name)), 0); /* the rest goes with the holder */
    }
    captured = capture_begin();
    tms_shared_folder_clean(folder, &log);
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 0);
    assert_false(exists(below("holders/0123456789abcdef")));
    close_folder(folder);
}

static void objects_that_cannot_be_listed(void **state) {
    (void)state;
    char text[4096];
    tms_log_t log;
    tms_log_init(&log, TMS_LOG_WARNING);
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdef", 1);
    put_file(object_path(4, ".part"), "half", 0600);
    captured_stderr_t captured = capture_begin();
    inject(CALL_openat, EMFILE, 0, 1);
    tms_shared_folder_clean(folder, &log);
    inject_nothing();
    capture_end(captured, text, sizeof text);
    assert_int_equal(count_lines(text), 1);
    assert_non_null(strstr(text, root));
    assert_int_equal(count_names(below("holders")), 2); /* so the next clean-up looks for the objects, too */
    tms_shared_folder_clean(folder, &log);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(count_names(below("objects")), 0);
    close_folder(folder);
}

/* ---- another process cleans up while a holder is made ---- */

static tms_shared_folder_t *cleaner;
static unsigned clean_ups;
static void clean_beside(void) {
    tms_shared_folder_clean(cleaner, &quiet);
    clean_ups++;
}

static void assert_survives_a_clean_up(void (**hook)(void), unsigned holders) {
    cleaner = open_folder();
    clean_ups = 0;
    *hook = clean_beside;
    fault.count[CALL_renameat] = fault.count[CALL_flock] = fault.count[CALL_mkdirat] = 0;
    tms_shared_folder_t *folder = open_folder();
    assert_int_equal(clean_ups, 1);
    assert_int_equal(fault.count[CALL_mkdirat], 2 + holders); /* with `objects` and `holders` */
    assert_int_equal(fault.count[CALL_renameat], 1);
    assert_true(is_locked(holder_path(folder, "lock")));
    assert_int_equal(count_names(below("holders")), 2);
    tms_shared_folder_clean(cleaner, &quiet);
    assert_int_equal(count_names(below("holders")), 2);
    close_folder(folder);
    close_folder(cleaner);
    assert_nothing_left();
}

/* The third directory that is made is the holder. */
static void after_second_mkdir(void) { fault.after[CALL_mkdirat] = clean_beside; }
static void after_first_mkdir(void) { fault.after[CALL_mkdirat] = after_second_mkdir; }

static void a_clean_up_before_there_is_a_lock(void **state) {
    (void)state;
    cleaner = open_folder();
    clean_ups = 0;
    fault.count[CALL_mkdirat] = 0;
    fault.after[CALL_mkdirat] = after_first_mkdir;
    tms_shared_folder_t *folder = open_folder();
    assert_int_equal(clean_ups, 1);
    assert_int_equal(fault.count[CALL_mkdirat], 4);
    assert_int_equal(count_names(below("holders")), 2);
    assert_true(is_locked(holder_path(folder, "lock")));
    close_folder(folder);
    close_folder(cleaner);
    assert_nothing_left();
}

static void a_clean_up_before_the_lock_is_taken(void **state) {
    (void)state;
    assert_survives_a_clean_up(&fault.before[CALL_flock], 2);
}

static void a_clean_up_after_the_lock_is_taken(void **state) {
    (void)state;
    assert_survives_a_clean_up(&fault.after[CALL_flock], 1);
}

static void a_clean_up_before_the_holder_has_its_name(void **state) {
    (void)state;
    assert_survives_a_clean_up(&fault.before[CALL_renameat], 1);
}

/* The directory was listed and has no lock yet; then it is finished. */
static tms_shared_folder_t *finished;
static char unfinished[TEMPORARY_BYTES + 64];
static int finished_lock;
static void finish_holder(void) {
    char path[TEMPORARY_BYTES + 96];
    snprintf(path, sizeof path, "%s/lock", unfinished);
    finished_lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(finished_lock >= 0);
    assert_int_equal(syscall(SYS_flock, finished_lock, LOCK_EX | LOCK_NB), 0);
}

static void a_lock_that_is_made_while_the_holder_is_looked_at(void **state) {
    (void)state;
    finished = open_folder();
    snprintf(unfinished, sizeof unfinished, "%s", below("holders/.0123456789abcdef"));
    assert_int_equal(mkdir(unfinished, 0700), 0);
    fault.before[CALL_unlinkat] = finish_holder; /* the clean-up has found no lock, and removes the directory */
    tms_shared_folder_clean(finished, &quiet);
    assert_true(exists(below("holders/.0123456789abcdef/lock")));
    close(finished_lock);
    tms_shared_folder_clean(finished, &quiet);
    assert_false(exists(unfinished));
    close_folder(finished);
}

/* Two clean-ups at once: the second has opened the lock, and the first removes the holder. */
static void a_holder_that_is_removed_twice(void **state) {
    (void)state;
    cleaner = open_folder();
    tms_shared_folder_t *folder = open_folder();
    make_dead_holder("0123456789abcdef", 2);
    clean_ups = 0;
    fault.before[CALL_flock] = clean_beside;
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(clean_ups, 1);
    assert_int_equal(count_names(below("holders")), 2);
    assert_int_equal(count_names(below("objects")), 0);
    close_folder(folder);
    close_folder(cleaner);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        FOLDER_TEST(what_dead_processes_left_is_removed),
        FOLDER_TEST(without_a_dead_process_objects_are_not_looked_at),
        FOLDER_TEST(what_living_processes_have_stays),
        FOLDER_TEST(a_holder_that_lost_its_lock),
        FOLDER_TEST(what_cannot_be_removed_is_logged),
        FOLDER_TEST(objects_that_cannot_be_listed),
        FOLDER_TEST(a_clean_up_before_there_is_a_lock),
        FOLDER_TEST(a_clean_up_before_the_lock_is_taken),
        FOLDER_TEST(a_clean_up_after_the_lock_is_taken),
        FOLDER_TEST(a_clean_up_before_the_holder_has_its_name),
        FOLDER_TEST(a_lock_that_is_made_while_the_holder_is_looked_at),
        FOLDER_TEST(a_holder_that_is_removed_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
