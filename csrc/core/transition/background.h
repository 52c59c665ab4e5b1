/* The thread of a resume that goes on while its caller does something else (pending.h). */
#ifndef TMS_BACKGROUND_H
#define TMS_BACKGROUND_H

#include "core/transition/pending.h"

/* tms_api_t.resume_begin. Any thread that is not inside a pause or resume. Where no thread can be had the call itself
 * resumes. */
tms_status_t tms_pending_begin(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t **pending,
                               tms_error_t *error);

#endif
