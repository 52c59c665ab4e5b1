/* The parts of a pause and a resume that implement guard mode (core/model/guard.h). Called by the call that owns the
 * segments, with no lock held.
 *
 * Guarding is an aid for debugging, so a pause does not fail because of it: a segment for which it fails is paused without a
 * guard, with a warning, and is counted. */
#ifndef TMS_GUARD_MODE_H
#define TMS_GUARD_MODE_H

#include "core/transition/transition.h"

/* Maps the guard page over a segment without memory, for these devices. Does nothing if guard mode is off, or if the segment
 * is guarded. On the thread of the call. */
void tms_guard_mode_cover(tms_transition_t *t, tms_segment_t *segment, tms_device_mask_t devices);
/* Called after the last tms_guard_mode_cover of an attempt. */
void tms_guard_mode_end(tms_transition_t *t);
/* Unmaps the guard page from the device's segments on the list, so that memory can be mapped there. The devices that may
 * read it have been waited for (`done.quiesced`). It runs on the thread of the device's part. */
tms_status_t tms_guard_mode_lift(tms_transition_t *t, int device, tms_error_t *error);

#endif
