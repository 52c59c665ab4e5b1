/* The thread of a resume in the background (pending.h). It holds a reference to the pending resume. No lock. */
#ifndef TMS_BACKGROUND_H
#define TMS_BACKGROUND_H

#include "core/transition/pending.h"

/* tms_api_t.resume_begin. Any thread that is not inside a pause or resume. If no thread can be started, the call itself
 * resumes. */
tms_status_t tms_pending_begin(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t **pending,
                               tms_error_t *error);

#endif
