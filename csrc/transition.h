/* pause and resume: one call moves many segments, or none.
 *
 * pause:  take the turn; mark PAUSING -> synchronise every affected device -> ask what is live -> plan every backup -> save
 *         every backup, all devices at once -- commit point -- -> unmap and release each -> mark PAUSED.
 * resume: (take the devices' locks;) take the turn; mark RESUMING -> on all devices at once, those with most to copy first:
 *         create, map and give access to each and load its backup, and wait -- commit point -- -> mark ACTIVE, let the
 *         backups go.
 *
 * A failure before the commit point undoes this call's work and leaves every segment as it was, except in a pending resume
 * that a stream waits for already (pending.h). After it, pause goes on with the rest, marks what the driver refused DAMAGED,
 * and reports all of it. Segments freed meanwhile are disposed of at the end.
 *
 * A failed call waits for its copies before it undoes anything. Where a device cannot be waited for, what it may still be
 * copying to stays mapped, DAMAGED and with its backup, and host memory that it may still be writing to waits in the
 * quarantine. A device that is lost copies nothing any more.
 *
 * Selected segments that were DAMAGED before, and that the driver has refused again to take back, are passed over: a resume
 * that has resumed the rest then fails with what the driver said, and a pause logs it.
 *
 * A resume with a timeout that finds too little memory undoes everything, gives the turn away, and tries again from the
 * beginning once as much is free as is needed. Until its commit point a call asks the caller's `interrupted` wherever it
 * waits (wait.h), and undoes everything if it is to stop.
 *
 * Any thread, but not from inside another of these calls on the same thread (`interrupted`, a signal handler, a finaliser).
 * Takes the saver's lock for marking only. transition.c has what both have in common, pause.c, resume.c and restore.c the
 * rest. */
#ifndef TMS_TRANSITION_H
#define TMS_TRANSITION_H

#include "saver.h"

tms_status_t tms_transition_pause(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                  tms_error_t *error);
tms_status_t tms_transition_resume(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                   tms_error_t *error);

/* The same for resume(wait=False): tells `pending` (pending.h) how far it is. */
tms_status_t tms_transition_resume_pending(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t *pending,
                                           tms_report_t *report, tms_error_t *error);

/* tms_api_t.in_transition. */
bool tms_transition_is_inside(void);

#endif
