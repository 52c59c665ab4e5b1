/* For tests of state that a process has only once: each runs in a process of its own that ends as programs do, with
 * handlers. */
#ifndef TMS_TEST_OWN_PROCESS_H
#define TMS_TEST_OWN_PROCESS_H

/* The status of a process whose test is not possible here: the test is skipped. */
enum { SKIPPED = 77 };

/* Runs `body` in a child. Returns wait's status, or -1 without a child; a deadlock ends by SIGALRM. */
int run_in_child(void (*body)(void));

/* Ends a child of a process with threads. TSan takes the parent's ended threads for threads that are never joined, and
 * changes the status of _exit. */
_Noreturn void end_child(int status);

/* Executes this program again with a role as its argument, in the emulator that EMULATOR names, if any (make aarch64).
 * Returns only if that fails. */
void execute_again(const char *role);

/* Moves this process into a mount namespace of its own, in which it may mount. If the kernel refuses that, ends the process
 * with SKIPPED and a message. */
void enter_mount_namespace(void);
/* Mounts a tmpfs with these options on a directory, or ends the process with SKIPPED. */
void mount_memory(const char *directory, const char *options);

/* Runs it and fails the test unless the child exits with 0. */
void assert_exits(void (*body)(void));

#endif
