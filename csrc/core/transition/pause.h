/* Pause. transition.h describes the steps and their order, the locks and the errors. */
#ifndef TMS_PAUSE_H
#define TMS_PAUSE_H

#include "core/saver.h"

/* tms_api_t.pause. Any thread that is not inside a pause or resume. */
tms_status_t tms_transition_pause(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                  tms_error_t *error);
/* The first half of a compaction (compact.h): pauses only segments that share a run with slack, and marks them with the
 * number of the compaction, which is not 0. They keep their counts of the devices' locks. *slack_bytes, also after a
 * failure: how much was returned. */
tms_status_t tms_transition_pause_slack(tms_saver_t *saver, const tms_selection_t *selection, uint64_t compaction,
                                        uint64_t *slack_bytes, tms_report_t *report, tms_error_t *error);

#endif
