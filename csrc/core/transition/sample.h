/* A look at resident memory, which counts the bytes of given ranges that still are TMS_GUARD_BYTE. Guard mode fills memory
 * that comes back without contents with this byte.
 *
 * The call is a pause that never commits: take the turn; set PAUSING -> synchronise every affected device -> copy the ranges
 * to host memory, all devices at once -> set ACTIVE. So no other call pauses or unmaps the memory during the copy. Kernels
 * that other threads launch after the wait may still write to it. Segments that are freed during the call are disposed of at
 * its end. The copies are backups that belong to the call. The backups of the segments, including retained ones, do not
 * change. A failure changes nothing.
 *
 * Any thread that is not inside a pause or resume. Locks as in transition.h. */
#ifndef TMS_SAMPLE_H
#define TMS_SAMPLE_H

#include "core/model/saver.h"

/* tms_api_t.count_guard_bytes. */
tms_status_t tms_transition_sample(tms_saver_t *saver, const tms_selection_t *selection, const tms_live_range_t *ranges,
                                   size_t range_count, uint64_t *counts, tms_error_t *error);

#endif
