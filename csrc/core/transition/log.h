/* The log's line about a pause or resume. */
#ifndef TMS_TRANSITION_LOG_H
#define TMS_TRANSITION_LOG_H

#include "core/transition/call.h"

/* Under the lock: notes a segment that has done what the call is for, for the log. */
void tms_transition_note(tms_transition_t *t, const tms_segment_t *segment);
/* One line, at level info, about a call that has succeeded. */
void tms_transition_log(const tms_transition_t *t);

#endif
