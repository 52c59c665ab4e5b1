/* Guards backup/shared/entry.c: an object that has its name is whole, a process that links it keeps it, and a file that was
 * left by a dead process is never written. Two folders of one process stand for two processes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "backup/shared/entry.h"
#include "own_process.h"
#include "support/shared_faults.h"
#include "support/shared_fixture.h"

static tms_shared_folder_t *mine, *others;

static int open_two(void **state) {
    inject_nothing();
    if (make(state) != 0) return -1;
    mine = open_folder();
    others = open_folder();
    return 0;
}

static int close_two(void **state) {
    inject_nothing();
    close_folder(mine);
    close_folder(others);
    return release(state);
}

static tms_shared_attempt_t assert_state(const tms_shared_folder_t *folder, unsigned number, bool claim,
                                         tms_shared_state_t expected) {
    tms_shared_attempt_t attempt = {.fd = -2};
    if (try_object(folder, number, claim, &attempt) != TMS_OK) fail_msg("%s", error.message);
    assert_int_equal(attempt.state, expected);
    assert_int_equal(attempt.fd >= 0, expected != TMS_SHARED_BUSY);
    if (attempt.fd >= 0) assert_int_equal(fcntl(attempt.fd, F_GETFD), FD_CLOEXEC);
    return attempt;
}

static ino_t inode_of(int fd) {
    struct stat found;
    assert_int_equal(fstat(fd, &found), 0);
    return found.st_ino;
}

/* Holds an object that must be there. */
static ino_t assert_held(const tms_shared_folder_t *folder, unsigned number) {
    tms_shared_attempt_t attempt = assert_state(folder, number, true, TMS_SHARED_HELD);
    ino_t inode = inode_of(attempt.fd);
    assert_true(has_contents(attempt.fd, number));
    assert_int_equal(fcntl(attempt.fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    close(attempt.fd);
    return inode;
}

static void assert_written(const tms_shared_folder_t *folder, unsigned number) {
    bool written = false;
    if (!get_object(folder, number, &written)) fail_msg("%s", error.message);
    assert_true(written);
}

static void an_object_from_claim_to_end(void **state) {
    (void)state;
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    assert_int_equal(mode_of(object_path(1, ".part")), 0600);
    assert_int_equal(links_of(object_path(1, ".part")), 1);
    assert_int_equal(assert_state(others, 1, true, TMS_SHARED_BUSY).written, 0);
    assert_int_equal(write_part(mine, 1, claim.fd, 0, 4000), TMS_OK);
    assert_int_equal(assert_state(others, 1, true, TMS_SHARED_BUSY).written, 4000);
    assert_int_equal(write_part(mine, 1, claim.fd, 4000, OBJECT_BYTES), TMS_OK);
    assert_false(exists(object_path(1, "")));
    assert_int_equal(finish(mine, 1, &claim.fd), TMS_OK);
    assert_true(has_contents(claim.fd, 1));
    assert_int_equal(fcntl(claim.fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    assert_int_equal(fcntl(claim.fd, F_GETFD), FD_CLOEXEC);
    assert_int_equal(mode_of(object_path(1, "")), 0400);
    assert_int_equal(links_of(object_path(1, "")), 2);
    assert_false(exists(object_path(1, ".part")));
    assert_int_equal(assert_held(others, 1), inode_of(claim.fd));
    close(claim.fd);
    assert_int_equal(links_of(object_path(1, "")), 3);
    drop(mine, 1);
    assert_int_equal(links_of(object_path(1, "")), 2);
    drop(mine, 1); /* it has none */
    assert_int_equal(links_of(object_path(1, "")), 2);
    drop(others, 1);
    assert_int_equal(count_names(below("objects")), 0);
}

static void an_object_that_is_only_awaited(void **state) {
    (void)state;
    assert_int_equal(assert_state(mine, 1, false, TMS_SHARED_BUSY).written, 0);
    assert_int_equal(count_names(below("objects")), 0);
    assert_written(others, 1);
    tms_shared_attempt_t attempt = assert_state(mine, 1, false, TMS_SHARED_HELD);
    assert_true(has_contents(attempt.fd, 1));
    close(attempt.fd);
    assert_int_equal(links_of(object_path(1, "")), 3);
}

static void an_object_that_is_held_already(void **state) {
    (void)state;
    assert_written(mine, 1);
    ino_t inode = assert_held(mine, 1);
    assert_int_equal(assert_held(mine, 1), inode);
    assert_int_equal(links_of(object_path(1, "")), 2);
}

static void a_claim_that_is_given_up(void **state) {
    (void)state;
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    assert_int_equal(write_part(mine, 1, claim.fd, 0, 100), TMS_OK);
    abandon(mine, 1, claim.fd);
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(fcntl(claim.fd, F_GETFD), -1);
    assert_written(others, 1);
}

static void an_object_of_another_size_is_made_again(void **state) {
    (void)state;
    for (int claim = 0; claim < 2; claim++) {
        tms_shared_attempt_t attempt;
        put_file(object_path(1, ""), "short", 0400);
        assert_int_equal(try_object(mine, 1, claim, &attempt), TMS_BACKUP_IO);
        assert_non_null(strstr(error.message, object_path(1, "")));
        assert_non_null(strstr(error.message, "pause: a backup could not be used: "));
        assert_non_null(
            strstr(error.message, "it has 5 bytes instead of 10000. The next pause or publication writes it again"));
        assert_string_equal(error.tag, "weights");
        assert_int_equal(count_names(below("objects")), 0);
        assert_int_equal(count_names(holder_path(mine, "")), 1);
    }
    put_file(object_path(1, ""), "short", 0400);
    inject(CALL_unlinkat, EIO, 0, 1);
    tms_shared_attempt_t attempt;
    assert_int_equal(try_object(mine, 1, true, &attempt), TMS_BACKUP_IO);
    inject_nothing();
    assert_non_null(strstr(error.message, "it has 5 bytes instead of 10000. Remove the file"));
    assert_int_equal(links_of(object_path(1, "")), 1);
    assert_int_equal(unlink(object_path(1, "")), 0);
    assert_written(mine, 1);
}

/* Names that no file of the store can have. */
static void what_is_no_file(void **state) {
    (void)state;
    tms_shared_attempt_t attempt;
    const char *const ends[] = {"", ".part"};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(mkdir(object_path(1, ends[i]), 0700), 0);
        assert_int_equal(try_object(mine, 1, true, &attempt), TMS_BACKUP_IO);
        assert_non_null(strstr(error.message, object_path(1, ends[i])));
        assert_int_equal(rmdir(object_path(1, ends[i])), 0);
        assert_int_equal(symlink("../key", object_path(1, ends[i])), 0);
        assert_int_equal(try_object(mine, 1, true, &attempt), TMS_BACKUP_IO);
        assert_non_null(strstr(error.message, object_path(1, ends[i])));
        assert_int_equal(unlink(object_path(1, ends[i])), 0);
    }
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(mkfifo(object_path(1, ""), 0600), 0); /* removed as an object of another size */
    assert_int_equal(try_object(mine, 1, true, &attempt), TMS_BACKUP_IO);
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(mkfifo(object_path(1, ".part"), 0600), 0); /* removed like every unfinished file without a lock */
    assert_written(mine, 1);
}

/* ---- what dead writers leave ---- */

static void an_unfinished_file(void **state) {
    (void)state;
    put_file(object_path(1, ".part"), "half", 0600);
    struct stat before;
    assert_int_equal(lstat(object_path(1, ".part"), &before), 0);
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    struct stat now;
    assert_int_equal(fstat(claim.fd, &now), 0);
    assert_int_equal(now.st_size, 0);
    assert_int_equal(now.st_nlink, 1);
    assert_int_not_equal(now.st_ino, before.st_ino);
    abandon(mine, 1, claim.fd);
}

/* The writer was killed after it had linked the file to its holder, and before the object had its name. */
static void a_file_that_a_dead_writer_has_linked(void **state) {
    (void)state;
    put_file(object_path(1, ".part"), "whole, as far as anybody knows", 0400);
    assert_int_equal(link(object_path(1, ".part"), holder_path(others, name_of(1).text)), 0);
    assert_written(mine, 1);
    char text[64] = "";
    int fd = open(holder_path(others, name_of(1).text), O_RDONLY | O_CLOEXEC);
    assert_int_equal(pread(fd, text, sizeof text, 0), strlen("whole, as far as anybody knows"));
    assert_string_equal(text, "whole, as far as anybody knows");
    close(fd);
    assert_int_equal(unlink(holder_path(others, name_of(1).text)), 0);
}

/* The writer was killed before it removed the other name. */
static void a_whole_object_that_has_both_names(void **state) {
    (void)state;
    assert_written(mine, 1);
    assert_int_equal(link(object_path(1, ""), object_path(1, ".part")), 0);
    assert_held(others, 1);
    drop(mine, 1);
    drop(others, 1);
    /* It has a name and no holder. It is linked again, and is not written. */
    struct stat before;
    assert_int_equal(lstat(object_path(1, ""), &before), 0);
    assert_int_equal(assert_held(mine, 1), before.st_ino);
    assert_int_equal(mkdir(below("holders/0123456789abcdef"), 0700), 0); /* of the dead writer */
    tms_shared_folder_clean(mine, &quiet);
    assert_false(exists(object_path(1, ".part")));
    assert_int_equal(links_of(object_path(1, "")), 2);
}

/* It was published after this process had looked for it and before it had made its claim. */
static void write_beside(void) { assert_written(others, 1); }
static void an_object_that_is_published_before_the_claim(void **state) {
    (void)state;
    const call_t calls[] = {CALL_linkat, CALL_flock};
    for (size_t i = 0; i < 2; i++) {
        if (calls[i] == CALL_linkat) fault.after[CALL_linkat] = write_beside;
        /* The claim is made and not locked yet, so the other process removes it as if its writer were dead. */
        if (calls[i] == CALL_flock) fault.before[CALL_flock] = write_beside;
        assert_held(mine, 1);
        assert_int_equal(links_of(object_path(1, "")), 3);
        assert_int_equal(count_names(below("objects")), 1);
        drop(mine, 1);
        drop(others, 1);
    }
}

static int taken;
static void take_beside(void) { taken = assert_state(others, 1, true, TMS_SHARED_CLAIMED).fd; }
static void a_claim_that_another_process_takes_first(void **state) {
    (void)state;
    fault.before[CALL_flock] = take_beside;
    assert_state(mine, 1, true, TMS_SHARED_BUSY);
    abandon(others, 1, taken);
    fault.after[CALL_linkat] = take_beside;
    assert_state(mine, 1, true, TMS_SHARED_BUSY);
    assert_int_equal(write_part(others, 1, taken, 0, OBJECT_BYTES), TMS_OK);
    assert_int_equal(finish(others, 1, &taken), TMS_OK);
    close(taken);
    assert_held(mine, 1);
}

/* The writer gives up between the two calls that find its file. */
static void give_up_beside(void) { abandon(others, 1, taken); }
static void a_claim_that_goes_while_it_is_looked_at(void **state) {
    (void)state;
    take_beside();
    fault.after[CALL_openat] = give_up_beside; /* after the failed attempt to make the file */
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    abandon(mine, 1, claim.fd);
    take_beside();
    fault.before[CALL_flock] = give_up_beside; /* the file is open, and has no name any more */
    claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    abandon(mine, 1, claim.fd);
    assert_int_equal(count_names(below("objects")), 0);
}

/* ---- objects that lose their names ---- */

static void drop_beside(void) { drop(others, 1); }
static void a_last_link_that_goes_while_another_is_made(void **state) {
    (void)state;
    assert_written(others, 1);
    fault.before[CALL_linkat] = drop_beside; /* first: it is gone, and is claimed */
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    abandon(mine, 1, claim.fd);
    assert_written(others, 1);
    fault.after[CALL_linkat] = drop_beside; /* second: the link keeps it, and it keeps its name */
    assert_held(mine, 1);
    assert_int_equal(links_of(object_path(1, "")), 2);
}

/* The other process has seen that the object has no link, and removes its name after this process has linked it. */
static void remove_name(void) { assert_int_equal(unlink(object_path(1, "")), 0); }
static void a_name_that_goes_after_the_link(void **state) {
    (void)state;
    assert_written(others, 1);
    assert_int_equal(unlink(holder_path(others, name_of(1).text)), 0);
    fault.after[CALL_linkat] = remove_name;
    ino_t inode = assert_held(mine, 1);
    assert_int_equal(links_of(object_path(1, "")), 2); /* it has its name again */
    assert_int_equal(assert_held(others, 1), inode);
}

static void a_lost_name_comes_back(void **state) {
    (void)state;
    assert_written(mine, 1);
    ino_t inode = assert_held(others, 1);
    remove_name();
    assert_int_equal(assert_held(mine, 1), inode);
    assert_int_equal(links_of(object_path(1, "")), 3);
}

/* A name was lost, another process writes the object again, and meanwhile the name comes back. */
static void an_object_that_comes_first(void **state) {
    (void)state;
    assert_written(others, 1);
    ino_t first = assert_held(others, 1);
    remove_name();
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    assert_int_equal(write_part(mine, 1, claim.fd, 0, OBJECT_BYTES), TMS_OK);
    assert_held(others, 1);
    assert_int_equal(finish(mine, 1, &claim.fd), TMS_OK);
    assert_int_equal(inode_of(claim.fd), first);
    assert_true(has_contents(claim.fd, 1));
    close(claim.fd);
    assert_int_equal(links_of(object_path(1, "")), 3);
    assert_int_equal(count_names(below("objects")), 1);
}

/* The object that came first goes again before it is linked. */
static void before_the_other_is_linked(void) { drop(others, 1); }
static void after_the_second_link(void) { fault.before[CALL_linkat] = before_the_other_is_linked; }
static void after_the_first_link(void) { fault.after[CALL_linkat] = after_the_second_link; }
static void an_object_that_came_first_goes_again(void **state) {
    (void)state;
    assert_written(others, 1);
    remove_name();
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    assert_int_equal(write_part(mine, 1, claim.fd, 0, OBJECT_BYTES), TMS_OK);
    ino_t written = inode_of(claim.fd);
    assert_held(others, 1);
    fault.after[CALL_linkat] = after_the_first_link;
    assert_int_equal(finish(mine, 1, &claim.fd), TMS_OK);
    assert_int_equal(inode_of(claim.fd), written);
    close(claim.fd);
    assert_int_equal(links_of(object_path(1, "")), 2);
    assert_int_equal(count_names(below("objects")), 1);
}

/* ---- a user removes files ---- */

static void an_unfinished_file_that_is_deleted(void **state) {
    (void)state;
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    assert_int_equal(write_part(mine, 1, claim.fd, 0, OBJECT_BYTES), TMS_OK);
    assert_int_equal(unlink(object_path(1, ".part")), 0);
    assert_int_equal(finish(mine, 1, &claim.fd), TMS_BACKUP_IO);
    assert_int_equal(error.os_error, ENOENT);
    assert_non_null(strstr(error.message, object_path(1, ".part")));
    assert_int_equal(claim.fd, -1);
    assert_int_equal(count_names(holder_path(mine, "")), 1);
    /* Another process claims it again: its file is not whole. */
    claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    assert_int_equal(write_part(mine, 1, claim.fd, 0, OBJECT_BYTES), TMS_OK);
    assert_int_equal(unlink(object_path(1, ".part")), 0);
    take_beside();
    assert_int_equal(finish(mine, 1, &claim.fd), TMS_BACKUP_IO);
    assert_false(exists(object_path(1, "")));
    assert_int_equal(count_names(holder_path(mine, "")), 1);
    assert_int_equal(links_of(object_path(1, ".part")), 1);
    assert_state(mine, 1, true, TMS_SHARED_BUSY);
    abandon(others, 1, taken);
}

static void a_folder_that_is_deleted(void **state) {
    (void)state;
    char command[TEMPORARY_BYTES + 16];
    tms_shared_attempt_t attempt;
    assert_written(mine, 1);
    tms_shared_attempt_t held = assert_state(mine, 1, true, TMS_SHARED_HELD);
    tms_shared_attempt_t claim = assert_state(mine, 2, true, TMS_SHARED_CLAIMED);
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    assert_int_equal(system(command), 0);
    assert_true(has_contents(held.fd, 1));
    close(held.fd);
    assert_int_equal(write_part(mine, 2, claim.fd, 0, OBJECT_BYTES), TMS_OK);
    assert_int_equal(finish(mine, 2, &claim.fd), TMS_BACKUP_IO);
    assert_int_equal(try_object(mine, 3, true, &attempt), TMS_BACKUP_IO);
    drop(mine, 1);
}

/* ---- failures ---- */

static void write_beyond_the_limit(void) {
    struct rlimit limit = {.rlim_cur = OBJECT_BYTES - 1, .rlim_max = OBJECT_BYTES - 1};
    tms_shared_attempt_t claim;
    CHECK(try_object(mine, 1, true, &claim) == TMS_OK && claim.state == TMS_SHARED_CLAIMED);
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    CHECK(write_part(mine, 1, claim.fd, 0, OBJECT_BYTES - 1) == TMS_OK);
    CHECK(write_part(mine, 1, claim.fd, OBJECT_BYTES - 1, OBJECT_BYTES) == TMS_BACKUP_IO);
    CHECK(error.os_error == EFBIG && strstr(error.message, "RLIMIT_FSIZE") &&
          strstr(error.message, object_path(1, ".part")));
    abandon(mine, 1, claim.fd);
    _exit(0);
}

/* The default action of SIGXFSZ would end the child. */
static void an_object_beyond_the_limit_for_files(void **state) {
    (void)state;
    assert_exits(write_beyond_the_limit);
    assert_int_equal(count_names(below("objects")), 0);
}

static void writes_that_are_short_or_interrupted(void **state) {
    (void)state;
    fault.transfer_most = 33;
    inject(CALL_pwrite, EINTR, 7, 3);
    fault.count[CALL_pwrite] = 0;
    tms_shared_attempt_t claim = assert_state(mine, 1, true, TMS_SHARED_CLAIMED);
    assert_int_equal(write_part(mine, 1, claim.fd, 0, OBJECT_BYTES), TMS_OK);
    assert_int_equal(fault.fired, 3);
    assert_int_equal(fault.count[CALL_pwrite], OBJECT_BYTES / 33 + 1 + 3);
    assert_int_equal(finish(mine, 1, &claim.fd), TMS_OK);
    close(claim.fd);
    fault.transfer_most = 0;
    assert_held(others, 1);
}

static void a_full_folder(void **state) {
    (void)state;
    const call_t calls[] = {CALL_openat, CALL_linkat, CALL_pwrite};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (unsigned nth = 0;; nth++) {
            bool written;
            inject(calls[i], ENOSPC, nth, 1);
            bool got = get_object(mine, 1, &written);
            bool fired = fault.fired > 0;
            inject_nothing();
            if (!fired) assert_true(got);
            if (!fired) break;
            assert_false(got);
            assert_int_equal(error.status, TMS_BACKUP_IO);
            assert_int_equal(error.os_error, ENOSPC);
            assert_non_null(strstr(error.message, root));
            assert_non_null(strstr(error.message, "TMS_SHARED_DIR"));
            assert_non_null(strstr(error.message, "--shm-size"));
            assert_int_equal(count_names(holder_path(mine, "")), 1);
            if (calls[i] == CALL_pwrite) assert_int_equal(unlink(object_path(1, ".part")), 0); /* the caller would */
            assert_int_equal(count_names(below("objects")), 0);
        }
        drop(mine, 1);
    }
}

static unsigned open_files(void) { return count_names("/proc/self/fd"); }

/* Everything that a process does with the folder. Returns false if a call fails. */
static bool use_folder(tms_shared_folder_t *folder) {
    tms_shared_attempt_t attempt;
    if (tms_shared_folder_open(folder, root, &quiet, &context, &error) != TMS_OK) return false;
    tms_shared_folder_clean(folder, &quiet);
    bool good = try_object(folder, 1, true, &attempt) == TMS_OK;
    if (good && attempt.state == TMS_SHARED_HELD) close(attempt.fd);
    good = good && try_object(folder, 2, true, &attempt) == TMS_OK;
    if (good && attempt.state == TMS_SHARED_CLAIMED) {
        good = write_part(folder, 2, attempt.fd, 0, OBJECT_BYTES) == TMS_OK;
        if (good)
            good = finish(folder, 2, &attempt.fd) == TMS_OK;
        else
            abandon(folder, 2, attempt.fd);
        if (good) {
            good = has_contents(attempt.fd, 2); /* whose call may fail as well */
            close(attempt.fd);
        }
    }
    drop(folder, 1);
    tms_shared_folder_close(folder, &quiet);
    return good;
}

/* Each call fails once, and all calls from one on fail. A call succeeds nevertheless, or the error has the number, and what
 * is left is removed by a clean-up. */
static void every_call_may_fail(void **state) {
    (void)state;
    tms_shared_folder_t folder;
    const int numbers[] = {EIO, ENOSPC, ENOMEM};
    assert_written(others, 1);
    const unsigned files = open_files();
    for (size_t i = 0; i < 6; i++) {
        for (unsigned nth = 0;; nth++) {
            assert_int_equal(mkdir(below("holders/0123456789abcdef"), 0700), 0); /* so that there is something to remove */
            put_file(object_path(7, ".part"), "half", 0600);
            if (nth % 2) assert_int_equal(unlink(below("key")), 0);
            inject(ANY_CALL, numbers[i % 3], nth, i < 3 ? 1 : 1000);
            bool good = use_folder(&folder);
            bool fired = fault.fired > 0;
            inject_nothing();
            if (!good && (error.os_error != numbers[i % 3] || !fired)) fail_msg("call %u: %s", nth, error.message);
            assert_int_equal(open_files(), files);
            tms_shared_folder_t *next = open_folder();
            if (!exists(below("holders/0123456789abcdef"))) mkdir(below("holders/0123456789abcdef"), 0700);
            tms_shared_folder_clean(next, &quiet);
            assert_int_equal(count_names(below("holders")), 3); /* with those of the test */
            assert_int_equal(count_names(below("objects")), 1);
            assert_int_equal(links_of(object_path(1, "")), 2);
            assert_int_equal(assert_held(next, 1), assert_held(others, 1));
            close_folder(next);
            if (!fired) break;
        }
    }
}

int main(void) {
#define ENTRY_TEST(test) cmocka_unit_test_setup_teardown(test, open_two, close_two)
    const struct CMUnitTest tests[] = {
        ENTRY_TEST(an_object_from_claim_to_end),
        ENTRY_TEST(an_object_that_is_only_awaited),
        ENTRY_TEST(an_object_that_is_held_already),
        ENTRY_TEST(a_claim_that_is_given_up),
        ENTRY_TEST(an_object_of_another_size_is_made_again),
        ENTRY_TEST(what_is_no_file),
        ENTRY_TEST(an_unfinished_file),
        ENTRY_TEST(a_file_that_a_dead_writer_has_linked),
        ENTRY_TEST(a_whole_object_that_has_both_names),
        ENTRY_TEST(an_object_that_is_published_before_the_claim),
        ENTRY_TEST(a_claim_that_another_process_takes_first),
        ENTRY_TEST(a_claim_that_goes_while_it_is_looked_at),
        ENTRY_TEST(a_last_link_that_goes_while_another_is_made),
        ENTRY_TEST(a_name_that_goes_after_the_link),
        ENTRY_TEST(a_lost_name_comes_back),
        ENTRY_TEST(an_object_that_comes_first),
        ENTRY_TEST(an_object_that_came_first_goes_again),
        ENTRY_TEST(an_unfinished_file_that_is_deleted),
        ENTRY_TEST(a_folder_that_is_deleted),
        ENTRY_TEST(an_object_beyond_the_limit_for_files),
        ENTRY_TEST(writes_that_are_short_or_interrupted),
        ENTRY_TEST(a_full_folder),
        ENTRY_TEST(every_call_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
