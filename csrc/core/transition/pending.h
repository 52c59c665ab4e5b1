/* The handle of a resume in the background: resume(wait=False).
 *
 * A pending resume is an ordinary one on its own thread (resume.h). A device is ready when all of its
 * selected segments are mapped and their last copy is queued, followed by an event. Once every device concerned is ready,
 * streams of the program can wait for the events. From then on the call cannot be undone, because kernels may use the
 * restored memory. An attempt that skips damaged allocations is never ready, because a stream cannot wait for these; a wait
 * then ends with the call.
 *
 * Its memory is chosen when it is begun: memory that was paused by then, or that a pause was about to take. So a resume that
 * finds nothing to do never undoes a later pause.
 *
 * The thread and the caller's handle hold a reference each; the last one dropped frees it. Any thread. Its lock is a
 * leaf. */
#ifndef TMS_PENDING_H
#define TMS_PENDING_H

#include "core/model/saver.h"

struct tms_copier;

/* For resume.c: creates a pending resume with two references and a copy of the selection, without the caller's
 * callbacks. */
tms_status_t tms_pending_create(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t **pending,
                                const tms_error_context_t *context, tms_error_t *error);
tms_saver_t *tms_pending_saver(const tms_pending_t *pending);
const tms_selection_t *tms_pending_selection(const tms_pending_t *pending);
/* Returns the saver's last mark at the time when the resume was begun. The resume skips segments that later calls have
 * paused (segment->paused_by). */
uint64_t tms_pending_begun(const tms_pending_t *pending);
/* Publishes the result of the call, and drops the thread's reference. */
void tms_pending_end(tms_pending_t *pending, tms_status_t status, const tms_report_t *report, const tms_error_t *error);

/* The functions of tms_api_t. */
int32_t tms_pending_done(tms_pending_t *pending);
tms_status_t tms_pending_wait(tms_pending_t *pending, int32_t (*interrupted)(void *), void *context, tms_report_t *report,
                              tms_error_t *error);
tms_status_t tms_pending_await(tms_pending_t *pending, int32_t (*interrupted)(void *), void *context, tms_error_t *error);
tms_status_t tms_pending_wait_stream(tms_pending_t *pending, void *stream, int32_t (*interrupted)(void *), void *context,
                                     tms_error_t *error);
void tms_pending_release(tms_pending_t *pending);

/* For resume.c and restore.c, on the threads of the call. `pending` NULL: an ordinary call. */
/* Called when an attempt begins in which each of these devices will become ready. If `devices` is 0, no stream may rely on
 * this attempt. */
void tms_pending_expect(tms_pending_t *pending, tms_device_mask_t devices);
/* Called when all memory of the device is mapped and the last copy is in the copier's stream, whose context is current.
 * `copier` is NULL if nothing is copied. */
tms_status_t tms_pending_ready(tms_pending_t *pending, int device, const struct tms_copier *copier,
                               const tms_error_context_t *context, tms_error_t *error);
/* Called when the attempt has failed. Returns whether it can be undone. No further stream can rely on it. */
bool tms_pending_may_undo(tms_pending_t *pending);

#endif
