#include "own_process.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h> /* needs the first four of the above */

enum { PATIENCE_SECONDS = 60 };

int run_in_child(void (*body)(void)) {
    int status = -1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(PATIENCE_SECONDS);
        body();
        exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return status;
}

_Noreturn void end_child(int status) {
    for (;;) syscall(SYS_exit_group, status);
}

void execute_again(const char *role) {
    const char *emulator = getenv("EMULATOR");
    char program[PATH_MAX] = "";
    if (!emulator || !*emulator) {
        execl("/proc/self/exe", "simulated", role, NULL);
    } else if (readlink("/proc/self/exe", program, sizeof program - 1) > 0) {
        execlp(emulator, emulator, program, role, NULL);
    }
}

/* Tests that the emulator cannot run (make aarch64): a pattern of cmocka. */
__attribute__((constructor)) static void skip_tests(void) {
    const char *pattern = getenv("SKIPPED_TESTS");
    if (pattern && *pattern) cmocka_set_skip_filter(pattern);
}

static bool write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool written = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) close(fd);
    return written;
}

static bool own_users(void) {
    char users[64], groups[64];
    snprintf(users, sizeof users, "%ld %ld 1", (long)geteuid(), (long)geteuid());
    snprintf(groups, sizeof groups, "%ld %ld 1", (long)getegid(), (long)getegid());
    return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && write_text("/proc/self/setgroups", "deny") &&
           write_text("/proc/self/gid_map", groups) && write_text("/proc/self/uid_map", users);
}

static void skip_process(const char *refused) {
    dprintf(STDERR_FILENO, "skipped: the kernel refuses %s (%s)\n", refused, strerror(errno));
    _exit(SKIPPED);
}

void enter_mount_namespace(void) {
    if (unshare(CLONE_NEWNS) != 0 && !own_users()) skip_process("a mount namespace");
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) skip_process("mounts of its own");
}

void mount_memory(const char *directory, const char *options) {
    if (mount("tmpfs", directory, "tmpfs", 0, options) != 0) skip_process("to mount a tmpfs");
}

void assert_exits(void (*body)(void)) {
    int status = run_in_child(body);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == SKIPPED) skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}
