/* Ends a pause, a resume or a sample. Sets the new states of the segments, ends the ownership of their runs (model/run.h),
 * and updates their kinds (model/kinds.h) and the shared page.
 *
 * On the thread of the call, with no lock held; takes the saver's lock for the states. */
#ifndef TMS_COMPLETION_H
#define TMS_COMPLETION_H

#include "core/transition/transition.h"

/* Publishes every segment's new state (`moved`: the call has succeeded) and finishes the frees that arrived during the call.
 * The list is empty afterwards. */
void tms_completion_finish(tms_transition_t *t, bool moved);

#endif
