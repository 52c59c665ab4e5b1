/* The address ranges of segments: reserved from the driver, and cut into pieces for the allocations of one kind, which lie
 * side by side (base/address_space.h). A kind is a tag, a backup choice and a device.
 *
 * A range goes back to the driver when nothing of it is in use. One that the driver fails to free is quarantined and
 * retried. A range that the driver frees although it reports a failure is noticed when it reserves the same addresses again.
 *
 * Any thread, without the saver's lock, which is taken for the bookkeeping. The kinds live as long as the saver. */
#ifndef TMS_RANGES_H
#define TMS_RANGES_H

#include "core/saver.h"

/* Gives a segment, whose tag, device and backup are set, addresses for `bytes`, a multiple of the granularity. */
tms_status_t tms_ranges_take(tms_saver_t *saver, tms_segment_t *segment, uint64_t bytes, const tms_driver_table_t *driver,
                             const tms_error_context_t *context, tms_error_t *error);
/* The same for a guard page, which lies beside no allocation. */
tms_status_t tms_ranges_take_page(tms_saver_t *saver, tms_segment_t *page, uint64_t bytes, const tms_driver_table_t *driver,
                                  const tms_error_context_t *context, tms_error_t *error);
/* Takes the addresses of a segment back. Nothing may be mapped there. */
void tms_ranges_give_back(tms_saver_t *saver, tms_segment_t *segment);
/* For tests: forgets the kinds. No segment may have addresses. */
void tms_ranges_release(tms_saver_t *saver);

#endif
