/* The log line that describes a pause or resume. Called on the thread of the call. */
#ifndef TMS_TRANSITION_LOG_H
#define TMS_TRANSITION_LOG_H

#include "core/transition/call.h"

/* Under the saver's lock: records a segment that was paused or resumed. */
void tms_transition_note(tms_transition_t *t, const tms_segment_t *segment);
/* Writes one line, at level info, for a successful call. */
void tms_transition_log(const tms_transition_t *t);

#endif
