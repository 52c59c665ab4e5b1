/* Guards the shared store's folder between processes: writers that are killed or stopped, starts at once, clean-ups beside
 * links, and forks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <sched.h>

#include "backup/shared/entry.h"
#include "base/hash.h"
#include "support/shared_fixture.h"

static tms_shared_folder_t child_folder;

/* Opens the folder in a child. */
static const tms_shared_folder_t *open_in_child(void) {
    CHECK(tms_shared_folder_open(&child_folder, root, &quiet, &context, &error) == TMS_OK);
    return &child_folder;
}

static void close_in_child(void) { tms_shared_folder_close(&child_folder, &quiet); }

static tms_shared_attempt_t claim_in_child(unsigned number) {
    tms_shared_attempt_t claim;
    CHECK(try_object(&child_folder, number, true, &claim) == TMS_OK && claim.state == TMS_SHARED_CLAIMED);
    return claim;
}

/* ---- writers ---- */

enum { HALF = OBJECT_BYTES / 2 };

static void write_in_two_parts(const child_t *parent) {
    open_in_child();
    tms_shared_attempt_t claim = claim_in_child(1);
    CHECK(write_part(&child_folder, 1, claim.fd, 0, HALF) == TMS_OK);
    tell(parent);
    CHECK(hear(parent));
    CHECK(write_part(&child_folder, 1, claim.fd, HALF, OBJECT_BYTES) == TMS_OK);
    CHECK(finish(&child_folder, 1, &claim.fd) == TMS_OK);
    tell(parent);
    CHECK(hear(parent));
    close_in_child();
}

static void assert_busy(const tms_shared_folder_t *folder, unsigned number, uint64_t written) {
    tms_shared_attempt_t attempt;
    assert_int_equal(try_object(folder, number, true, &attempt), TMS_OK);
    assert_int_equal(attempt.state, TMS_SHARED_BUSY);
    assert_int_equal(attempt.written, written);
}

static void a_writer_that_is_killed(void **state) {
    (void)state;
    bool written;
    tms_shared_folder_t *folder = open_folder();
    child_t writer = start(write_in_two_parts);
    assert_true(hear(&writer));
    assert_busy(folder, 1, HALF);
    kill_child(&writer);
    assert_true(get_object(folder, 1, &written));
    assert_true(written);
    assert_int_equal(count_names(below("holders")), 2);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(links_of(object_path(1, "")), 2);
    close_folder(folder);
    assert_nothing_left();
}

static void a_writer_that_is_killed_is_cleaned_up(void **state) {
    (void)state;
    tms_shared_folder_t *folder = open_folder();
    child_t writer = start(write_in_two_parts);
    assert_true(hear(&writer));
    tms_shared_folder_clean(folder, &quiet);
    assert_busy(folder, 1, HALF);
    kill_child(&writer);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("objects")), 0);
    assert_int_equal(count_names(below("holders")), 1);
    close_folder(folder);
}

static void a_writer_that_is_stopped(void **state) {
    (void)state;
    int status;
    bool written;
    tms_shared_folder_t *folder = open_folder();
    child_t writer = start(write_in_two_parts);
    assert_true(hear(&writer));
    kill(writer.pid, SIGSTOP);
    assert_int_equal(waitpid(writer.pid, &status, WUNTRACED), writer.pid);
    assert_true(WIFSTOPPED(status));
    tell(&writer);
    assert_busy(folder, 1, HALF);
    tms_shared_folder_clean(folder, &quiet);
    assert_busy(folder, 1, HALF);
    kill(writer.pid, SIGCONT);
    assert_true(hear(&writer));
    assert_true(get_object(folder, 1, &written));
    assert_false(written);
    tell(&writer);
    assert_ends_well(&writer);
    close_folder(folder);
    assert_nothing_left();
}

static void what_another_process_holds_survives_its_writer(void **state) {
    (void)state;
    bool written;
    tms_shared_folder_t *folder = open_folder();
    child_t writer = start(write_in_two_parts);
    assert_true(hear(&writer));
    tell(&writer);
    assert_true(hear(&writer));
    assert_true(get_object(folder, 1, &written));
    kill_child(&writer);
    tms_shared_folder_clean(folder, &quiet);
    assert_int_equal(count_names(below("holders")), 1);
    assert_int_equal(links_of(object_path(1, "")), 2);
    assert_true(get_object(folder, 1, &written));
    assert_false(written);
    close_folder(folder);
}

/* ---- many processes ---- */

enum { STARTS = 8, ROUNDS = 20, SHARED_OBJECTS = 16 };

/* Waits for a message, opens the folder, and sends a hash of the key. */
static void send_key(const child_t *parent) {
    CHECK(hear(parent));
    uint64_t hash = tms_hash_bytes(TMS_HASH_START, open_in_child()->key, sizeof(tms_shared_key_t));
    CHECK(write(parent->to, &hash, sizeof hash) == sizeof hash);
    CHECK(hear(parent));
    close_in_child();
}

