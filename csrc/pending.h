/* Resumes that go on while their callers do something else: resume(wait=False).
 *
 * A pending resume is an ordinary one (transition.h) on a thread of its own. A device that owns some of what it restores is
 * ready when all of that is mapped and the last copy queued, with an event behind it where there is one. Once every such
 * device is ready, streams of the program can be made to wait for the events. From then on the call is beyond undoing: a
 * kernel may be using what it restored. An attempt that leaves damaged allocations out is never ready, because a stream
 * cannot wait for those: a wait for it ends with the call.
 *
 * The thread and the caller's handle hold a pending resume, and the last to let go frees it. Its lock is a leaf. The saver's
 * list of those under way is there for the end of the process, which stops them. */
#ifndef TMS_PENDING_H
#define TMS_PENDING_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "device.h"
#include "wait.h"

struct tms_saver;
struct tms_copier;

/* Those under way; in the saver. */
typedef struct tms_pendings {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int running;
    int abandoned;     /* of them, those that no close waits for any more: the process ends */
    _Atomic bool stop; /* each is to end, with everything undone that can be */
} tms_pendings_t;

void tms_pendings_init(tms_pendings_t *pendings);
/* Stops those that are under way and waits for them until `deadline` (tms_wait_now; INFINITY: none). What is left then is
 * abandoned: a later call does not wait for it, and no new one gets far. */
void tms_pendings_close(tms_pendings_t *pendings, double deadline);
/* In a forked child, with `lock` held by the forking thread. */
void tms_pendings_after_fork_in_child(tms_pendings_t *pendings);

/* tms_api_t. */
tms_status_t tms_pending_begin(struct tms_saver *saver, const tms_selection_t *selection, tms_pending_t **pending,
                               tms_error_t *error);
int32_t tms_pending_done(tms_pending_t *pending);
tms_status_t tms_pending_wait(tms_pending_t *pending, int32_t (*interrupted)(void *), void *context, tms_report_t *report,
                              tms_error_t *error);
tms_status_t tms_pending_wait_stream(tms_pending_t *pending, void *stream, int32_t (*interrupted)(void *), void *context,
                                     tms_error_t *error);
void tms_pending_release(tms_pending_t *pending);

/* For resume.c and restore.c, on the threads of the call; NULL is an ordinary call. */
/* An attempt begins, and each of these devices is going to be ready. 0: no stream may rely on this attempt. */
void tms_pending_expect(tms_pending_t *pending, tms_device_mask_t devices);
/* All memory of the device is mapped, and the last copy is in the copier's stream, whose context is current; NULL: nothing
 * is copied. */
tms_status_t tms_pending_ready(tms_pending_t *pending, int device, const struct tms_copier *copier,
                               const tms_error_context_t *context, tms_error_t *error);
/* The attempt has failed: whether it can still be undone. No further stream can rely on it. */
bool tms_pending_may_undo(tms_pending_t *pending);

#endif
