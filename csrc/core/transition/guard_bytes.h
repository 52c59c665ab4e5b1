/* The count of guard bytes in resident memory. Guard mode fills memory that comes back without contents with
 * TMS_GUARD_BYTE.
 *
 * The call is a pause that never commits. It takes the turn, so that no other call pauses or resumes the allocations until
 * it ends. Segments that are freed during the call are disposed of at its end. A failure changes nothing.
 *
 * Any thread that is not inside a pause or resume. Locks as in steps.h. */
#ifndef TMS_GUARD_BYTES_H
#define TMS_GUARD_BYTES_H

#include "core/model/saver.h"

/* tms_api_t.count_guard_bytes: counts the bytes of given ranges of resident memory that still are TMS_GUARD_BYTE.
 *
 * Set PAUSING -> synchronise every affected device -> copy the ranges to host memory, all devices at once -> set ACTIVE.
 * Kernels that other threads launch after the wait may still write to the memory. The copies are backups that belong to the
 * call. The backups of the segments, including retained ones, do not change. */
tms_status_t tms_guard_bytes_count(tms_saver_t *saver, const tms_selection_t *selection, const tms_live_range_t *ranges,
                                   size_t range_count, uint64_t *counts, tms_error_t *error);

#endif