static void first_starts_make_one_key(void **state) {
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        child_t children[STARTS];
        uint64_t first = 0, hash;
        snprintf(root, sizeof root, "%.200s/store %d", base, round);
        for (int i = 0; i < STARTS; i++) children[i] = start(send_key);
        for (int i = 0; i < STARTS; i++) tell(&children[i]);
        for (int i = 0; i < STARTS; i++) {
            assert_int_equal(read(children[i].from, &hash, sizeof hash), sizeof hash);
            if (i == 0) first = hash;
            assert_true(hash == first);
        }
        assert_int_equal(count_names(below("holders")), STARTS);
        assert_int_equal(count_names(root), 3);
        for (int i = 0; i < STARTS; i++) tell(&children[i]);
        for (int i = 0; i < STARTS; i++) assert_ends_well(&children[i]);
        assert_nothing_left();
    }
}

/* Gets all objects, beginning at its own place, and sends how many of them it has written. */
static void share_the_work(const child_t *parent) {
    unsigned char count = 0;
    bool have[SHARED_OBJECTS] = {false};
    open_in_child();
    CHECK(hear(parent));
    for (unsigned left = SHARED_OBJECTS, i = (unsigned)getpid(); left > 0; i++) {
        bool written = false;
        if (have[i % SHARED_OBJECTS]) continue;
        error.message[0] = '\0';
        have[i % SHARED_OBJECTS] = get_object(&child_folder, i % SHARED_OBJECTS, &written);
        CHECK(error.message[0] == '\0');
        left -= have[i % SHARED_OBJECTS];
        count += written;
        if (!have[i % SHARED_OBJECTS]) sched_yield();
    }
    CHECK(write(parent->to, &count, 1) == 1);
    CHECK(hear(parent));
    close_in_child();
}

static void each_object_is_written_once(void **state) {
    (void)state;
    for (int round = 0; round < ROUNDS; round++) {
        child_t children[STARTS];
        unsigned total = 0;
        for (int i = 0; i < STARTS; i++) children[i] = start(share_the_work);
        for (int i = 0; i < STARTS; i++) tell(&children[i]);
        for (int i = 0; i < STARTS; i++) {
            unsigned char count;
            assert_int_equal(read(children[i].from, &count, 1), 1);
            total += count;
        }
        assert_int_equal(total, SHARED_OBJECTS);
        for (unsigned i = 0; i < SHARED_OBJECTS; i++) assert_int_equal(links_of(object_path(i, "")), 1 + STARTS);
        assert_int_equal(count_names(below("objects")), SHARED_OBJECTS);
        for (int i = 0; i < STARTS; i++) tell(&children[i]);
        for (int i = 0; i < STARTS; i++) assert_ends_well(&children[i]);
        assert_nothing_left();
    }
}

enum { FEW_OBJECTS = 3, LINKS = 400, WORKERS = 4 };

/* Leaves what looks like a dead process, so that each clean-up looks at the objects. */
static void clean_all(unsigned number) {
    char path[64];
    snprintf(path, sizeof path, "holders/.%015x0", number);
    CHECK(mkdir(below(path), 0700) == 0 || errno == EEXIST);
    tms_shared_folder_clean(&child_folder, &quiet);
}

/* Links or writes an object, cleans up, and gives the object up again. A held object must have its contents. */
static void link_and_clean(const child_t *parent) {
    unsigned random = (unsigned)getpid();
    open_in_child();
    CHECK(hear(parent));
    for (int i = 0; i < LINKS; i++) {
        tms_shared_attempt_t attempt;
        random = random * 1103515245u + 12345u;
        unsigned number = (random >> 16) % FEW_OBJECTS;
        CHECK(try_object(&child_folder, number, true, &attempt) == TMS_OK);
        if (attempt.state == TMS_SHARED_CLAIMED) {
            CHECK(write_part(&child_folder, number, attempt.fd, 0, OBJECT_BYTES) == TMS_OK);
            CHECK(finish(&child_folder, number, &attempt.fd) == TMS_OK);
        }
        clean_all(random >> 8);
        if (attempt.state == TMS_SHARED_BUSY) continue;
        CHECK(has_contents(attempt.fd, number));
        close(attempt.fd);
        CHECK(exists(holder_path(&child_folder, name_of(number).text)));
        CHECK(try_object(&child_folder, number, false, &attempt) == TMS_OK && attempt.state == TMS_SHARED_HELD);
        CHECK(has_contents(attempt.fd, number));
        close(attempt.fd);
        drop(&child_folder, number);
    }
    CHECK(tms_shared_folder_is_current(&child_folder, root));
    close_in_child();
}

static void clean_ups_beside_links(void **state) {
    (void)state;
    child_t children[WORKERS];
    tms_shared_folder_t *folder = open_folder();
    for (int i = 0; i < WORKERS; i++) children[i] = start(link_and_clean);
    for (int i = 0; i < WORKERS; i++) tell(&children[i]);
    for (int i = 0; i < WORKERS; i++) assert_ends_well(&children[i]);
    assert_int_equal(mkdir(below("holders/0123456789abcdef"), 0700), 0);
    tms_shared_folder_clean(folder, &quiet);
    close_folder(folder);
    assert_nothing_left();
}

