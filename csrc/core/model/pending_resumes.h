/* The running pending resumes (pending.h): their number, and whether they are cancelled. Part of the saver; used at process
 * exit. Any thread. Its lock is a leaf. */
#ifndef TMS_PENDING_RESUMES_H
#define TMS_PENDING_RESUMES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct tms_pending_resumes {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int running;
    int abandoned;          /* running resumes for which close no longer waits */
    _Atomic bool cancelled; /* all are cancelled: each undoes its work if it can, and ends */
} tms_pending_resumes_t;

void tms_pending_resumes_init(tms_pending_resumes_t *pending_resumes);
/* Cancels the running resumes and waits for them until `deadline` (tms_wait_now; INFINITY: none). Resumes that are still
 * running at the deadline are abandoned: a later close does not wait for them. New resumes are cancelled. */
void tms_pending_resumes_close(tms_pending_resumes_t *pending_resumes, double deadline);
/* In a forked child, with `lock` held by the forking thread: forgets the parent's resumes. */
void tms_pending_resumes_after_fork_in_child(tms_pending_resumes_t *pending_resumes);

/* Counts a resume that begins (1) or has ended (-1). */
void tms_pending_resumes_count(tms_pending_resumes_t *pending_resumes, int change);
/* A callback for tms_selection_t.interrupted. Returns whether all resumes are cancelled. */
int32_t tms_pending_resumes_is_cancelled(void *pending_resumes);

#endif
