/* The address ranges of segments: reserved from the driver, and cut into spans for the allocations of one kind (kinds.h),
 * which lie side by side (base/address_space.h).
 *
 * A range goes back to the driver when all of it is free and has no memory. One that the driver fails to
 * free is quarantined and retried. A range that the driver frees although it reports a failure is noticed when it reserves
 * the same addresses again.
 *
 * Any thread, without the saver's lock, which is taken for the bookkeeping, unless a comment says otherwise. */
#ifndef TMS_RANGES_H
#define TMS_RANGES_H

#include "core/model/saver.h"

/* Gives a segment, whose tag, device and backup are set, bare addresses for `bytes`, a multiple of the granularity. */
tms_status_t tms_ranges_take(tms_saver_t *saver, tms_segment_t *segment, uint64_t bytes, const tms_driver_table_t *driver,
                             const tms_error_context_t *context, tms_error_t *error);
/* Gives bare addresses to a guard page, which lies beside no allocation. */
tms_status_t tms_ranges_take_guard_page(tms_saver_t *saver, tms_segment_t *page, uint64_t bytes,
                                        const tms_driver_table_t *driver, const tms_error_context_t *context,
                                        tms_error_t *error);
/* Under the saver's lock: removes a range that is bare from the registry. Returns it for tms_ranges_free, or NULL. */
tms_range_t *tms_ranges_remove_bare(tms_saver_t *saver, tms_range_t *range);
/* Frees a range that was removed. Does nothing for NULL. */
void tms_ranges_free(tms_saver_t *saver, tms_range_t *range);

#endif