/* Starts and ends beside clean-ups. A holder that is removed while it is made would be missing at the end. */
static void open_and_close(const child_t *parent) {
    CHECK(hear(parent));
    for (int i = 0; i < LINKS / 8; i++) {
        open_in_child();
        clean_all((unsigned)i);
        CHECK(tms_shared_folder_is_current(&child_folder, root));
        close_in_child();
    }
}

static void starts_beside_clean_ups(void **state) {
    (void)state;
    child_t children[WORKERS];
    for (int i = 0; i < WORKERS; i++) children[i] = start(open_and_close);
    for (int i = 0; i < WORKERS; i++) tell(&children[i]);
    for (int i = 0; i < WORKERS; i++) assert_ends_well(&children[i]);
    tms_shared_folder_t *folder = open_folder();
    tms_shared_folder_clean(folder, &quiet);
    close_folder(folder);
    assert_nothing_left();
}

/* ---- forks ---- */

static tms_shared_folder_t *inherited;

static void forget_and_use(const child_t *parent) {
    (void)parent;
    tms_shared_folder_after_fork_in_child(inherited);
    CHECK(inherited->root == -1 && !inherited->key);
    bool written;
    open_in_child();
    CHECK(get_object(&child_folder, 1, &written) && !written);
    tms_shared_folder_clean(&child_folder, &quiet);
    tms_shared_folder_close(inherited, &quiet);
    close_in_child();
}

static void a_forked_child_neither_unlocks_nor_cleans(void **state) {
    (void)state;
    bool written;
    inherited = open_folder();
    assert_true(get_object(inherited, 1, &written));
    child_t child = start(forget_and_use);
    assert_ends_well(&child);
    assert_true(tms_shared_folder_is_current(inherited, root));
    assert_int_equal(links_of(object_path(1, "")), 2);
    tms_shared_folder_t *second = open_folder();
    tms_shared_folder_clean(second, &quiet); /* the lock is still there */
    assert_int_equal(count_names(below("holders")), 2);
    assert_true(get_object(inherited, 1, &written));
    assert_false(written);
    close_folder(second);
    close_folder(inherited);
    assert_nothing_left();
}

/* Has an object, a claim and a child, which lives on. */
static bool child_executes;
static void fork_a_child(const child_t *parent) {
    bool written;
    open_in_child();
    CHECK(get_object(&child_folder, 1, &written));
    tms_shared_attempt_t claim = claim_in_child(2);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0 && child_executes) {
        dup2(parent->from, STDIN_FILENO);
        dup2(parent->to, STDOUT_FILENO);
        execlp("cat", "cat", (char *)NULL);
        _exit(1);
    }
    if (child == 0) {
        close(claim.fd);
        tms_shared_folder_after_fork_in_child(&child_folder);
        tell(parent);
        while (hear(parent)) tell(parent); /* until the test ends */
        _exit(0);
    }
    for (;;) pause();
}

static void a_child_outlives_its_parent(void **state) {
    (void)state;
    bool written;
    for (int i = 0; i < 2; i++) {
        int status;
        child_executes = i == 1;
        tms_shared_folder_t *folder = open_folder();
        child_t parent = start(fork_a_child);
        if (child_executes) tell(&parent); /* `cat` sends it back when it runs, without the descriptors */
        assert_true(hear(&parent));
        assert_busy(folder, 2, 0);
        tms_shared_folder_clean(folder, &quiet);
        assert_int_equal(count_names(below("holders")), 2);
        kill(parent.pid, SIGKILL);
        assert_int_equal(waitpid(parent.pid, &status, 0), parent.pid);
        tell(&parent);
        assert_true(hear(&parent)); /* the child lives */
        tms_shared_folder_clean(folder, &quiet);
        assert_int_equal(count_names(below("holders")), 1);
        assert_int_equal(count_names(below("objects")), 0);
        assert_true(get_object(folder, 2, &written));
        assert_true(written);
        close(parent.to);
        assert_false(hear(&parent)); /* the child has ended */
        close(parent.from);
        close_folder(folder);
        assert_nothing_left();
    }
}

int main(void) {
#define PROCESS_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        PROCESS_TEST(a_writer_that_is_killed),
        PROCESS_TEST(a_writer_that_is_killed_is_cleaned_up),
        PROCESS_TEST(a_writer_that_is_stopped),
        PROCESS_TEST(what_another_process_holds_survives_its_writer),
        PROCESS_TEST(first_starts_make_one_key),
        PROCESS_TEST(each_object_is_written_once),
        PROCESS_TEST(clean_ups_beside_links),
        PROCESS_TEST(starts_beside_clean_ups),
        PROCESS_TEST(a_forked_child_neither_unlocks_nor_cleans),
        PROCESS_TEST(a_child_outlives_its_parent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
