/* pause and resume: one call moves many segments, or none.
 *
 * pause:  take the turn; mark PAUSING -> synchronise every affected device -> ask what is live -> plan every backup -> save
 *         every backup, all devices at once -- commit point -- -> unmap and release each -> mark PAUSED.
 * resume: (take the devices' locks;) take the turn; mark RESUMING -> on all devices at once, those with most to copy first:
 *         create, map and give access to each and load its backup, and wait -- commit point -- -> mark ACTIVE,
 *         discard the backups.
 *
 * A failure before the commit point undoes this call's work and leaves every segment as it was, except in a pending resume
 * that a stream waits for already (pending.h). After it, pause goes on with the rest, marks what the driver refused DAMAGED,
 * and reports all of it. Segments freed during the call are disposed of at the end.
 *
 * A failed call waits for its copies before it undoes anything. Where a device cannot be waited for, what it may still be
 * copying to stays mapped, DAMAGED and with its backup, and host memory that it may still be writing to waits in the
 * quarantine. A device that is lost copies nothing any more.
 *
 * Selected segments that were DAMAGED before, and that the driver has refused again to take back, are skipped: a resume that
 * has resumed the rest then fails with what the driver said, and a pause logs it.
 *
 * A resume with a timeout that finds too little memory undoes everything, gives the turn away, and tries again from the
 * beginning once as much is free as is needed. Until its commit point a call asks the caller's `interrupted` wherever it
 * waits (wait.h), and undoes everything if it is cancelled.
 *
 * Any thread, but not from inside another of these calls on the same thread (`interrupted`, a signal handler, a finaliser).
 * Takes the saver's lock for marking only. This header declares what both have in common, for pause.c, resume.c and
 * restore.c. */
#ifndef TMS_TRANSITION_H
#define TMS_TRANSITION_H

#include "core/transition/call.h"

/* The frame of a call: checks, the turn, the list, the counters, the report. */
tms_status_t tms_transition_run(tms_transition_t *t, _Atomic uint64_t *successes, tms_report_t *report, tms_error_t *error);
/* One attempt: takes the turn, collects the list, acts, and gives the turn to the next. */
tms_status_t tms_transition_attempt(tms_transition_t *t, tms_error_t *error);

/* Under the lock, before a look at all segments: marks the tags selected, so that asking for each segment costs no search.
 * The mark holds until the lock is given up. */
void tms_transition_begin_look(tms_transition_t *t);
/* Under the lock, in such a look. */
bool tms_transition_selects(const tms_transition_t *t, const tms_segment_t *segment);
/* In such a look: whether it is selected, but the driver has not taken its memory back, so that a resume skips it. */
bool tms_transition_skips_damaged(const tms_transition_t *t, const tms_segment_t *segment);

/* Tells the caller how far the copies are, if it wants to know. On the thread of the call. */
void tms_transition_report_progress(tms_transition_t *t);

/* Publishes every segment's new state (`moved`: it did what the call is for) and finishes the frees that came during the
 * call. The list is empty afterwards. */
void tms_transition_finish(tms_transition_t *t, bool moved);

#endif
