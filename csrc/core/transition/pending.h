/* Resumes that go on while their callers do something else: resume(wait=False).
 *
 * A pending resume is an ordinary one (resume.h) on a thread of its own (background.h). A device that owns some of what it
 * restores is ready when all of that is mapped and the last copy queued, with an event behind it where there is one. Once
 * every such device is ready, streams of the program can be made to wait for the events. From then on the call is beyond
 * undoing: a kernel may be using what it restored. An attempt that leaves damaged allocations out is never ready, because a
 * stream cannot wait for those: a wait for it ends with the call.
 *
 * The thread and the caller's handle hold a reference each, and the last one dropped frees it. Its lock is a leaf. */
#ifndef TMS_PENDING_H
#define TMS_PENDING_H

#include "core/saver.h"

struct tms_copier;

/* For background.h. Made with a copy of the selection, which calls none of the caller's functions, and two references. */
tms_status_t tms_pending_create(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t **pending,
                                const tms_error_context_t *context, tms_error_t *error);
tms_saver_t *tms_pending_saver(const tms_pending_t *pending);
const tms_selection_t *tms_pending_selection(const tms_pending_t *pending);
/* Publishes how the call has ended, and drops the thread's reference. */
void tms_pending_end(tms_pending_t *pending, tms_status_t status, const tms_report_t *report, const tms_error_t *error);

/* tms_api_t. */
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
