/* Tests of what a process has once and for good, each in a process of its own that ends as programs do, with handlers. */
#ifndef TMS_TEST_OWN_PROCESS_H
#define TMS_TEST_OWN_PROCESS_H

/* The status of a process whose test cannot be made here: the test is skipped. */
enum { SKIPPED = 77 };

/* Runs `body` in a child. Returns wait's status, -1 where there was no child; a deadlock ends by SIGALRM. */
int run_in_child(void (*body)(void));

/* Ends a child of a process with threads. TSan takes those that have ended for threads that will not be joined, and makes
 * that the status of _exit; they are the parent's. */
_Noreturn void end_child(int status);

/* Runs it and fails the test unless the child exits with 0. */
void assert_exits(void (*body)(void));

#endif
