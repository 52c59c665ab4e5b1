/* The return of slack (core/run.h) without a pause of the whole tag: the allocations that share a run with slack are paused
 * with their contents in host memory, and resumed. Memory in use is never moved behind the program's back, so this is
 * a call of the program, with the contract of a pause: nothing uses the memory.
 *
 * Any thread. Two transitions (transition.h), each all or nothing. If the resume fails, the allocations stay PAUSED with
 * their contents. */
#ifndef TMS_TRANSITION_COMPACT_H
#define TMS_TRANSITION_COMPACT_H

#include "core/saver.h"

/* tms_api_t.compact. */
tms_status_t tms_transition_compact(tms_saver_t *saver, const tms_selection_t *selection, tms_report_t *report,
                                    tms_error_t *error);

#endif
