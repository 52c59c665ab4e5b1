/* pause and resume: one call moves all selected segments, or none.
 *
 * pause:  take the turn; set PAUSING -> synchronise every affected device -> ask what is live -> plan every backup -> save
 *         every backup, all devices at once -- commit point -- -> unmap and release each -> set PAUSED.
 * resume: (take the devices' locks;) take the turn; set RESUMING -> on all devices at once, those with most to copy first:
 *         create, map and give access to runs of neighbours (layout.h), load each backup, and wait -- commit point -- ->
 * set ACTIVE, discard the backups.
 *
 * A pause with backup="discard" also discards the backups of selected segments that are PAUSED already (discard.h).
 *
 * A failure before the commit point undoes this call's work and leaves every segment unchanged, except in a pending resume
 * that a stream already waits for (pending.h). After it, pause continues with the rest, sets segments that the driver
 * failed to release DAMAGED, and reports them. Segments freed during the call are disposed of at the end.
 *
 * A failed call waits for its copies before it undoes anything. If a device cannot be synchronized, memory that it may still
 * be copying to stays mapped, DAMAGED and with its backup, and host memory that it may still be writing to is quarantined. A
 * lost device copies nothing any more.
 *
 * Selected segments that are DAMAGED and that the driver fails again to release are skipped. A resume then fails with the
 * driver's error after it has resumed the rest; a pause logs the error.
 *
 * A resume with a timeout that finds too little memory undoes everything, releases the turn, and retries from the beginning
 * once enough memory is free. Until its commit point a call polls the caller's `interrupted` wherever it waits (wait.h), and
 * undoes everything if it is cancelled.
 *
 * Any thread, but not from inside another of these calls on the same thread (`interrupted`, a signal handler, a finaliser).
 * Takes the saver's lock to change states only. This header declares the part that the modules of a call share.
 */
#ifndef TMS_STEPS_H
#define TMS_STEPS_H

#include "core/transition/transition.h"

/* Runs a call, with everything that each call does before and after its work: the checks, the turn, the list and the
 * observers (observers.h). */
tms_status_t tms_steps_perform(tms_transition_t *t, tms_error_t *error);
/* One attempt: takes the turn, collects the list, acts, and releases the turn. */
tms_status_t tms_steps_attempt(tms_transition_t *t, tms_error_t *error);

/* Under the lock, before a walk over all segments: marks the selected tags, so that the check of a segment needs no search.
 * The mark is valid until the lock is released. */
void tms_steps_begin_scan(tms_transition_t *t);
/* During such a walk: whether the call selects the segment. */
bool tms_steps_selects(const tms_transition_t *t, const tms_segment_t *segment);
/* During such a walk: whether the segment has a selected tag but is damaged, so that the call skips it. */
bool tms_steps_skips_damaged(const tms_transition_t *t, const tms_segment_t *segment);

/* During such a walk: whether the call discards the backup of the segment, which is paused and has contents (discard.h).
 */
bool tms_steps_discards(const tms_transition_t *t, const tms_segment_t *segment);

/* Waits for all devices of `planned.affected`, as a phase of the call. */
tms_status_t tms_steps_quiesce(tms_transition_t *t, tms_quiesced_t *quiesced, tms_error_t *error);
/* Returns a new number for the `mark` of runs, for a walk over the call's segments that visits each run once. Takes the
 * lock. */
uint64_t tms_steps_mark(tms_transition_t *t);

/* Reports the progress of the copies to on_progress, if set. On the thread of the call. */
void tms_steps_report_progress(tms_transition_t *t);

#endif
