/* The pending resumes under way (pending.h): how many there are, and whether they are cancelled. In the saver, for the end
 * of the process. Its lock is a leaf. */
#ifndef TMS_PENDINGS_H
#define TMS_PENDINGS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct tms_pendings {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int running;
    int abandoned;          /* of them, those that no close waits for any more: the process ends */
    _Atomic bool cancelled; /* all of them: each undoes what it can and ends */
} tms_pendings_t;

void tms_pendings_init(tms_pendings_t *pendings);
/* Cancels those that are under way and waits for them until `deadline` (tms_wait_now; INFINITY: none). What is left then is
 * abandoned: a later call does not wait for it, and no new one gets far. */
void tms_pendings_close(tms_pendings_t *pendings, double deadline);
/* In a forked child, with `lock` held by the forking thread. */
void tms_pendings_after_fork_in_child(tms_pendings_t *pendings);

/* One more (1), or one that has ended (-1). */
void tms_pendings_count(tms_pendings_t *pendings, int change);
/* For tms_selection_t.interrupted, of a tms_pendings_t. */
int32_t tms_pendings_is_cancelled(void *pendings);

#endif
