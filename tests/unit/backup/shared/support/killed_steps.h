/* A child that is killed before one of its system calls. The ordinary tests take some of them, TMS_EVERY_KILL all
 * (make shared-kills). Included once in a program. */
#ifndef TMS_TESTS_KILLED_STEPS_H
#define TMS_TESTS_KILLED_STEPS_H

#include "shared_fixture.h"

#include <sys/ptrace.h>

enum { USUAL_STEP = 7, SYSTEM_CALL = SIGTRAP | 0x80 };

static inline unsigned step(void) { return getenv("TMS_EVERY_KILL") ? 1 : USUAL_STEP; }

/* Returns 0 where processes cannot be traced. */
static inline pid_t start_traced(void (*body)(void)) {
    int status;
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(PATIENCE_SECONDS);
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(2);
        raise(SIGSTOP);
        body();
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFSTOPPED(status)) return 0;
    assert_int_equal(ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL)), 0);
    return pid;
}

/* Lets the child make `calls` system calls, and kills it before the next one. Returns false if it has ended before. */
static inline bool kill_after(pid_t pid, unsigned calls) {
    int status;
    for (unsigned stops = 0;;) {
        assert_int_equal(ptrace(PTRACE_SYSCALL, pid, NULL, NULL), 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WIFEXITED(status)) {
            assert_int_equal(WEXITSTATUS(status), 0);
            return false;
        }
        assert_true(WIFSTOPPED(status));
        if (WSTOPSIG(status) != SYSTEM_CALL) fail_msg("the child got signal %d", WSTOPSIG(status));
        /* Each call stops twice: before and after. */
        if (stops++ != 2 * calls) continue;
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        return true;
    }
}

#endif
