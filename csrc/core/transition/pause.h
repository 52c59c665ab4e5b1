/* Pause. steps.h describes the steps and their order, the locks and the errors. */
#ifndef TMS_PAUSE_H
#define TMS_PAUSE_H

#include "core/model/saver.h"

/* tms_api_t.pause. Any thread that is not inside a pause or resume. */
tms_status_t tms_pause_perform(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                               tms_error_t *error);
/* tms_api_t.check_pause: waits for the devices, asks what is live, plans every backup, checks that there is room for them,
 * and cancels the plans. A success holds no room for the pause. Not counted as a pause. Any thread that is not inside a
 * pause or resume. */
tms_status_t tms_pause_check(tms_saver_t *saver, const tms_selection_t *selection, tms_error_t *error);

#endif
