/* Resume. steps.h describes the steps and their order, the locks and the errors. */
#ifndef TMS_RESUME_H
#define TMS_RESUME_H

#include "core/transition/pending.h"

/* tms_api_t.resume. Any thread that is not inside a pause or resume. */
tms_status_t tms_resume_perform(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                tms_error_t *error);
/* tms_api_t.resume_begin: resumes on a thread of its own (pending.h). Any thread that is not inside a pause or resume. If no
 * thread can be started, the call itself resumes. */
tms_status_t tms_resume_begin(tms_saver_t *saver, const tms_selection_t *selection, tms_pending_t **pending,
                              tms_error_t *error);
/* Performs the resume with the selection of `pending`, and reports to it which devices are ready. */
tms_status_t tms_resume_run_pending(tms_saver_t *saver, tms_pending_t *pending, tms_report_t *report, tms_error_t *error);

#endif
