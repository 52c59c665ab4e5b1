/* Guards that a process that is killed before any system call of a pause with shared backups, or of its exit, loses nothing
 * of other processes and leaves nothing that the next pause of another process does not remove.
 *
 * All threads that the pause starts are traced, and their calls are counted together. The ordinary test takes some of the
 * calls, TMS_EVERY_KILL all (make shared-kills). */
#include "support/shared_replica.h"

#include <linux/ptrace.h>

enum { USUAL_KILLS = 8, TRACED = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL };

/* ---- the traced process ---- */

static bool enters_call(pid_t thread) {
    struct ptrace_syscall_info call;
    return ptrace(PTRACE_GET_SYSCALL_INFO, thread, (void *)sizeof call, &call) > 0 && call.op == PTRACE_SYSCALL_INFO_ENTRY;
}

static void kill_traced(pid_t process) {
    int status;
    kill(process, SIGKILL);
    while (waitpid(-1, &status, __WALL) != process || WIFSTOPPED(status)) continue;
    assert_true(WIFSIGNALED(status));
}

/* Lets the stopped process make `calls` system calls, and kills it before the next one. *made becomes the number of calls.
 * Returns false if it came to its end before, where it is killed as well, unless it has exited. */
static bool kill_after(pid_t process, unsigned calls, unsigned *made) {
    int status;
    assert_int_equal(ptrace(PTRACE_SETOPTIONS, process, NULL, (void *)TRACED), 0);
    assert_int_equal(ptrace(PTRACE_SYSCALL, process, NULL, NULL), 0);
    for (*made = 0;;) {
        const pid_t thread = waitpid(-1, &status, __WALL);
        assert_true(thread > 0);
        if (thread == process && WIFEXITED(status)) {
            assert_int_equal(WEXITSTATUS(status), 0);
            return false;
        }
        if (!WIFSTOPPED(status)) continue; /* a thread has ended */
        const bool ended = WSTOPSIG(status) == SIGUSR1, call = WSTOPSIG(status) == (SIGTRAP | 0x80) && enters_call(thread);
        if (ended || (call && (*made)++ == calls)) {
            kill_traced(process);
            return !ended;
        }
        assert_true(call || WSTOPSIG(status) == (SIGTRAP | 0x80) || WSTOPSIG(status) == SIGTRAP ||
                    WSTOPSIG(status) == SIGSTOP);
        (void)ptrace(PTRACE_SYSCALL, thread, NULL, NULL); /* fails if the process is ending */
    }
}

typedef enum moment { FIRST_PAUSE, LATER_PAUSE, EXIT } moment_t;

/* Starts a replica with contents that have not changed since its last pause, contents that have changed, contents (seed 4)
 * that another process holds, and contents (seed 5) of which there is an unfinished file. It stops before that moment.
 * Returns false if it cannot be traced. */
static bool start_traced(replica_t *traced, moment_t moment) {
    int status;
    *traced = start();
    ask(traced, "allocate 1");
    ask(traced, "allocate 2");
    if (moment != FIRST_PAUSE) {
        ask(traced, "pause");
        ask(traced, "resume");
    }
    ask(traced, "refill 1 3");
    ask(traced, "allocate 4");
    ask(traced, "allocate 5");
    if (moment == EXIT) ask(traced, "pause");
    tell(traced, moment == EXIT ? "traced_exit" : "traced_pause");
    assert_int_equal(waitpid(traced->pid, &status, __WALL), traced->pid);
    return WIFSTOPPED(status);
}

static void close_traced(const replica_t *traced) {
    fclose(traced->to);
    fclose(traced->from);
}

/* ---- what is left ---- */

/* Whether contents have their object decides what the pause copies, and that depends on where the other was killed. */
static void check_what_is_left(bool beside) {
    const replica_t second = start();
    ask(&second, "allocate 1");
    ask(&second, "allocate 3");
    ask(&second, "allocate 4");
    ask(&second, "allocate 5");
    pause_replica(&second, beside ? 3 * OBJECT_BYTES + 4 * TAIL_BYTES : 4 * CONTENT_BYTES, beside ? OBJECT_BYTES : 0);
    assert_folder(1 + beside, 4, 4 + beside);
    ask(&second, "resume");
    assert_ends_well(&second);
    assert_folder(beside, beside, beside);
}

static void put_file(const char *path, const char *text) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static char kept[NAME_MAX], wanted[NAME_MAX];

static void note_kept(const char *name) { snprintf(kept, sizeof kept, "%s", name); }
static void note_wanted(const char *name) {
    if (strcmp(name, kept) != 0) snprintf(wanted, sizeof wanted, "%s", name);
}

/* A dead holder with a link, and an unfinished file of WANTED. */
static void leave_something(void) {
    char path[NAME_MAX + 16];
    assert_int_equal(mkdir(below("holders/0123456789abcdef"), 0700), 0);
    put_file(below("holders/0123456789abcdef/lock"), "");
    put_file(below("holders/0123456789abcdef/00000000000000000000000000000001"), "some");
    assert_int_equal(link(below("holders/0123456789abcdef/00000000000000000000000000000001"),
                          below("objects/00000000000000000000000000000001")),
                     0);
    snprintf(path, sizeof path, "objects/%s.part", wanted);
    put_file(below(path), "half");
}

/* ---- the tests ---- */

/* Kills processes at different calls. */
static void kill_each(bool beside, moment_t moment) {
    unsigned step = 1, made = 0;
    bool killed = true;
    for (unsigned calls = 0; killed; calls += step) {
        replica_t traced;
        if (beside) leave_something();
        if (!start_traced(&traced, moment)) {
            close_traced(&traced);
            skip();
        }
        /* The first process shows how many calls there are. */
        killed = kill_after(traced.pid, calls == 0 ? UINT_MAX : calls - 1, &made) || calls == 0;
        close_traced(&traced);
        if (calls == 0 && !getenv("TMS_EVERY_KILL")) step = made / USUAL_KILLS;
        check_what_is_left(beside);
        if (!beside) assert_int_equal(remove_temporary_directory(root), 0);
    }
    print_message("%u system calls\n", made);
}

static void beside_a_living_process(moment_t moment) {
    const replica_t living = start(), scout = start();
    ask(&living, "allocate 4");
    ask(&living, "pause");
    for_each("objects", note_kept);
    ask(&scout, "allocate 5");
    ask(&scout, "pause");
    for_each("objects", note_wanted);
    assert_ends_well(&scout);
    kill_each(true, moment);
    ask(&living, "resume");
    assert_ends_well(&living);
    assert_folder(0, 0, 0);
}

static void the_first_pause(void **state) {
    (void)state;
    kill_each(false, FIRST_PAUSE);
}

static void a_pause_beside_a_living_process(void **state) {
    (void)state;
    beside_a_living_process(LATER_PAUSE);
}

static void an_exit_while_memory_is_paused(void **state) {
    (void)state;
    beside_a_living_process(EXIT);
}

int main(int argc, char **argv) {
    REPLICA_MAIN(argc, argv)
#define KILL_TEST(test) cmocka_unit_test_setup_teardown(test, make, release)
    const struct CMUnitTest tests[] = {
        KILL_TEST(the_first_pause),
        KILL_TEST(a_pause_beside_a_living_process),
        KILL_TEST(an_exit_while_memory_is_paused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
