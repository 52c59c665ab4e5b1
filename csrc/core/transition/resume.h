/* Resume. transition.h describes the steps and their order, the locks and the errors. */
#ifndef TMS_RESUME_H
#define TMS_RESUME_H

#include "core/model/saver.h"

/* tms_api_t.resume. Any thread that is not inside a pause or resume. */
tms_status_t tms_transition_resume(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                   tms_error_t *error);
/* Performs resume(wait=False) with the selection of `pending` (pending.h), and reports to it which devices are ready. */
tms_status_t tms_transition_resume_pending(tms_saver_t *saver, tms_pending_t *pending, tms_report_t *report,
                                           tms_error_t *error);

#endif
