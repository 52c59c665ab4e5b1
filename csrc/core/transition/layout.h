/* The layout of a resume, which decides which segments share a run: neighbours of one kind that come back together, up to
 * TMS_MAX_RUN_BYTES.
 *
 * tms_kind_shares_handles (model/kinds.h) decides which segments have a handle of their own.
 *
 * Used by the resume that owns the segments. */
#ifndef TMS_LAYOUT_H
#define TMS_LAYOUT_H

#include "core/transition/transition.h"

/* Places every segment on the list. On the thread of the call; takes the saver's lock. */
void tms_layout_plan(tms_transition_t *t);

/* The functions below are called on the thread of the device's part. */
/* Returns the last of the segments that are placed with `leader`. */
const tms_segment_t *tms_layout_last(const tms_segment_t *leader);
/* Makes these segments refer to `run`, which has memory and belongs to the call. Takes the saver's lock. */
void tms_layout_occupy(tms_transition_t *t, tms_segment_t *leader, tms_run_t *run);
/* Places the second half of these segments separately. Returns false if there is only one segment. */
bool tms_layout_halve(tms_segment_t *leader);

#endif
